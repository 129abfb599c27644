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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use phalanx_ir::Program;
use phalanx_ir::random::Stream;
use phalanx_script::{Lane, Message, Slots};

use crate::{Args, Engine, EngineError, Event, Span, Target, Way};

/// Runs the calls of another engine late and out of order.
pub struct Late<E: Engine> {
    inner: E,
    queue: Vec<Call<E::Kernel>>,
    /// Messages that were started: their events here, and those of the inner engine.
    started: BTreeMap<Event, Event>,
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
        let (queue, started) = (Vec::new(), BTreeMap::new());
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
            let pending: BTreeSet<Event> = self.queue.iter().map(|c| c.event).collect();
            let ready: Vec<usize> = (0..self.queue.len())
                .filter(|&i| self.queue[i].after.is_disjoint(&pending) && self.is_next(i))
                .collect();
            let draw = self.random.below(self.draws, ready.len().max(1) as u64);
            self.draws += 1;
            let Some(&index) = ready.get(draw as usize) else {
                return Err(EngineError::Failed {
                    program: "late engine".to_owned(),
                    why: "queued calls wait for each other".to_owned(),
                });
            };
            let call = self.queue.remove(index);
            self.poison_unsynchronised(&call)?;
            let Call { inputs, outputs, workspace, .. } = &call;
            let args = Args { inputs, outputs, workspace: *workspace };
            let LateKernel { kernel, message } = &*call.kernel;
            call.after.iter().try_for_each(|&event| self.end(event))?;
            let lane = if *message { call.lane } else { Lane::Compute };
            let done = self.inner.launch(kernel, &args, lane, &[])?;
            match message {
                true => {
                    self.started.insert(call.event, done);
                }
                false => self.inner.wait(done)?,
            }
            self.poison_overwritten(&call)?;
        }
        self.end(event)
    }

    /// Whether no message before it in its lane is still to be started.
    fn is_next(&self, index: usize) -> bool {
        let call = &self.queue[index];
        !call.kernel.message || self.queue[..index].iter().all(|c| c.lane != call.lane)
    }

    /// Waits for a message that was started, if the event is one.
    fn end(&mut self, event: Event) -> Result<(), EngineError> {
        self.started.remove(&event).map_or(Ok(()), |done| self.inner.wait(done))
    }

    /// What an earlier call that is still queued was to write, but this call did not wait for.
    fn poison_unsynchronised(&mut self, call: &Call<E::Kernel>) -> Result<(), EngineError> {
        let added = call.outputs.iter().filter(|t| t.add).map(|t| t.span);
        for span in call.inputs.iter().copied().chain(added) {
            let early = |c: &&Call<E::Kernel>| c.event < call.event && c.writes(&span);
            if self.queue.iter().any(|c| early(&c)) {
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
            let early = |c: &&Call<E::Kernel>| c.event < call.event && c.uses(&span);
            if self.queue.iter().any(|c| early(&c)) {
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
        Ok(Arc::new(LateKernel { kernel, message: false }))
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.connect(messages, way, label)?;
        Ok(Arc::new(LateKernel { kernel, message: true }))
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
