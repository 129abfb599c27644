//! Calls of the communicator as tasks: made at once, or started by one task and awaited by another.
//!
//! The first worker, which is the thread that launched the program, communicates for its rank; the
//! others meet it at the barriers that the accesses here ask for.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use phalanx_comm::{Blocks, Call, CommError, Communicator, Group, Handle, Site};
use phalanx_engine::EngineError;
use phalanx_ir::ops::Collective;
use phalanx_ir::{Axis, OpDef};

use super::{Access, Context, Operation, Share, Task, Var};

/// The endpoint of an engine's rank, which one worker at a time uses.
pub(crate) type Endpoint = Mutex<RankEndpoint>;

/// A rank's endpoint to the others.
pub(crate) struct RankEndpoint {
    pub(crate) comm: Box<dyn Communicator>,
    /// For each tag: the axes whose traffic is counted under it.
    pub(crate) counted: Vec<Vec<Axis>>,
}

impl RankEndpoint {
    pub(crate) fn new(comm: Box<dyn Communicator>) -> Self {
        Self { comm, counted: Vec::new() }
    }

    /// The tag under which traffic over these axes is counted.
    pub(super) fn tag(&mut self, axes: Vec<Axis>) -> u32 {
        let known = self.counted.iter().position(|counted| *counted == axes);
        known.unwrap_or_else(|| {
            self.counted.push(axes);
            self.counted.len() - 1
        }) as u32
    }
}

/// A collective as calls of the communicator, prepared when its program is compiled.
pub(crate) struct Transfer {
    /// One for each piece, and the first element that it takes of every block.
    calls: Vec<(usize, Call<'static>)>,
    source: Var,
    target: Var,
    /// Where its handles are kept while it runs as one task.
    outstanding: Outstanding,
}

/// Calls that were started and not yet waited for.
pub(crate) type Outstanding = Mutex<Vec<Handle>>;

fn keep(outstanding: &Outstanding, handle: Handle) {
    outstanding.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
}

fn wait_for(outstanding: &Outstanding, comm: &mut dyn Communicator) -> Result<(), CommError> {
    let mut outstanding = outstanding.lock().unwrap_or_else(PoisonError::into_inner);
    outstanding.drain(..).try_for_each(|handle| comm.wait(handle))
}

impl Transfer {
    pub(super) fn new(
        op: &Operation<'_>,
        axes: &[Axis],
        kind: phalanx_comm::CollectiveOp<'static>,
        blocks: Blocks,
        source: Var,
        target: Var,
    ) -> Result<Self, EngineError> {
        let endpoint = op.comm.ok_or_else(|| {
            op.unsupported("other ranks take part; make the engine with CpuEngine::on_rank")
        })?;
        let name = op.instr.op.name();
        let site = Site::named(&format!("{} {name} %{}", op.program.name, op.instr.outputs[0].0));
        let mesh = op.program.mesh();
        let members: Vec<usize> =
            mesh.group(op.rank, axes).into_iter().map(|place| op.ranks[place]).collect();
        let mut line = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        let group = Group::new(members).and_then(|group| line.comm.group(&group));
        let group = group.map_err(|e| op.unsupported(e.to_string()))?;
        // Traffic is counted by the axes that it goes over.
        let tag = line.tag(mesh.axes_of(mesh.mask(axes)));
        let call = Call::new(group, kind, source.dtype, blocks).at(site).tagged(tag);
        Ok(Self { calls: vec![(0, call)], source, target, outstanding: Outstanding::default() })
    }

    /// Calls that move elements between two buffers, or one buffer and other ranks; each with the first
    /// element that it takes.
    pub(super) fn of(calls: Vec<(usize, Call<'static>)>, source: Var, target: Var) -> Self {
        Self { calls, source, target, outstanding: Outstanding::default() }
    }

    /// The same in pieces: each call takes some columns of every block.
    pub(super) fn cut(mut self, collective: &Collective) -> Self {
        if let ([(_, whole)], true) = (&self.calls[..], collective.pieces > 1) {
            let piece = |columns: Range<usize>| {
                let blocks = Blocks { len: columns.len(), ..whole.blocks };
                (columns.start, Call { blocks, ..*whole })
            };
            self.calls = collective.cuts(whole.blocks.len).map(piece).collect();
        }
        self
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
        for (first, call) in &self.calls {
            let call = Call { accumulate: cx.adds(&self.target), ..*call };
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
        vec![self.source.reads_all(), target.writes(0..target.elements())]
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
            unsafe { self.transfer.start(cx, comm, |h| keep(&cx.handles[self.handle], h)) }
        });
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
}

impl Context<'_> {
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
