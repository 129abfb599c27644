//! The CPU engine: kernels over one arena, run by a fixed pool of threads.

mod kernel;
mod started;

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Slot, Slots};
use phalanx_comm::{Communicator, Count, OpKind};
use phalanx_engine::{Args, Engine, EngineError, Event, Way};
use phalanx_ir::{Axis, Program};
use phalanx_sys::Arena;

use crate::pool::{Pool, PoolSettings};
use crate::tasks::{self, Context, Endpoint, Failure, Line, Operation, Outstanding, Share, Var};
pub use kernel::Kernel;
use kernel::{Call, place_barriers};
use started::Started;

/// Runs programs on this machine's cores.
///
/// One long-lived thread per core runs a whole program on its own rows; barriers stand only where
/// a call reads what another worker wrote. The arena holds every value that a script plans; each
/// worker has scratch memory of its own beside it, for tiles that never leave its cache.
///
/// One rank of several has an endpoint to the others ([`CpuEngine::on_rank`]), through which the
/// thread that launches programs communicates. A program that is a single collective and is
/// launched on another lane than [`Lane::Compute`] is only started then: it ends when its event is
/// waited for, or when a later launch asks for it.
pub struct CpuEngine {
    /// Dropped before the arena, whose memory others may be reading.
    comm: Option<Endpoint>,
    rank: usize,
    world: usize,
    pool: Pool,
    arena: Option<Arena>,
    scratch: Vec<Arena>,
    scratch_bytes: usize,
    failure: Failure,
    events: u64,
    /// Collectives that were started and not yet waited for.
    started: Vec<Started>,
}

impl CpuEngine {
    /// An engine of this many threads, the calling one among them.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        Self::with_pool(threads, threads)
    }

    /// One rank's engine, of this many threads, with its endpoint to the others. It runs its share
    /// of programs whose mesh has as many ranks as there are. The endpoint must move host memory.
    pub fn on_rank(threads: usize, comm: Box<dyn Communicator>) -> Result<Self, EngineError> {
        let (rank, world) = (comm.rank(), comm.world());
        if comm.memory() != MemoryKind::HOST {
            return Err(EngineError::Failed {
                program: format!("endpoint of rank {rank}"),
                why: format!(
                    "its transport moves {} memory, but the CPU engine computes in {} memory; take a \
                     transport of {} memory",
                    comm.memory(),
                    MemoryKind::HOST,
                    MemoryKind::HOST
                ),
            });
        }
        let engine = Self::with_pool(threads, threads.saturating_mul(world))?;
        Ok(Self { comm: Some(Mutex::new(Line::new(comm))), rank, world, ..engine })
    }

    /// `all` threads compute at the same time on this machine.
    fn with_pool(threads: usize, all: usize) -> Result<Self, EngineError> {
        if threads > MAX_WORKERS {
            return Err(EngineError::Failed {
                program: "thread pool".to_owned(),
                why: format!("{threads} threads are more than {MAX_WORKERS}; use more ranks"),
            });
        }
        let settings = PoolSettings::for_workers_on_this_machine(all);
        let pool = Pool::with_settings(threads, settings).map_err(|e| EngineError::Failed {
            program: "thread pool".to_owned(),
            why: format!("{threads} threads could not be started: {e}"),
        })?;
        Ok(Self {
            comm: None,
            rank: 0,
            world: 1,
            pool,
            arena: None,
            scratch: Vec::new(),
            scratch_bytes: 0,
            failure: Failure::default(),
            events: 0,
            started: Vec::with_capacity(MAX_STARTED),
        })
    }

    /// This rank's endpoint to the others, if there are any: for traffic, time, and to stop them.
    pub fn communicator(&mut self) -> Option<&mut dyn Communicator> {
        let line = self.comm.as_mut()?.get_mut().unwrap_or_else(PoisonError::into_inner);
        Some(line.comm.as_mut())
    }

    /// What this rank has moved so far, by kind of call and by the axes that it went over.
    pub fn traffic(&mut self) -> Vec<(OpKind, Vec<Axis>, Count)> {
        let Some(line) = &mut self.comm else { return Vec::new() };
        let line = line.get_mut().unwrap_or_else(PoisonError::into_inner);
        let entries = line.comm.traffic().entries();
        entries
            .map(|(tag, kind, count)| (kind, line.counted[tag as usize].clone(), count))
            .collect()
    }

    /// This engine's place in a program's mesh, whose ranks these are, if it can run there.
    fn place_in(&self, program: &Program, ranks: &[usize]) -> Result<usize, EngineError> {
        let place = ranks.iter().position(|&rank| rank == self.rank);
        let world = ranks.iter().all(|&rank| rank < self.world);
        match place {
            _ if program.mesh().ranks() == 1 => Ok(0),
            Some(place) if world && ranks.len() == program.mesh().ranks() => Ok(place),
            _ => Err(EngineError::Failed {
                program: program.name.clone(),
                why: format!(
                    "its mesh ({}) has {} ranks, given as {ranks:?}, but this engine is rank {} of \
                     {}; make one engine for each rank with CpuEngine::on_rank",
                    program.mesh(),
                    program.mesh().ranks(),
                    self.rank,
                    self.world
                ),
            }),
        }
    }

    /// How many threads share the work.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Seconds that the first thread spent in calls that are matrix products, so far.
    pub fn matmul_seconds(&self) -> f64 {
        self.failure.matmul_nanoseconds() as f64 * 1e-9
    }

    /// Bytes beside the arena that kernels use while they run, over all threads.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes * self.threads()
    }

    fn base(&self) -> *mut u8 {
        self.arena.as_ref().map_or(std::ptr::null_mut(), Arena::as_ptr)
    }

    fn bounds(&self, offset: usize, bytes: usize) -> Result<(), EngineError> {
        let end = self.arena.as_ref().map_or(0, Arena::len);
        if offset + bytes <= end {
            return Ok(());
        }
        Err(EngineError::Failed {
            program: "arena".to_owned(),
            why: format!("bytes {offset}..{} lie outside its {end}", offset + bytes),
        })
    }

    /// Grows the workers' scratch memory; done while compiling, so that running allocates nothing.
    fn grow_scratch(&mut self, bytes: usize) -> Result<(), EngineError> {
        if bytes <= self.scratch_bytes && !self.scratch.is_empty() {
            return Ok(());
        }
        self.scratch_bytes = bytes.max(self.scratch_bytes).max(64).next_multiple_of(4096);
        self.scratch = (0..self.pool.threads())
            .map(|_| arena(self.scratch_bytes))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Runs some calls of a kernel on all workers.
    fn run(
        &mut self,
        kernel: &Kernel,
        args: &Args<'_>,
        chosen: impl Fn(&Call) -> bool + Sync,
    ) -> Result<(), EngineError> {
        // On the stack, because running allocates nothing.
        let mut scratch = [std::ptr::null_mut(); MAX_WORKERS];
        for (slot, arena) in scratch.iter_mut().zip(&self.scratch) {
            *slot = arena.as_ptr();
        }
        let memory = Memory { base: self.base(), scratch };
        let (workers, scratch_bytes) = (self.pool.threads(), self.scratch_bytes);
        let (failure, comm) = (&self.failure, self.comm.as_ref());
        let outcome = self.pool.run(&|worker, barrier| {
            let memory = &memory;
            let cx = Context {
                share: Share { worker, workers },
                base: memory.base,
                args: *args,
                scratch: memory.scratch[worker],
                scratch_bytes,
                failure,
                comm,
                handles: &kernel.handles,
            };
            for call in kernel.calls.iter().filter(|c| chosen(c)) {
                if call.barrier {
                    barrier.wait();
                }
                if worker == 0 && call.task.is_matmul() {
                    let start = Instant::now();
                    call.task.run(&cx);
                    failure.spent(start.elapsed().as_nanos() as u64);
                } else {
                    call.task.run(&cx);
                }
            }
        });
        let failed = |why: String| EngineError::Failed { program: kernel.name.to_string(), why };
        outcome.map_err(|e| failed(e.to_string()))?;
        match self.failure.take() {
            None => Ok(()),
            Some(why) => Err(failed(why)),
        }
    }
}

/// The most threads an engine may have.
pub const MAX_WORKERS: usize = 256;

/// Collectives that may be outstanding before the list of them grows.
const MAX_STARTED: usize = 256;

/// The addresses that workers share.
struct Memory {
    base: *mut u8,
    scratch: [*mut u8; MAX_WORKERS],
}

// SAFETY: workers touch only what their tasks declare, which barriers keep apart, and each its own
// scratch memory.
unsafe impl Sync for Memory {}

fn arena(bytes: usize) -> Result<Arena, EngineError> {
    Arena::new(bytes).map_err(|e| EngineError::Memory { bytes, why: e.to_string() })
}

impl Engine for CpuEngine {
    type Kernel = Kernel;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Kernel, EngineError> {
        let rank = self.place_in(program, ranks)?;
        let mut calls = Vec::new();
        for (index, instr) in program.instrs().iter().enumerate() {
            let scratch = slots.scratch[index];
            let comm = self.comm.as_ref();
            let operation = Operation { program, instr, slots, scratch, rank, ranks, comm };
            // What nothing reads is not computed.
            let results = instr.outputs.iter().map(|v| slots.by_value[v.index()]);
            if results.clone().all(|slot| slot == Slot::Unused) {
                continue;
            }
            for task in tasks::compile(&operation)? {
                calls.push(Call { task, instr: index, barrier: false });
            }
        }
        for &(output, value) in &slots.copies {
            let var = |slot| Var::of(program, value, slot, rank);
            let task = tasks::copy(var(slots.by_value[value.index()]), var(Slot::Output(output)));
            calls.push(Call { task, instr: program.instrs().len(), barrier: false });
        }
        place_barriers(&mut calls, self.pool.threads());
        let workers = self.pool.threads();
        let scratch = calls.iter().map(|c| c.task.scratch(workers)).max().unwrap_or(0);
        self.grow_scratch(scratch)?;
        let instrs = program.instrs().len();
        let pending = program.values().iter().any(|ty| ty.pending);
        let handles = if pending { program.values().len() } else { 0 };
        Ok(Kernel {
            name: program.name.as_str().into(),
            calls,
            handles: (0..handles).map(|_| Outstanding::default()).collect(),
            slots: slots.clone(),
            instrs,
        })
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Kernel, EngineError> {
        let failed = |why: String| EngineError::Failed { program: label.to_owned(), why };
        let comm = self.comm.as_ref();
        let comm = comm.ok_or_else(|| failed("this engine has no other rank to talk to".into()))?;
        let transfer = tasks::message(comm, messages, way, label);
        let task = Box::new(transfer.map_err(|e| failed(e.to_string()))?);
        Ok(Kernel {
            name: label.into(),
            calls: vec![Call { task, instr: 0, barrier: false }],
            handles: Vec::new(),
            slots: Slots::default(),
            instrs: 0,
        })
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError> {
        self.arena = Some(arena(bytes.max(1))?);
        Ok(())
    }

    fn launch(
        &mut self,
        kernel: &Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        // Other calls run when they are issued, so they have happened.
        after.iter().try_for_each(|&event| self.finish(event))?;
        self.events += 1;
        match kernel.transfer().filter(|_| lane != Lane::Compute) {
            Some(transfer) => self.start(kernel, transfer, args)?,
            None => self.run(kernel, args, |_| true)?,
        }
        Ok(Event(self.events))
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.finish(event)
    }

    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        self.has_ended(event)
    }

    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        self.bounds(offset, bytes.len())?;
        if let Some(arena) = &mut self.arena {
            arena.as_mut_slice()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError> {
        self.bounds(offset, out.len())?;
        if let Some(arena) = &mut self.arena {
            out.copy_from_slice(&arena.as_mut_slice()[offset..offset + out.len()]);
        }
        Ok(())
    }

    fn launch_observed(
        &mut self,
        kernel: &Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        let lives = &kernel.slots.lives;
        let mut written: Vec<Vec<bool>> = lives.iter().map(|_| Vec::new()).collect();
        for instr in 0..=kernel.instrs {
            for life in lives.iter().filter(|life| life.birth == instr) {
                let offset = args.workspace.offset + life.offset;
                self.upload(offset, &vec![pattern; life.bytes])?;
            }
            self.run(kernel, args, |call| call.instr == instr)?;
            for (life, written) in lives.iter().zip(&mut written) {
                if life.death == instr {
                    let mut bytes = vec![0; life.bytes];
                    self.download(args.workspace.offset + life.offset, &mut bytes)?;
                    *written = bytes.iter().map(|&b| b != pattern).collect();
                }
            }
        }
        Ok(Some(written))
    }
}
