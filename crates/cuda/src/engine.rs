//! The CUDA engine: kernels over one arena of a GPU's memory, issued on one stream, and copies beside it.

mod ahead;
mod arenas;
mod beside;
mod capture;
mod compile;
mod copies;
mod counted;
mod disk;
mod drawn;
mod issue;
mod issued;
mod staging;
mod timing;
mod touched;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slots, Tier};
use phalanx_comm::{Communicator, CountedEndpoint};
use phalanx_engine::{
    Args, CallPart, CallTimes, Calls, DiskStore, Engine, EngineError, Event, Span, Way,
    place_in_mesh,
};
use phalanx_ir::{Draw, Program, Stored};

use crate::device::{Device, DeviceMemory, EngineSeat, PinnedMemory, Stream};
use crate::fused_attention::{AttentionLibrary, AttentionPlan, FusedShape};
use crate::products::{ProductLibrary, ProductPlan, ProductShape};
use crate::ranks::{self, GpuLink, Linked};
use crate::requirements::CudaRequirements;
use crate::tasks::{self, Task};
use ahead::Ahead;
use arenas::Arenas;
use beside::Beside;
use copies::Copies;
use issued::Issued;
use staging::{InFlight, Staging};
use timing::Timing;

pub(crate) use ahead::WINDOW;
pub(crate) use beside::is_asked_for as second_queue_is_asked_for;
#[cfg(test)]
pub(crate) use drawn::kernels as drawing_kernels;

pub use capture::CudaStep;
pub use compile::CudaKernel;
use compile::What;

/// Runs programs on a GPU.
///
/// What a rank computes goes to one stream, so calls run in the order in which they are launched; copies
/// between the GPU's memory and the host's have streams of their own. A rank of several has an endpoint to the others ([`CudaEngine::on_rank`]); ranks may
/// share the GPU. What they exchange goes through its memory, on the same stream, or through the host's
/// ([`GpuLink`]). A program that is a single collective and is launched on another lane than
/// [`Lane::Compute`] is only started: it ends when its event is waited for, or when a later launch needs it.
pub struct CudaEngine {
    /// Dropped first: others may be reading what it sends.
    endpoint: Option<CountedEndpoint>,
    /// Whether the endpoint's messages move the host's memory.
    messages_through_host: bool,
    rank: usize,
    world: usize,
    stream: Arc<Stream>,
    library: ProductLibrary,
    plans: HashMap<ProductShape, Option<Arc<ProductPlan>>>,
    constants: HashMap<Vec<u8>, Arc<DeviceMemory>>,
    /// Workspace of the library of products.
    workspace: DeviceMemory,
    /// The second queue, if it is asked for, and whether a task is being issued there.
    beside: Option<Beside>,
    is_beside: bool,
    /// The library of attention, if it is installed, with what it planned.
    attention: Option<AttentionLibrary>,
    attention_plans: HashMap<FusedShape, Option<Arc<AttentionPlan>>>,
    /// Before the arenas, which copies may still use.
    copies: Copies,
    ahead: Ahead,
    arenas: Arenas,
    /// Where kernels report bad ids, and the programs and operands by number.
    fault: PinnedMemory,
    sites: Vec<(String, &'static str)>,
    disk: Option<Arc<dyn DiskStore>>,
    staging: Staging,
    /// Collectives of the running program that were started, by the value that is their handle.
    pending: Vec<(usize, InFlight)>,
    /// Collectives and messages that were launched and have not ended.
    started: Vec<(Event, InFlight)>,
    issued: Issued,
    events: u64,
    /// All events up to this one have happened.
    waited: u64,
    timing: Timing,
    device: Arc<Device>,
    _seat: EngineSeat,
}

/// Memory of a GPU, as transports and engines name it.
pub(crate) const MEMORY: MemoryKind = MemoryKind::named("cuda");

impl CudaEngine {
    /// An engine of the only rank.
    pub fn new() -> Result<Self, EngineError> {
        let device = Device::first()?;
        let seat = device.seat();
        let (stream, library) = (Arc::new(Stream::new(&device)?), ProductLibrary::new()?);
        Ok(Self {
            endpoint: None,
            messages_through_host: false,
            rank: 0,
            world: 1,
            workspace: DeviceMemory::new(&device, crate::products::WORKSPACE)?,
            fault: PinnedMemory::new(&device, 64)?,
            attention: AttentionLibrary::new(stream.handle()).ok(),
            attention_plans: HashMap::new(),
            stream,
            library,
            beside: beside::is_asked_for().then(|| Beside::new(&device)).transpose()?,
            is_beside: false,
            plans: HashMap::new(),
            constants: HashMap::new(),
            arenas: Arenas::default(),
            copies: Copies::new(&device)?,
            ahead: Ahead::new(&device)?,
            sites: Vec::new(),
            disk: None,
            staging: Staging::default(),
            pending: Vec::new(),
            started: Vec::new(),
            issued: Issued::new(&device)?,
            events: 0,
            waited: 0,
            timing: Timing::default(),
            device,
            _seat: seat,
        })
    }

    /// One rank's engine, with its endpoint to the others, which exchange as fits where they are.
    pub fn on_rank(comm: Box<dyn Communicator>) -> Result<Self, EngineError> {
        Self::linked(comm, GpuLink::Auto)
    }

    /// The same, and how ranks exchange. The endpoint must move the host's memory.
    pub fn linked(comm: Box<dyn Communicator>, link: GpuLink) -> Result<Self, EngineError> {
        let (rank, world) = (comm.rank(), comm.world());
        if comm.memory() != MemoryKind::HOST {
            return Err(EngineError::Failed {
                program: format!("endpoint of rank {rank}"),
                why: format!(
                    "its transport moves {} memory, but ranks on GPUs meet through {} memory",
                    comm.memory(),
                    MemoryKind::HOST
                ),
            });
        }
        let mut engine = Self::new()?;
        let Linked { comm, messages_through_host, one_host } =
            ranks::linked(comm, &engine.device, &engine.stream, link)?;
        engine.library.measures = one_host;
        let endpoint = Some(CountedEndpoint::new(comm));
        Ok(Self { endpoint, messages_through_host, rank, world, ..engine })
    }

    /// The same with attention on kernels of ours, even if there is a library for it.
    pub fn with_own_attention(self) -> Self {
        Self { attention: None, ..self }
    }

    /// The same whose products of f32 round their operands to TF32, or not.
    pub fn with_tf32(mut self, rounds: bool) -> Self {
        self.library.tf32 = rounds;
        self
    }

    /// The same with a second queue for gradients of weights in captured steps.
    pub fn with_second_queue(mut self) -> Result<Self, EngineError> {
        self.beside = Some(Beside::new(&self.device)?);
        Ok(self)
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// This engine's place in a program's mesh, which has these ranks.
    fn place_in(&self, program: &Program, ranks: &[usize]) -> Result<usize, EngineError> {
        place_in_mesh(program, ranks, (self.rank, self.world), "CudaEngine::on_rank")
    }
}

impl Engine for CudaEngine {
    type Kernel = CudaKernel;
    type Step = CudaStep;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn memory(&self) -> MemoryKind {
        MEMORY
    }

    fn requirements(&self) -> Arc<dyn Requirements> {
        Arc::new(CudaRequirements {
            attention_library: self.attention.is_some(),
            second_queue: self.beside.is_some(),
        })
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<CudaKernel, EngineError> {
        self.compiled(program, slots, ranks)
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<CudaKernel, EngineError> {
        let failed = |why: &str| EngineError::Failed { program: label.to_owned(), why: why.into() };
        let endpoint = self.endpoint.as_mut();
        let endpoint =
            endpoint.ok_or_else(|| failed("this engine has no other rank to communicate with"))?;
        let transfer = tasks::message(endpoint, messages, way, label);
        Ok(CudaKernel::of(label, What::Task(Box::new(Task::Transfer(transfer)))))
    }

    fn copy(
        &mut self,
        _from: Tier,
        _into: Tier,
        _bytes: usize,
        label: &str,
    ) -> Result<CudaKernel, EngineError> {
        Ok(CudaKernel::of(label, What::Copy))
    }

    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        self.arenas.reserve(&self.device, &self.stream, tier, bytes)
    }

    fn mount(&mut self, store: Option<Arc<dyn DiskStore>>) -> Result<(), EngineError> {
        self.disk = store;
        Ok(())
    }

    fn prepare(&mut self, calls: Calls<CudaKernel>) -> Result<Self::Step, EngineError> {
        CudaStep::new(calls)
    }

    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.begin(self)
    }

    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.end(self)
    }

    fn time(&mut self, origin: Option<Instant>) {
        self.timing.time(origin, &self.stream);
    }

    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<CallTimes>, EngineError> {
        step.calls().times(self)
    }

    fn parts(&mut self, step: &mut Self::Step) -> Result<Vec<Vec<CallPart>>, EngineError> {
        Ok(step.calls().events().iter().map(|&event| self.timing.parts(event)).collect())
    }

    fn launch(
        &mut self,
        kernel: &CudaKernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        self.device.enter()?;
        self.events += 1;
        let event = Event(self.events);
        self.timing.issue(event);
        // Everything else is on the engine's stream, so it comes before this.
        after.iter().try_for_each(|&event| self.finish(event))?;
        if lane != Lane::Compute && self.copies_beside(kernel, args) {
            self.copy_beside(event, args, &kernel.name)?;
            return Ok(event);
        }
        match kernel.transfer().filter(|_| lane != Lane::Compute) {
            Some(transfer) => {
                self.timing.stamps.start(event);
                let flight = self.start(transfer, args, &kernel.name)?;
                self.started.push((event, flight));
            }
            None => {
                let begun = self.timing.mark(event, &self.stream)?;
                self.issue(kernel, args, |_| true)?;
                self.timing.keep(event, begun, &self.stream)?;
            }
        }
        self.issued.note(&self.stream, event, &kernel.name)?;
        Ok(event)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.device.enter()?;
        self.finish(event)?;
        if event.0 > self.waited {
            self.copies.join(&self.stream)?;
            self.stream.wait().map_err(|error| self.issued.blame(&error))?;
            self.issued.clear();
            self.waited = self.events;
            self.check_ids()?;
        }
        Ok(())
    }

    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        self.has_ended(event)
    }

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.timing.of(event)
    }

    fn expect(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        self.device.enter()?;
        into.holds(bytes.len())?;
        Ok(self.ahead.fetch(into, bytes)?)
    }

    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        self.device.enter()?;
        if let Some(fetched) = self.ahead.take(into, bytes) {
            let to = self.arenas.address(into)?;
            // SAFETY: the caller has waited for what uses the place, which lies in the arena.
            unsafe { self.ahead.place(fetched, to, &self.stream)? };
            return Ok(());
        }
        self.arenas.write(&self.stream, into, bytes)
    }

    fn clear(&mut self, span: Span) -> Result<(), EngineError> {
        self.device.enter()?;
        self.arenas.clear(&self.stream, span)
    }

    fn draw(
        &mut self,
        into: Span,
        stored: Stored,
        draw: Draw,
        first: u64,
    ) -> Result<bool, EngineError> {
        self.device.enter()?;
        self.drawn(into, stored, draw, first)
    }

    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        self.device.enter()?;
        self.arenas.read(&self.stream, from, out)
    }

    fn launch_observed(
        &mut self,
        kernel: &CudaKernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.device.enter()?;
        let lives = &kernel.slots.live_ranges;
        let mut written: Vec<Vec<bool>> = lives.iter().map(|_| Vec::new()).collect();
        for instr in 0..=kernel.instrs {
            let block = |life: &phalanx_call::LiveRange| {
                Span::device(args.workspace.offset + life.offset, life.bytes)
            };
            for life in lives.iter().filter(|life| life.birth == instr) {
                self.upload(block(life), &vec![pattern; life.bytes])?;
            }
            self.issue(kernel, args, |of| of == instr)?;
            for (life, written) in lives.iter().zip(&mut written) {
                if life.death == instr {
                    let mut bytes = vec![0; life.bytes];
                    self.download(block(life), &mut bytes)?;
                    // What a library does with its workspace is its own affair: it asked for all of it.
                    let all = kernel.lends(life);
                    *written = bytes.iter().map(|&b| all || b != pattern).collect();
                }
            }
        }
        self.stream.wait()?;
        self.check_ids()?;
        Ok(Some(written))
    }
}
