//! An engine that is as late as it may be.
//!
//! It queues every call and runs it only when somebody waits, in a random order that respects
//! nothing but the events which the caller named. A call that reads what an unnamed, still queued
//! call will write finds poison (all bits set: a NaN in every float type) instead, and a call that
//! writes where an unnamed, still queued call reads or writes leaves poison there. So a script or
//! an executor that relies on calls being done in order fails here, on any machine, without a
//! device that is really asynchronous.
//!
//! Messages start in the order of their lane, as on any device, and go on by themselves: they end when
//! something that needs them runs. So a schedule in which ranks wait for more than data stops here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_ir::Program;
use phalanx_ir::random::Stream;
use phalanx_script::{Lane, Message, Slots};

use crate::{Args, Engine, EngineError, Event, Span, Target, Way};

/// How long it looks for messages before it waits for one of them.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs the calls of another engine late and out of order.
pub struct Late<E: Engine> {
    inner: E,
    queue: Vec<Call<E::Kernel>>,
    /// Messages that were started, and their events in the inner engine.
    started: Vec<(Call<E::Kernel>, Event)>,
    next: u64,
    draws: u64,
    random: Stream,
    poisoned: usize,
}

struct Call<K> {
    event: Event,
    kernel: Arc<LateKernel<K>>,
    lane: Lane,
    inputs: Vec<Span>,
    outputs: Vec<Target>,
    workspace: Span,
    after: BTreeSet<Event>,
}

/// A kernel of the inner engine.
pub struct LateKernel<K> {
    kernel: K,
    /// Whether it is a message.
    message: bool,
    /// Whether other ranks run it too, and may wait for each other in it.
    meets: bool,
}

impl<K> Call<K> {
    fn writes(&self, span: &Span) -> bool {
        self.outputs.iter().any(|t| t.span.overlaps(span))
    }

    fn uses(&self, span: &Span) -> bool {
        let reads = self.inputs.iter().any(|s| s.overlaps(span));
        reads || self.writes(span) || self.workspace.overlaps(span)
    }
}

impl<E: Engine> Late<E> {
    /// Wraps an engine; the seed decides the order among calls that are ready.
    pub fn new(inner: E, seed: u64) -> Self {
        let random = Stream::named(seed, "late engine");
        let (queue, started) = (Vec::new(), Vec::new());
        Self { inner, queue, started, next: 0, draws: 0, random, poisoned: 0 }
    }

    /// How often so far a call read, or wrote over, what a call that it did not wait for had to do
    /// with.
    pub fn poisoned_reads(&self) -> usize {
        self.poisoned
    }

    /// Runs queued calls, in any order that their events allow, until `event` has happened.
    fn run_until(&mut self, event: Event) -> Result<(), EngineError> {
        while self.queue.iter().any(|c| c.event == event) {
            let ready = self.ready();
            let draw = self.random.below(self.draws, ready.len().max(1) as u64);
            self.draws += 1;
            let Some(&index) = ready.get(draw as usize) else {
                return Err(EngineError::Failed {
                    program: "late engine".to_owned(),
                    why: "queued calls wait for each other".to_owned(),
                });
            };
            self.run(index)?;
        }
        self.end(event)
    }

    /// The queued calls that may run now.
    fn ready(&self) -> Vec<usize> {
        let pending: BTreeSet<Event> = self.queue.iter().map(|c| c.event).collect();
        let ready = |&i: &usize| self.queue[i].after.is_disjoint(&pending) && self.is_next(i);
        (0..self.queue.len()).filter(ready).collect()
    }

    /// Runs a queued call; a message is only started.
    fn run(&mut self, index: usize) -> Result<(), EngineError> {
        let Call { event, ref after, ref kernel, .. } = self.queue[index];
        let (after, meets) = (after.clone(), kernel.meets);
        // Waiting runs other calls; this one stays queued meanwhile, so that none takes it for done.
        after.into_iter().try_for_each(|event| self.end(event))?;
        if meets {
            // Whoever else comes may need a message from here first.
            while let Some(index) = self.free(|call| call.kernel.message) {
                self.run(index)?;
            }
        }
        let Some(index) = self.queue.iter().position(|call| call.event == event) else {
            return Ok(());
        };
        let call = self.queue.remove(index);
        self.poison_unsynchronised(&call)?;
        let Call { inputs, outputs, workspace, .. } = &call;
        let args = Args { inputs, outputs, workspace: *workspace };
        let LateKernel { kernel, message, .. } = &*call.kernel;
        let lane = if *message { call.lane } else { Lane::Compute };
        let done = self.inner.launch(kernel, &args, lane, &[])?;
        if *message {
            self.started.push((call, done));
            return Ok(());
        }
        self.inner.wait(done)?;
        self.poison_overwritten(&call)
    }

    /// Whether no message before it in its lane is still to be started.
    fn is_next(&self, index: usize) -> bool {
        let call = &self.queue[index];
        !call.kernel.message || self.queue[..index].iter().all(|c| c.lane != call.lane)
    }

    /// Waits for a message that was started, if the event is one. Whoever is at its other end may need
    /// something from here first, so whatever can run without it does.
    fn end(&mut self, event: Event) -> Result<(), EngineError> {
        while let Some(at) = self.started.iter().position(|(call, _)| call.event == event) {
            match self.free(|_| true) {
                Some(index) => self.run(index)?,
                None => {
                    let at = self.first_over(at)?;
                    let (_, done) = self.started.swap_remove(at);
                    self.inner.wait(done)?;
                }
            }
        }
        Ok(())
    }

    /// The message that is over first, whichever it is, for something may go on with it; after a while
    /// the one that is asked for, about which the inner engine then complains.
    fn first_over(&mut self, asked: usize) -> Result<usize, EngineError> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            for at in 0..self.started.len() {
                if self.inner.is_over(self.started[at].1)? {
                    return Ok(at);
                }
            }
            std::hint::spin_loop();
        }
        Ok(asked)
    }

    /// A queued call that may run now, and that waits for no message.
    fn free(&self, chosen: impl Fn(&Call<E::Kernel>) -> bool) -> Option<usize> {
        let waits = |call: &Call<E::Kernel>| {
            self.started.iter().any(|(started, _)| call.after.contains(&started.event))
        };
        self.ready().into_iter().find(|&i| chosen(&self.queue[i]) && !waits(&self.queue[i]))
    }

    /// Earlier calls that are queued, or messages that are under way, which this call did not wait for.
    fn others<'a>(
        &'a self,
        call: &'a Call<E::Kernel>,
    ) -> impl Iterator<Item = &'a Call<E::Kernel>> + 'a {
        let started = self.started.iter().map(|(started, _)| started);
        self.queue.iter().chain(started).filter(|c| c.event < call.event)
    }

    /// What an earlier call that is still queued was to write, but this call did not wait for.
    fn poison_unsynchronised(&mut self, call: &Call<E::Kernel>) -> Result<(), EngineError> {
        let added = call.outputs.iter().filter(|t| t.add).map(|t| t.span);
        for span in call.inputs.iter().copied().chain(added) {
            if self.others(call).any(|c| c.writes(&span)) {
                self.poisoned += 1;
                self.inner.upload(span.offset, &vec![0xFF; span.bytes])?;
            }
        }
        Ok(())
    }

    /// What an earlier call that is still queued was to use, but this call has written over.
    fn poison_overwritten(&mut self, call: &Call<E::Kernel>) -> Result<(), EngineError> {
        let outputs = call.outputs.iter().map(|t| t.span);
        for span in outputs.chain([call.workspace]) {
            if self.others(call).any(|c| c.uses(&span)) {
                self.poisoned += 1;
                self.inner.upload(span.offset, &vec![0xFF; span.bytes])?;
            }
        }
        Ok(())
    }
}

impl<E: Engine> Engine for Late<E> {
    type Kernel = Arc<LateKernel<E::Kernel>>;

    fn name(&self) -> &'static str {
        "late"
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.compile(program, slots, ranks)?;
        Ok(Arc::new(LateKernel { kernel, message: false, meets: ranks.len() > 1 }))
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.connect(messages, way, label)?;
        Ok(Arc::new(LateKernel { kernel, message: true, meets: false }))
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError> {
        self.inner.reserve(bytes)
    }

    fn launch(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        let event = Event(self.next);
        self.next += 1;
        self.queue.push(Call {
            event,
            kernel: kernel.clone(),
            lane,
            inputs: args.inputs.to_vec(),
            outputs: args.outputs.to_vec(),
            workspace: args.workspace,
            after: after.iter().copied().collect(),
        });
        Ok(event)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.run_until(event)
    }

    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.upload(offset, bytes)
    }

    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError> {
        self.inner.download(offset, out)?;
        let span = Span { offset, bytes: out.len() };
        if self.queue.iter().any(|c| c.writes(&span)) {
            self.poisoned += 1;
            out.fill(0xFF);
        }
        Ok(())
    }

    fn launch_observed(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.inner.launch_observed(&kernel.kernel, args, pattern)
    }
}
