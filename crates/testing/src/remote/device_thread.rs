//! The side of the device: queues of calls, and an engine that runs them one after the other.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use phalanx_call::traffic::of_program;
use phalanx_call::{Lane, Slots, Tier};
use phalanx_engine::{Args, Calls, Engine, EngineError, Event, Span, Stamps};
use phalanx_ir::Program;

use super::scratch::{Own, OwnScratch, untouched};
use super::{Host, Job, failed};

/// How long it polls started calls before it waits for one, so that the inner engine reports the
/// error.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the device's own scratch memory is filled with.
const PATTERN: u8 = 0xC3;

/// Whether all went well, or why not.
pub(super) type Outcome = Result<(), String>;

/// Something that the device can call.
pub struct RemoteKernel<K>(Arc<Inside<K>>);

struct Inside<K> {
    what: What<K>,
    with: With,
    own: Vec<Own>,
    /// Whether it was checked that nothing else writes to its own scratch memory.
    checked: AtomicBool,
}

pub(super) enum What<K> {
    Inner(K),
    Copy,
}

/// Which ranks take part in a kernel.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum With {
    Nobody,
    Peer,
    Group,
}

impl<K> RemoteKernel<K> {
    pub(super) fn new(what: What<K>, with: With) -> Self {
        let (own, checked) = (Vec::new(), AtomicBool::new(true));
        Self(Arc::new(Inside { what, with, own, checked }))
    }
}

impl<K> Clone for RemoteKernel<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A waiter that is notified when all of these events have happened.
pub(super) struct Waiter {
    pub(super) events: Range<u64>,
    pub(super) tell: Sender<Outcome>,
}

/// A call that has not started.
struct Queued<K> {
    event: Event,
    calls: Calls<RemoteKernel<K>>,
    at: usize,
    after: Vec<Event>,
}

impl<K> Queued<K> {
    fn lane(&self) -> Lane {
        self.calls[self.at].lane
    }

    fn with(&self) -> With {
        self.calls[self.at].kernel.0.with
    }
}

/// A call that runs in the background.
struct Started {
    event: Event,
    lane: Lane,
    /// Its event in the inner engine.
    inner: Event,
}

/// The state of the device's thread.
pub(super) struct DeviceThread<E: Engine> {
    pub(super) engine: E,
    pub(super) steps: BTreeMap<u64, Calls<RemoteKernel<E::Kernel>>>,
    pub(super) stamps: Stamps,
    pub(super) waiters: Vec<Waiter>,
    pub(super) held: bool,
    pub(super) stopped: bool,
    own: OwnScratch,
    host: Host,
    next: u64,
    /// In the order of issue.
    queue: Vec<Queued<E::Kernel>>,
    started: Vec<Started>,
    failure: Option<String>,
    /// When something last started or ended.
    moved: Instant,
}

impl<E: Engine> DeviceThread<E> {
    pub(super) fn new(engine: E, own: OwnScratch, host: Host) -> Self {
        Self {
            engine,
            own,
            steps: BTreeMap::new(),
            stamps: Stamps::default(),
            waiters: Vec::new(),
            held: false,
            stopped: false,
            host,
            next: 0,
            queue: Vec::new(),
            started: Vec::new(),
            failure: None,
            moved: Instant::now(),
        }
    }

    /// Does jobs as they come, and calls meanwhile.
    pub(super) fn serve(mut self, jobs: &Receiver<Job<E>>) {
        while !self.stopped {
            self.tell();
            let job = match self.started.is_empty() && self.ready().is_none() {
                true => jobs.recv().map_err(|_| TryRecvError::Disconnected),
                false => jobs.try_recv(),
            };
            match job {
                Ok(job) => job(&mut self),
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    if let Err(error) = self.advance() {
                        self.failure.get_or_insert(error.to_string());
                        self.queue.clear();
                        self.started.clear();
                    }
                }
            }
        }
    }

    /// Keeps the calls of a step.
    pub(super) fn keep(&mut self, calls: Calls<RemoteKernel<E::Kernel>>) -> u64 {
        self.next += 1;
        self.steps.insert(self.next, calls);
        self.next
    }

    /// Issues every call of a step.
    pub(super) fn begin(&mut self, id: u64, first: u64, tell: Sender<Outcome>) {
        let Some(calls) = self.steps.get(&id).cloned() else { return };
        for (at, call) in calls.iter().enumerate() {
            let after = call.after.iter().map(|&before| Event(first + before as u64)).collect();
            self.issue(Event(first + at as u64), &calls, at, after);
        }
        self.waiters.push(Waiter { events: first..first + calls.len() as u64, tell });
    }

    pub(super) fn issue(
        &mut self,
        event: Event,
        calls: &Calls<RemoteKernel<E::Kernel>>,
        at: usize,
        after: Vec<Event>,
    ) {
        if self.failure.is_none() {
            self.stamps.issue(event);
            self.queue.push(Queued { event, calls: calls.clone(), at, after });
        }
    }

    pub(super) fn is_pending(&self, event: Event) -> bool {
        self.queue.iter().any(|c| c.event == event) || self.started.iter().any(|s| s.event == event)
    }

    pub(super) fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<RemoteKernel<E::Kernel>, EngineError> {
        let own = self.own.find(program, slots)?;
        let what = What::Inner(self.engine.compile(program, slots, ranks)?);
        // Which programs communicate does not depend on the rank.
        let with = if of_program(program, 0).is_empty() { With::Nobody } else { With::Group };
        let checked = AtomicBool::new(own.is_empty());
        Ok(RemoteKernel(Arc::new(Inside { what, with, own, checked })))
    }

    pub(super) fn read(&mut self, from: Span) -> Result<Vec<u8>, EngineError> {
        let mut bytes = vec![0; from.bytes];
        self.engine.download(from, &mut bytes)?;
        Ok(bytes)
    }

    /// Starts everything that runs in the background and may start: a call that runs out of order
    /// may need ranks that wait for these.
    pub(super) fn start_messages(&mut self) -> Result<(), EngineError> {
        let may = |device_thread: &Self, at: usize| {
            device_thread.queue[at].lane() != Lane::Compute && device_thread.may_start(at)
        };
        while let Some(at) = (0..self.queue.len()).find(|&at| may(self, at)) {
            self.start(at)?;
        }
        Ok(())
    }

    /// What a call writes of its workspace, the device's own scratch memory included.
    pub(super) fn observe(
        &mut self,
        kernel: &RemoteKernel<E::Kernel>,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        let What::Inner(inner) = &kernel.0.what else {
            self.copy(args.inputs[0], args.outputs[0].span)?;
            return Ok(None);
        };
        let Some(mut written) = self.engine.launch_observed(inner, args, pattern)? else {
            return Ok(None);
        };
        untouched(&kernel.0.own, &written)?;
        for own in &kernel.0.own {
            written[own.block][own.bytes.clone()].fill(true);
        }
        Ok(Some(written))
    }

    /// Notifies waiters whose events have happened.
    fn tell(&mut self) {
        let waiters = std::mem::take(&mut self.waiters);
        for waiter in waiters {
            let pending = |event: Event| waiter.events.contains(&event.0);
            let queued = self.queue.iter().any(|c| pending(c.event));
            if queued || self.started.iter().any(|s| pending(s.event)) {
                self.waiters.push(waiter);
                continue;
            }
            // A waiter that is gone can be ignored.
            drop(waiter.tell.send(self.failure.clone().map_or(Ok(()), Err)));
        }
    }

    /// The next call that may start. Programs take long, so everything else goes first.
    fn ready(&self) -> Option<usize> {
        let ready = |&at: &usize| self.may_start(at);
        let compute = |&at: &usize| self.queue[at].lane() == Lane::Compute;
        let all = 0..self.queue.len();
        let other = all.clone().filter(|at| !compute(at)).find(ready);
        other.or_else(|| all.filter(|at| compute(at) && !self.held).find(ready))
    }

    /// Calls of a lane start in order. Ranks match collective calls by the order in which they were
    /// issued, and a rank that waits in a program sends nothing meanwhile.
    fn may_start(&self, at: usize) -> bool {
        let (call, before) = (&self.queue[at], &self.queue[..at]);
        let lane = call.lane();
        let first = before.iter().all(|c| c.lane() != lane);
        let free = !lane.ends_in_order() || self.started.iter().all(|s| s.lane != lane);
        let alone = call.with() != With::Group || before.iter().all(|c| c.with() == With::Nobody);
        first && free && alone && !call.after.iter().any(|&event| self.is_pending(event))
    }

    /// Ends something that is over, or starts something; looks again if there is neither.
    fn advance(&mut self) -> Result<(), EngineError> {
        let impatient = self.moved.elapsed() > PATIENCE;
        for at in 0..self.started.len() {
            let Started { event, inner, .. } = self.started[at];
            if impatient || self.engine.is_over(inner)? {
                self.engine.wait(inner)?;
                self.started.remove(at);
                self.stamps.end(event);
                self.moved = Instant::now();
                return Ok(());
            }
        }
        match self.ready() {
            Some(at) => self.start(at),
            None => {
                std::thread::yield_now();
                Ok(())
            }
        }
    }

    fn start(&mut self, at: usize) -> Result<(), EngineError> {
        let Queued { event, calls, at, .. } = self.queue.remove(at);
        let call = &calls[at];
        let kernel = &call.kernel.0;
        self.stamps.start(event);
        match &kernel.what {
            What::Copy => self.copy(call.inputs[0], call.outputs[0].span)?,
            What::Inner(_) if !kernel.checked.swap(true, Ordering::Relaxed) => {
                self.observe(&call.kernel, &call.args(), PATTERN)?;
            }
            What::Inner(inner) => {
                let done = self.engine.launch(inner, &call.args(), call.lane, &[])?;
                match self.engine.is_over(done)? {
                    true => self.engine.wait(done)?,
                    false => self.started.push(Started { event, lane: call.lane, inner: done }),
                }
            }
        }
        if !self.is_pending(event) {
            self.stamps.end(event);
        }
        self.moved = Instant::now();
        Ok(())
    }

    /// A copy between the device's memory and the host's.
    fn copy(&mut self, from: Span, into: Span) -> Result<(), EngineError> {
        let host = self.host.clone();
        let mut host = host.lock().unwrap_or_else(PoisonError::into_inner);
        let span = if from.tier == Tier::Host { from } else { into };
        let end = host.len();
        let place = host.get_mut(span.offset..span.end());
        let place = place.ok_or_else(|| failed("copy", format!("{span:?} is not in {end}")))?;
        match from.tier {
            Tier::Host => self.engine.upload(into, place),
            _ => self.engine.download(from, place),
        }
    }
}
