//! An engine that behaves like a device: asynchronous, with memory that the host cannot address.
//!
//! A thread plays the device. An inner engine lives on it, with its memory and its communicator.
//! The host only sends it jobs: [`Engine::prepare`] passes a whole step to it, [`Engine::begin`]
//! sends one message, and the calls run while the host does something else. What is in the device's
//! tier gets there by copies through the queue; the tier of the host is memory that both can reach.
//! For some instructions it asks for its own scratch memory, and checks that it got it.

mod device_thread;
mod scratch;

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_call::{Lane, MemoryKind, Message, Moved, Requirements, Route, Slots, Tier};
use phalanx_engine::{
    Args, CallTimes, Calls, Counters, Engine, EngineError, Event, KernelCall, Span, Way,
    already_in_flight, in_order, untimed,
};
use phalanx_ir::Program;

pub use device_thread::RemoteKernel;
use device_thread::{DeviceThread, Outcome, Waiter, What, With};
use scratch::OwnScratch;

/// What the host asks the device to do.
type Job<E> = Box<dyn FnOnce(&mut DeviceThread<E>) + Send>;

/// The tier of the host, which both sides can reach.
type Host = Arc<Mutex<Vec<u8>>>;

/// An engine on its own thread.
pub struct Remote<E: Engine + 'static> {
    jobs: Sender<Job<E>>,
    thread: Option<JoinHandle<()>>,
    host: Host,
    requirements: Arc<dyn Requirements>,
    /// Events that were given out.
    events: u64,
}

/// A step that the device has.
pub struct RemoteStep<E: Engine + 'static> {
    id: u64,
    calls: u64,
    /// The event of its first call, since it was begun.
    first: u64,
    ended: Option<Receiver<Outcome>>,
    jobs: Sender<Job<E>>,
}

impl<E: Engine + 'static> Remote<E> {
    /// Starts a device, with the engine that is made on it.
    pub fn new(make: impl FnOnce() -> E + Send + 'static) -> Self {
        Self::start(make, true)
    }

    /// The same, but it needs no scratch memory of its own: for scripts whose slots were placed without
    /// asking it.
    pub fn bare(make: impl FnOnce() -> E + Send + 'static) -> Self {
        Self::start(make, false)
    }

    fn start(make: impl FnOnce() -> E + Send + 'static, more: bool) -> Self {
        let (jobs, queue) = channel::<Job<E>>();
        let (host, (tell, told)) = (Host::default(), channel());
        let shared = host.clone();
        let run = move || {
            let engine = make();
            let own = OwnScratch::beside(engine.requirements(), more);
            drop(tell.send(own.clone()));
            DeviceThread::new(engine, own, shared).serve(&queue);
        };
        let thread = std::thread::Builder::new().name("device".to_owned()).spawn(run).unwrap();
        let requirements = Arc::new(told.recv().unwrap());
        Self { jobs, thread: Some(thread), host, requirements, events: 0 }
    }

    /// The requirements of such an engine around an inner one: to place slots before it is created.
    pub fn requirements_around(inner: Arc<dyn Requirements>) -> Arc<dyn Requirements> {
        Arc::new(OwnScratch::beside(inner, true))
    }

    /// Starts no programs until [`Remote::release`]; everything else goes on.
    pub fn hold(&self) {
        self.ask(|device_thread| device_thread.held = true).unwrap();
    }

    /// Goes on with programs.
    pub fn release(&self) {
        self.ask(|device_thread| device_thread.held = false).unwrap();
    }

    /// Runs something on the device, and waits for its result.
    fn ask<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut DeviceThread<E>) -> R + Send + 'static,
    ) -> Result<R, EngineError> {
        let (tell, told) = channel();
        self.send(move |device_thread| drop(tell.send(work(device_thread))))?;
        told.recv().map_err(|_| gone())
    }

    /// Sends a job, and does not wait for it.
    fn send(
        &self,
        work: impl FnOnce(&mut DeviceThread<E>) + Send + 'static,
    ) -> Result<(), EngineError> {
        self.jobs.send(Box::new(work)).map_err(|_| gone())
    }

    /// The piece of the host's tier that a span is.
    fn on_host<R>(&self, span: Span, work: impl FnOnce(&mut [u8]) -> R) -> Result<R, EngineError> {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        let end = host.len();
        let piece = host.get_mut(span.offset..span.end());
        piece.map(work).ok_or_else(|| failed("host tier", format!("{span:?} is not in its {end}")))
    }
}

impl<E: Engine + 'static> Drop for Remote<E> {
    fn drop(&mut self) {
        // Steps may outlive the engine and can still send, so the thread gets a message to end.
        drop(self.send(|device_thread| device_thread.stopped = true));
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl<E: Engine + 'static> Drop for RemoteStep<E> {
    fn drop(&mut self) {
        let id = self.id;
        drop(self.jobs.send(Box::new(move |device_thread| drop(device_thread.steps.remove(&id)))));
    }
}

impl<E: Engine + 'static> Engine for Remote<E> {
    type Kernel = RemoteKernel<E::Kernel>;
    type Step = RemoteStep<E>;

    fn name(&self) -> &'static str {
        "remote"
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::named("remote")
    }

    fn requirements(&self) -> Arc<dyn Requirements> {
        self.requirements.clone()
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Self::Kernel, EngineError> {
        let (program, slots, ranks) = (program.clone(), slots.clone(), ranks.to_vec());
        self.ask(move |device_thread| device_thread.compile(&program, &slots, &ranks))?
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let (messages, label) = (messages.to_vec(), label.to_owned());
        let kernel =
            self.ask(move |device_thread| device_thread.engine.connect(&messages, way, &label))??;
        Ok(RemoteKernel::new(What::Inner(kernel), With::Peer))
    }

    fn copy(
        &mut self,
        from: Tier,
        into: Tier,
        _bytes: usize,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        match (from, into) {
            (Tier::Host, Tier::Device) | (Tier::Device, Tier::Host) => {
                Ok(RemoteKernel::new(What::Copy, With::Nobody))
            }
            _ => Err(failed(label, format!("no copies from {from} to {into}"))),
        }
    }

    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        match tier {
            Tier::Device => {
                self.ask(move |device_thread| device_thread.engine.reserve(tier, bytes))?
            }
            Tier::Host => {
                *self.host.lock().unwrap_or_else(PoisonError::into_inner) = vec![0; bytes];
                Ok(())
            }
            Tier::Disk => Err(failed("arena", "the device has no files".to_owned())),
        }
    }

    fn prepare(&mut self, calls: Calls<Self::Kernel>) -> Result<Self::Step, EngineError> {
        in_order(&calls)?;
        let count = calls.len() as u64;
        let id = self.ask(move |device_thread| device_thread.keep(calls))?;
        Ok(RemoteStep { id, calls: count, first: 0, ended: None, jobs: self.jobs.clone() })
    }

    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        if step.ended.is_some() {
            return Err(already_in_flight());
        }
        let (tell, ended) = channel();
        (step.first, step.ended) = (self.events, Some(ended));
        self.events += step.calls;
        let (id, first) = (step.id, step.first);
        self.send(move |device_thread| device_thread.begin(id, first, tell))
    }

    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        match step.ended.take() {
            None => Ok(()),
            Some(ended) => outcome(&ended),
        }
    }

    fn time(&mut self, origin: Option<Instant>) {
        self.ask(move |device_thread| device_thread.stamps.time(origin)).unwrap();
    }

    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<CallTimes>, EngineError> {
        let events = step.first..step.first + step.calls;
        let times =
            self.ask(|device_thread| events.map(|e| device_thread.stamps.of(Event(e))).collect())?;
        let times: Option<Vec<CallTimes>> = times;
        times.ok_or_else(|| untimed(self.name()))
    }

    fn launch(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        let event = Event(self.events);
        self.events += 1;
        let call = KernelCall {
            kernel: Arc::new(kernel.clone()),
            inputs: args.inputs.to_vec(),
            outputs: args.outputs.to_vec(),
            workspace: args.workspace,
            lane,
            after: Vec::new(),
        };
        let after = after.to_vec();
        self.send(move |device_thread| device_thread.issue(event, &[call].into(), 0, after))?;
        Ok(event)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        let (tell, ended) = channel();
        let events = event.0..event.0 + 1;
        self.send(move |device_thread| device_thread.waiters.push(Waiter { events, tell }))?;
        outcome(&ended)
    }

    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        self.ask(move |device_thread| !device_thread.is_pending(event))
    }

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.ask(move |device_thread| device_thread.stamps.of(event)).ok()?
    }

    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        into.holds(bytes.len())?;
        if into.tier == Tier::Host {
            return self.on_host(into, |place| place.copy_from_slice(bytes));
        }
        let bytes = bytes.to_vec();
        self.ask(move |device_thread| device_thread.engine.upload(into, &bytes))?
    }

    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        from.holds(out.len())?;
        if from.tier == Tier::Host {
            return self.on_host(from, |place| out.copy_from_slice(place));
        }
        let bytes = self.ask(move |device_thread| device_thread.read(from))??;
        out.copy_from_slice(&bytes);
        Ok(())
    }

    fn launch_observed(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        let (kernel, workspace) = (kernel.clone(), args.workspace);
        let (inputs, outputs) = (args.inputs.to_vec(), args.outputs.to_vec());
        self.ask(move |device_thread| {
            let args = Args { inputs: &inputs, outputs: &outputs, workspace };
            device_thread.start_messages()?;
            device_thread.observe(&kernel, &args, pattern)
        })?
    }
}

/// What the inner engine counts; its thread is the rank's own.
impl<E: Engine + Counters + 'static> Counters for Remote<E> {
    fn moved(&mut self) -> BTreeMap<Route, Moved> {
        self.ask(|device_thread| device_thread.engine.moved()).unwrap()
    }

    fn products(&mut self) -> Duration {
        self.ask(|device_thread| device_thread.engine.products()).unwrap()
    }

    fn moves_rows(&self) -> bool {
        self.ask(|device_thread| device_thread.engine.moves_rows()).unwrap()
    }

    fn scratch_bytes(&mut self) -> usize {
        self.ask(|device_thread| device_thread.engine.scratch_bytes()).unwrap()
    }

    fn busy(&mut self) -> Option<Duration> {
        self.ask(|device_thread| device_thread.engine.busy()).unwrap()
    }
}

fn outcome(ended: &Receiver<Outcome>) -> Result<(), EngineError> {
    ended.recv().map_err(|_| gone())?.map_err(|why| failed("device", why))
}

fn failed(program: &str, why: String) -> EngineError {
    EngineError::Failed { program: program.to_owned(), why }
}

fn gone() -> EngineError {
    failed("device", "its thread has ended".to_owned())
}
