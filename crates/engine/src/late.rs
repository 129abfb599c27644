//! An engine that runs calls as late as allowed.
//!
//! It queues every call and runs it only when something waits for it, in a random order that
//! respects only the events that the caller named. A call that reads what an unnamed, still queued
//! call will write finds poison (all bits set: a NaN in every float type) instead, and a call that
//! writes where an unnamed, still queued call reads or writes leaves poison there. So a script or
//! an executor that relies on the order of calls fails here, on any machine, without an
//! asynchronous device.
//!
//! Messages start in the order of their lane, as on any device, and run in the background: they end
//! when something that needs them runs. So a schedule in which ranks wait for more than data hangs
//! here. Collective calls run in the order in which they were issued, because ranks match them by
//! order; and after all messages that were issued before, because a rank that waits in a collective
//! sends nothing meanwhile.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx_call::traffic::of_program;
use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slots, Tier};
use phalanx_ir::random::Stream;
use phalanx_ir::{Draw, Program, Stored};

use crate::{
    Args, CallTimes, Calls, DiskStore, Engine, EngineError, Event, SequentialStep, Span, Stamps,
    Target, Way,
};

/// How long it polls messages before it waits for one of them.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs the calls of another engine late and out of order.
pub struct Late<E: Engine> {
    inner: E,
    queue: Vec<Queued<E::Kernel>>,
    started: Vec<Started<E::Kernel>>,
    next: u64,
    draws: u64,
    random: Stream,
    poisoned: usize,
    stamps: Stamps,
}

struct Queued<K> {
    event: Event,
    kernel: Arc<LateKernel<K>>,
    lane: Lane,
    inputs: Vec<Span>,
    outputs: Vec<Target>,
    workspace: Span,
    after: BTreeSet<Event>,
}

/// A message or a collective that runs in the background.
struct Started<K> {
    call: Queued<K>,
    /// Its event in the inner engine.
    done: Event,
    /// Memory that it writes too early.
    spoilt: Vec<Span>,
}

/// A kernel of the inner engine.
pub struct LateKernel<K> {
    kernel: K,
    with: With,
}

/// Which ranks take part in a kernel.
#[derive(Clone, Copy, PartialEq)]
enum With {
    /// This rank alone.
    Nobody,
    /// One other rank, at the other end of a message.
    Peer,
    /// A group of ranks that all run it and may wait for each other in it.
    Group,
}

impl<K> Queued<K> {
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
        let stamps = Stamps::default();
        Self { inner, queue, started, next: 0, draws: 0, random, poisoned: 0, stamps }
    }

    /// How many times a call read or overwrote memory of a call that it did not wait for.
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
        self.settle(event)
    }

    /// The queued calls that may run now.
    fn ready(&self) -> Vec<usize> {
        let pending: BTreeSet<Event> = self.queue.iter().map(|c| c.event).collect();
        let ready = |&i: &usize| self.queue[i].after.is_disjoint(&pending) && self.is_next(i);
        (0..self.queue.len()).filter(ready).collect()
    }

    /// Runs a queued call; one that runs in the background is only started.
    fn run(&mut self, index: usize) -> Result<(), EngineError> {
        let Queued { event, ref after, .. } = self.queue[index];
        let after = after.clone();
        // Waiting runs other calls; this one stays queued meanwhile, so that no other call treats
        // it as done.
        after.into_iter().try_for_each(|event| self.settle(event))?;
        let Some(index) = self.queue.iter().position(|call| call.event == event) else {
            return Ok(());
        };
        let call = self.queue.remove(index);
        self.stamps.start(event);
        self.poison_unsynchronised(&call)?;
        let spoilt = self.overwritten(&call);
        let Queued { inputs, outputs, workspace, .. } = &call;
        let args = Args { inputs, outputs, workspace: *workspace };
        // A single call need not keep the order of a lane.
        let lane = if call.kernel.with == With::Nobody { Lane::Compute } else { call.lane };
        let done = self.inner.launch(&call.kernel.kernel, &args, lane, &[])?;
        let started = Started { call, done, spoilt };
        if lane == Lane::Compute {
            return self.finish(started);
        }
        self.started.push(started);
        Ok(())
    }

    /// Whether a call that other ranks match by order is the next one.
    fn is_next(&self, index: usize) -> bool {
        let (call, before) = (&self.queue[index], &self.queue[..index]);
        match call.kernel.with {
            With::Nobody => true,
            With::Peer => before.iter().all(|c| c.lane != call.lane),
            With::Group => before.iter().all(|c| c.kernel.with == With::Nobody),
        }
    }

    /// Waits for a started call, if the event belongs to one. Its other end may need something from
    /// this rank first, so everything that can run without it is run.
    fn settle(&mut self, event: Event) -> Result<(), EngineError> {
        while let Some(at) = self.started.iter().position(|s| s.call.event == event) {
            match self.free() {
                Some(index) => self.run(index)?,
                None => {
                    let at = self.first_over(at)?;
                    let started = self.started.swap_remove(at);
                    self.finish(started)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for a call in the inner engine, and leaves poison where it wrote too early.
    fn finish(
        &mut self,
        Started { call, done, spoilt }: Started<E::Kernel>,
    ) -> Result<(), EngineError> {
        self.inner.wait(done)?;
        self.stamps.end(call.event);
        spoilt.into_iter().try_for_each(|span| self.poison(span))
    }

    /// The first started call that ends, because others may continue with it; after some time the
    /// one that was asked for, so that the inner engine reports the problem.
    fn first_over(&mut self, asked: usize) -> Result<usize, EngineError> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            for at in 0..self.started.len() {
                if self.inner.is_over(self.started[at].done)? {
                    return Ok(at);
                }
            }
            std::hint::spin_loop();
        }
        Ok(asked)
    }

    /// A queued call that may run now, and that waits for nothing that was started.
    fn free(&self) -> Option<usize> {
        let waits = |call: &Queued<E::Kernel>| {
            self.started.iter().any(|started| call.after.contains(&started.call.event))
        };
        self.ready().into_iter().find(|&i| !waits(&self.queue[i]))
    }

    /// Earlier calls, queued or in flight, that this call did not wait for.
    fn others<'a>(
        &'a self,
        call: &'a Queued<E::Kernel>,
    ) -> impl Iterator<Item = &'a Queued<E::Kernel>> + 'a {
        let started = self.started.iter().map(|started| &started.call);
        self.queue.iter().chain(started).filter(|c| c.event < call.event)
    }

    /// Poisons what earlier queued calls will write, if this call did not wait for them.
    fn poison_unsynchronised(&mut self, call: &Queued<E::Kernel>) -> Result<(), EngineError> {
        let added = call.outputs.iter().filter(|t| t.add).map(|t| t.span);
        for span in call.inputs.iter().copied().chain(added) {
            if self.others(call).any(|c| c.writes(&span)) {
                self.poison(span)?;
            }
        }
        Ok(())
    }

    /// Memory of earlier queued calls that this call overwrites.
    fn overwritten(&self, call: &Queued<E::Kernel>) -> Vec<Span> {
        let outputs = call.outputs.iter().map(|t| t.span).chain([call.workspace]);
        outputs.filter(|span| self.others(call).any(|c| c.uses(span))).collect()
    }

    fn poison(&mut self, span: Span) -> Result<(), EngineError> {
        self.poisoned += 1;
        self.inner.upload(span, &vec![0xFF; span.bytes])
    }
}

impl<E: Engine> Engine for Late<E> {
    type Kernel = Arc<LateKernel<E::Kernel>>;
    type Step = SequentialStep<Self::Kernel>;

    fn name(&self) -> &'static str {
        "late"
    }

    fn memory(&self) -> MemoryKind {
        self.inner.memory()
    }

    fn requirements(&self) -> Arc<dyn Requirements> {
        self.inner.requirements()
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.compile(program, slots, ranks)?;
        // Which programs communicate does not depend on the rank.
        let alone = of_program(program, 0).is_empty();
        Ok(Arc::new(LateKernel { kernel, with: if alone { With::Nobody } else { With::Group } }))
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.connect(messages, way, label)?;
        Ok(Arc::new(LateKernel { kernel, with: With::Peer }))
    }

    fn copy(
        &mut self,
        from: Tier,
        into: Tier,
        bytes: usize,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.copy(from, into, bytes, label)?;
        Ok(Arc::new(LateKernel { kernel, with: With::Nobody }))
    }

    fn mount(&mut self, store: Option<Arc<dyn DiskStore>>) -> Result<(), EngineError> {
        self.inner.mount(store)
    }

    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        self.inner.reserve(tier, bytes)
    }

    fn prepare(&mut self, calls: Calls<Self::Kernel>) -> Result<Self::Step, EngineError> {
        SequentialStep::new(calls)
    }

    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.begin(self)
    }

    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.end(self)
    }

    fn time(&mut self, origin: Option<Instant>) {
        self.stamps.time(origin);
    }

    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<CallTimes>, EngineError> {
        step.times(self)
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
        self.stamps.issue(event);
        self.queue.push(Queued {
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

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.stamps.of(event)
    }

    fn draw(
        &mut self,
        into: Span,
        stored: Stored,
        draw: Draw,
        first: u64,
    ) -> Result<bool, EngineError> {
        self.inner.draw(into, stored, draw, first)
    }

    fn expect(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.expect(into, bytes)
    }

    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.upload(into, bytes)
    }

    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        self.inner.download(from, out)?;
        if self.queue.iter().any(|c| c.writes(&from)) {
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
