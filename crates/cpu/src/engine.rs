//! The CPU engine: kernels over one arena, run by a fixed pool of threads.

mod arenas;
mod counted;
mod disk;
mod kernel;
mod started;
mod timing;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slot, Slots, Tier};
use phalanx_comm::{Communicator, CountedEndpoint};
use phalanx_engine::{
    Args, CallPart, CallTimes, Calls, DiskStore, Engine, EngineError, Event, SequentialStep, Span,
    Stamps, StepWatch, Way, place_in_mesh,
};
use phalanx_ir::{OpDef, Program};
use phalanx_sys::Arena;

use crate::pool::{Pool, PoolSettings};
use crate::products::{ProductUnits, UnitSet};
use crate::requirements::CpuRequirements;
use crate::tasks::{self, Bases, Context, Endpoint, Failure, Operation, Outstanding, Share, Var};
use arenas::{Arenas, allocate, offered};
use disk::Disk;
pub use kernel::Kernel;
use kernel::{Call, place_barriers};
use started::Started;
use timing::Timing;

/// Runs programs on this machine's cores.
///
/// One long-lived thread per core runs a whole program on its own rows; there are barriers only
/// where a call reads what another worker wrote. The arenas hold every value that a script plans;
/// each worker also has its own scratch memory, for tiles that never leave its cache.
///
/// One rank of several has an endpoint to the others ([`CpuEngine::on_rank`]), through which the
/// thread that launches programs communicates. A program that is a single collective and is
/// launched on another lane than [`Lane::Compute`] is only started: it ends when its event is
/// waited for, or when a later launch needs it.
pub struct CpuEngine {
    /// Dropped before the arenas, whose memory others may be reading.
    comm: Option<Endpoint>,
    rank: usize,
    world: usize,
    pool: Pool,
    /// Dropped before the arenas, which its thread may be reading.
    disk: Disk,
    arenas: Arenas,
    scratch: Vec<Arena>,
    scratch_bytes: usize,
    failure: Failure,
    events: u64,
    /// Collectives that were started and not yet waited for.
    started: Vec<Started>,
    stamps: Stamps,
    /// Of the call that runs now, while calls are timed.
    parts: Mutex<Vec<CallPart>>,
    watch: Option<Arc<dyn StepWatch>>,
    products: ProductUnits,
}

impl CpuEngine {
    /// An engine of this many threads, including the calling thread.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        Self::with_pool(threads, threads)
    }

    /// One rank's engine, of this many threads, with its endpoint to the others. It runs its part
    /// of programs whose mesh has as many ranks as the world. The endpoint must move host memory.
    pub fn on_rank(threads: usize, comm: Box<dyn Communicator>) -> Result<Self, EngineError> {
        let (rank, world) = (comm.rank(), comm.world());
        if comm.memory() != MemoryKind::HOST {
            return Err(EngineError::Failed {
                program: format!("endpoint of rank {rank}"),
                why: format!(
                    "its transport moves {} memory, but the CPU engine computes in {} memory; use \
                    a transport of {} memory",
                    comm.memory(),
                    MemoryKind::HOST,
                    MemoryKind::HOST
                ),
            });
        }
        let engine = Self::with_pool(threads, threads.saturating_mul(world))?;
        Ok(Self { comm: Some(Mutex::new(CountedEndpoint::new(comm))), rank, world, ..engine })
    }

    /// `all` threads compute at the same time on this machine.
    fn with_pool(threads: usize, all: usize) -> Result<Self, EngineError> {
        if threads > MAX_WORKERS {
            let why = format!("an engine has at most {MAX_WORKERS}");
            return Err(EngineError::Threads { threads, why });
        }
        let settings = PoolSettings::for_workers_on_this_machine(all);
        let pool = Pool::with_settings(threads, settings)
            .map_err(|error| EngineError::Threads { threads, why: error.to_string() })?;
        Ok(Self {
            comm: None,
            rank: 0,
            world: 1,
            pool,
            disk: Disk::default(),
            arenas: Arenas::default(),
            scratch: Vec::new(),
            scratch_bytes: 0,
            failure: Failure::default(),
            events: 0,
            started: Vec::with_capacity(MAX_STARTED),
            stamps: Stamps::default(),
            parts: Mutex::default(),
            watch: None,
            products: ProductUnits::fastest(UnitSet::here()),
        })
    }

    /// Computes products with other units; programs are planned with [`Engine::requirements`] after that.
    pub fn with_products(self, products: ProductUnits) -> Self {
        Self { products, ..self }
    }

    /// This rank's endpoint to the others, if there are any.
    fn communicator(&mut self) -> Option<&mut dyn Communicator> {
        communicator(&mut self.comm)
    }

    /// This engine's place in a program's mesh, which has these ranks.
    fn place_in(&self, program: &Program, ranks: &[usize]) -> Result<usize, EngineError> {
        place_in_mesh(program, ranks, (self.rank, self.world), "CpuEngine::on_rank")
    }

    /// How many threads share the work.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Grows the workers' scratch memory; done while compiling, so that running allocates nothing.
    fn grow_scratch(&mut self, bytes: usize) -> Result<(), EngineError> {
        if bytes <= self.scratch_bytes && !self.scratch.is_empty() {
            return Ok(());
        }
        self.scratch_bytes = bytes.max(self.scratch_bytes).max(64).next_multiple_of(4096);
        self.scratch = (0..self.pool.threads())
            .map(|_| allocate(self.scratch_bytes))
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
        let memory = Memory { bases: self.arenas.bases(), scratch };
        let (workers, scratch_bytes) = (self.pool.threads(), self.scratch_bytes);
        let (failure, comm) = (&self.failure, self.comm.as_ref());
        let timing = Timing { origin: self.stamps.origin(), parts: &self.parts };
        let outcome = self.pool.run(&|worker, barrier| {
            let memory = &memory;
            let cx = Context {
                share: Share { worker, workers },
                bases: memory.bases,
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
                match worker {
                    0 => timing.run(call, &cx),
                    _ => call.task.run(&cx),
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

/// Whether a call copies to the disk.
fn is_save(args: &Args<'_>) -> bool {
    matches!(args.outputs, [target] if target.span.tier == Tier::Disk)
}

fn communicator(comm: &mut Option<Endpoint>) -> Option<&mut dyn Communicator> {
    let line = comm.as_mut()?.get_mut().unwrap_or_else(PoisonError::into_inner);
    Some(line.comm.as_mut())
}

/// The most threads an engine may have.
pub const MAX_WORKERS: usize = 256;

/// Collectives that may be outstanding before the list of them grows.
const MAX_STARTED: usize = 256;

/// The addresses that workers share.
struct Memory {
    bases: Bases,
    scratch: [*mut u8; MAX_WORKERS],
}

// SAFETY: workers touch only what their tasks declare, which barriers separate, and their own
// scratch memory.
unsafe impl Sync for Memory {}

impl Engine for CpuEngine {
    type Kernel = Kernel;
    type Step = SequentialStep<Kernel>;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::HOST
    }

    fn requirements(&self) -> Arc<dyn Requirements> {
        Arc::new(CpuRequirements { products: self.products })
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
            let products = &self.products;
            let operation =
                Operation { program, instr, slots, scratch, rank, ranks, comm, products };
            // Values that nothing reads are not computed.
            let results = instr.outputs.iter().map(|v| slots.by_value[v.index()]);
            if results.clone().all(|slot| slot == Slot::Unused) {
                continue;
            }
            for task in tasks::compile(&operation)? {
                calls.push(Call { task, op: instr.op.name(), instr: index, barrier: false });
            }
        }
        for &(output, value) in &slots.copies {
            let var = |slot| Var::of(program, value, slot, rank);
            let task = tasks::copy(var(slots.by_value[value.index()]), var(Slot::Output(output)));
            let instr = program.instrs().len();
            calls.push(Call { task, op: "copy", instr, barrier: false });
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
        let comm =
            comm.ok_or_else(|| failed("this engine has no other rank to communicate with".into()))?;
        Ok(Kernel::of(label, Box::new(tasks::message(comm, messages, way, label))))
    }

    fn copy(
        &mut self,
        from: Tier,
        into: Tier,
        bytes: usize,
        label: &str,
    ) -> Result<Kernel, EngineError> {
        offered(from, label)?;
        if into != Tier::Disk {
            offered(into, label)?;
        }
        Ok(Kernel::of(label, tasks::copy_bytes(bytes)))
    }

    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        match tier {
            // It has no memory of its own: what is copied there goes to a store.
            Tier::Disk => Ok(()),
            Tier::Device | Tier::Host => {
                self.arenas.reserve(tier, bytes, communicator(&mut self.comm))
            }
        }
    }

    fn mount(&mut self, store: Option<Arc<dyn DiskStore>>) -> Result<(), EngineError> {
        self.disk.mount(store)
    }

    fn prepare(&mut self, calls: Calls<Kernel>) -> Result<SequentialStep<Kernel>, EngineError> {
        SequentialStep::new(calls)
    }

    fn begin(&mut self, step: &mut SequentialStep<Kernel>) -> Result<(), EngineError> {
        step.begin(self)
    }

    fn end(&mut self, step: &mut SequentialStep<Kernel>) -> Result<(), EngineError> {
        step.end(self)
    }

    fn time(&mut self, origin: Option<Instant>) {
        self.stamps.time(origin);
    }

    fn watch(&mut self, watch: Option<Arc<dyn StepWatch>>) {
        self.watch = watch;
    }

    fn watcher(&self) -> Option<Arc<dyn StepWatch>> {
        self.watch.clone()
    }

    fn times(&mut self, step: &mut SequentialStep<Kernel>) -> Result<Vec<CallTimes>, EngineError> {
        step.times(self)
    }

    fn parts(
        &mut self,
        step: &mut SequentialStep<Kernel>,
    ) -> Result<Vec<Vec<CallPart>>, EngineError> {
        Ok(step.events().iter().map(|&event| self.stamps.parts(event)).collect())
    }

    fn launch(
        &mut self,
        kernel: &Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        self.events += 1;
        let event = Event(self.events);
        self.stamps.issue(event);
        // Other calls run when they are issued, so they have ended.
        after.iter().try_for_each(|&event| self.finish(event))?;
        self.stamps.start(event);
        match kernel.transfer().filter(|_| lane != Lane::Compute) {
            _ if is_save(args) => self.save(event, args)?,
            Some(transfer) => self.start(kernel, transfer, args)?,
            None => {
                self.run(kernel, args, |_| true)?;
                self.stamps.end(event);
                if self.stamps.is_on() {
                    let parts = self.parts.get_mut().unwrap_or_else(PoisonError::into_inner);
                    self.stamps.consists_of(event, std::mem::take(parts));
                }
            }
        }
        self.look()?;
        Ok(event)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.finish(event)
    }

    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        self.has_ended(event)
    }

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.stamps.of(event)
    }

    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        self.arenas.write(into, bytes)
    }

    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        self.arenas.read(from, out)
    }

    fn launch_observed(
        &mut self,
        kernel: &Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        let lives = &kernel.slots.live_ranges;
        let mut written: Vec<Vec<bool>> = lives.iter().map(|_| Vec::new()).collect();
        for instr in 0..=kernel.instrs {
            for life in lives.iter().filter(|life| life.birth == instr) {
                let block = Span::device(args.workspace.offset + life.offset, life.bytes);
                self.upload(block, &vec![pattern; life.bytes])?;
            }
            self.run(kernel, args, |call| call.instr == instr)?;
            for (life, written) in lives.iter().zip(&mut written) {
                if life.death == instr {
                    let mut bytes = vec![0; life.bytes];
                    let block = Span::device(args.workspace.offset + life.offset, life.bytes);
                    self.download(block, &mut bytes)?;
                    *written = bytes.iter().map(|&b| b != pattern).collect();
                }
            }
        }
        Ok(Some(written))
    }
}
