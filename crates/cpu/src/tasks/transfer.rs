//! Calls of the communicator as tasks: made at once, or started by one task and awaited by another.
//!
//! The first worker, which is the thread that launched the program, communicates for its rank; the
//! others meet it at the barriers that the accesses here ask for.

use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_comm::{
    Call, CallSite, CommError, Communicator, CountedEndpoint, FilledRows, Handle, PlacedCall,
    PlannedRows,
};
use phalanx_engine::{EngineError, PartKind};

use super::{Access, Context, Operation, Share, Task, Var};

/// The endpoint of an engine's rank, which one worker at a time uses.
pub(crate) type Endpoint = Mutex<CountedEndpoint>;

impl Operation<'_> {
    /// Plans calls with this rank's endpoint.
    pub(super) fn plan<R>(
        &self,
        plan: impl FnOnce(&mut CountedEndpoint, CallSite<'_>) -> Result<R, CommError>,
    ) -> Result<R, EngineError> {
        let endpoint = self.comm.ok_or_else(|| {
            self.unsupported("other ranks take part; make the engine with CpuEngine::on_rank")
        })?;
        let Operation { program, instr, rank, ranks, .. } = *self;
        let mut line = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        let planned = plan(&mut line, CallSite { program, instr, rank, ranks });
        planned.map_err(|e| self.unsupported(e.to_string()))
    }
}

/// A collective as calls of the communicator, prepared when its program is compiled.
pub(crate) struct Transfer {
    /// One for each piece, and the first element that it takes of every block.
    calls: Vec<PlacedCall>,
    source: Var,
    target: Var,
    /// If only some rows of what lies there travel.
    rows: Option<Rows>,
    /// Where its handles are kept while it runs as one task.
    outstanding: Outstanding,
}

/// The rows that travel, as many as a value of the step says.
struct Rows {
    planned: PlannedRows,
    counts: Var,
    lists: Mutex<FilledRows>,
}

/// Calls that were started and not yet waited for.
pub(crate) type Outstanding = Mutex<Vec<Handle>>;

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep(outstanding: &Outstanding, handle: Handle) {
    lock(outstanding).push(handle);
}

fn wait_for(outstanding: &Outstanding, comm: &mut dyn Communicator) -> Result<(), CommError> {
    lock(outstanding).drain(..).try_for_each(|handle| comm.wait(handle))
}

impl Transfer {
    /// Calls that move elements between two buffers, or one buffer and other ranks.
    pub(super) fn of(calls: Vec<PlacedCall>, source: Var, target: Var) -> Self {
        Self { calls, source, target, rows: None, outstanding: Outstanding::default() }
    }

    /// The same calls, of as many rows as there are.
    pub(super) fn of_rows(self, planned: PlannedRows, counts: Var) -> Self {
        let lists = Mutex::new(planned.lists());
        Self { rows: Some(Rows { planned, counts, lists }), ..self }
    }

    /// Starts every call, and stores the handles to wait for.
    ///
    /// # Safety
    /// Nothing writes the source or touches the target until all have been waited for.
    pub(crate) unsafe fn start(
        &self,
        cx: &Context<'_>,
        comm: &mut dyn Communicator,
        mut started: impl FnMut(Handle),
    ) -> Result<(), CommError> {
        let (source, target) = (cx.ptr::<u8>(&self.source), cx.ptr::<u8>(&self.target));
        let mut lists = self.rows.as_ref().map(|rows| (rows, lock(&rows.lists)));
        if let Some((rows, lists)) = &mut lists {
            // SAFETY: the task declared that it reads the counts, and that it writes the target.
            unsafe { rows.find(cx, lists, target, self.target.dtype.size()) };
        }
        for (first, call) in &self.calls {
            let op = lists.as_ref().map_or(call.op, |(_, lists)| lists.of(call.op));
            let call = Call { accumulate: cx.adds(&self.target), op, ..*call };
            let offset = first * call.dtype.size();
            // SAFETY: the planner gave both sides their memory, aligned, of the size that the blocks
            // span, in which the columns lie; the rest is the caller's promise.
            started(unsafe { comm.start(&call, source.add(offset), target.add(offset))? });
        }
        Ok(())
    }

    fn accesses(&self, share: Share) -> Vec<Access> {
        if share.worker > 0 {
            return vec![];
        }
        let target = &self.target;
        let counts = self.rows.as_ref().map(|rows| rows.counts.reads_all());
        let both = [self.source.reads_all(), target.writes(0..target.elements())];
        both.into_iter().chain(counts).collect()
    }
}

impl Rows {
    /// Finds out how many rows travel, and writes zeros where none will come.
    ///
    /// # Safety
    /// The counts may be read; `target` has as many elements of `size` bytes as regions, for this thread.
    unsafe fn find(&self, cx: &Context<'_>, lists: &mut FilledRows, target: *mut u8, size: usize) {
        // SAFETY: the caller's promise.
        let counts = unsafe {
            std::slice::from_raw_parts(cx.ptr::<i32>(&self.counts), self.counts.elements())
        };
        self.planned.fill(counts, lists);
        for behind in self.planned.behind(lists) {
            // SAFETY: the elements lie in a region of the target.
            unsafe { target.add(behind.start * size).write_bytes(0, behind.len() * size) };
        }
    }
}

impl Task for Transfer {
    fn accesses(&self, share: Share) -> Vec<Access> {
        Transfer::accesses(self, share)
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // SAFETY: the task declared these accesses, and the calls end with it.
            unsafe { self.start(cx, comm, |handle| keep(&self.outstanding, handle))? };
            wait_for(&self.outstanding, comm)
        });
    }

    fn kind(&self) -> PartKind {
        PartKind::Transfers
    }

    fn transfer(&self) -> Option<&Transfer> {
        Some(self)
    }
}

/// Calls that are waited for by another task.
pub(super) struct Start {
    pub(super) transfer: Transfer,
    /// Where their handles are kept meanwhile.
    pub(super) handle: usize,
}

impl Task for Start {
    fn accesses(&self, share: Share) -> Vec<Access> {
        self.transfer.accesses(share)
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // SAFETY: the task declared these accesses. Both values live until the task that
            // waits, which declares them again; in between nothing writes the operand, because it
            // is still to be read, and nothing touches the result, because it is not made yet.
            unsafe { self.transfer.start(cx, comm, |h| keep(&cx.handles[self.handle], h))? };
            comm.computes()
        });
    }

    fn kind(&self) -> PartKind {
        PartKind::Starts
    }
}

/// Waits for started calls.
pub(super) struct Done {
    pub(super) source: Var,
    pub(super) target: Var,
    pub(super) handle: usize,
}

impl Task for Done {
    fn accesses(&self, share: Share) -> Vec<Access> {
        if share.worker > 0 {
            return vec![];
        }
        let target = &self.target;
        vec![self.source.reads_all(), target.writes(0..target.elements())]
    }

    fn run(&self, cx: &Context<'_>) {
        cx.communicate(|comm| {
            // There is no handle if its start failed, which was already reported.
            wait_for(&cx.handles[self.handle], comm)
        });
    }

    fn kind(&self) -> PartKind {
        PartKind::Ends
    }
}

impl Context<'_> {
    /// Takes started calls on, between two tasks of the first worker; says whether anything moved.
    pub(crate) fn take_on(&self) -> bool {
        let mut moved = false;
        self.communicate(|comm| {
            moved = comm.take_on()?;
            Ok(())
        });
        moved
    }

    /// Lets the first worker communicate with other ranks. It does so even after this rank has
    /// failed, so that the others do not wait forever; after a failure between ranks, calls fail at
    /// once.
    fn communicate(&self, talk: impl FnOnce(&mut dyn Communicator) -> Result<(), CommError>) {
        let Some(endpoint) = self.comm.filter(|_| self.share.worker == 0) else { return };
        let mut comm = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = talk(comm.comm.as_mut()) {
            self.failure.report(error.to_string());
        }
    }
}
