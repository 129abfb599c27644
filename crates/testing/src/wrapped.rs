//! An engine around another one: every call is passed on, and a hook may change launches and event
//! queries.

use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slots, Tier};
use phalanx_engine::{
    Args, CallTimes, Calls, Engine, EngineError, Event, SequentialStep, Span, Way,
};
use phalanx_ir::{Draw, Program, Stored};

/// A hook that can change what the wrapped engine does.
pub trait Hook<E: Engine> {
    /// Launches a call on the engine, unchanged ([`Launch::on`]) or changed.
    fn launch(
        &mut self,
        engine: &mut E,
        call: &Launch<'_, E::Kernel>,
    ) -> Result<Event, EngineError>;

    /// Looks whether an event has happened.
    fn is_over(&mut self, engine: &mut E, event: Event) -> Result<bool, EngineError> {
        engine.is_over(event)
    }
}

/// A call that is about to be launched.
#[derive(Debug)]
pub struct Launch<'a, K> {
    /// The kernel of the inner engine.
    pub kernel: &'a K,
    /// The name of its program, or the label of its messages.
    pub name: &'a str,
    /// What it works on.
    pub args: &'a Args<'a>,
    /// Its lane.
    pub lane: Lane,
    /// What it waits for.
    pub after: &'a [Event],
}

impl<K> Launch<'_, K> {
    /// Launches it on an engine.
    pub fn on<E: Engine<Kernel = K>>(&self, engine: &mut E) -> Result<Event, EngineError> {
        engine.launch(self.kernel, self.args, self.lane, self.after)
    }

    /// Launches it without what it should wait for.
    pub fn unordered_on<E: Engine<Kernel = K>>(
        &self,
        engine: &mut E,
    ) -> Result<Event, EngineError> {
        engine.launch(self.kernel, self.args, self.lane, &[])
    }
}

/// An engine with a hook.
#[derive(Debug)]
pub struct Wrapped<E, M> {
    /// The engine to which calls are passed on.
    pub inner: E,
    /// The hook.
    pub hook: M,
}

impl<E, M> Wrapped<E, M> {
    /// Wraps an engine.
    pub fn new(inner: E, hook: M) -> Self {
        Self { inner, hook }
    }
}

/// A kernel of the inner engine, with its name.
#[derive(Debug)]
pub struct NamedKernel<K> {
    kernel: K,
    name: String,
}

impl<E: Engine, M: Hook<E>> Engine for Wrapped<E, M> {
    type Kernel = NamedKernel<E::Kernel>;
    type Step = SequentialStep<Self::Kernel>;

    fn name(&self) -> &'static str {
        self.inner.name()
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
        Ok(NamedKernel { kernel, name: program.name.clone() })
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.connect(messages, way, label)?;
        Ok(NamedKernel { kernel, name: label.to_owned() })
    }

    fn copy(
        &mut self,
        from: Tier,
        into: Tier,
        bytes: usize,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let kernel = self.inner.copy(from, into, bytes, label)?;
        Ok(NamedKernel { kernel, name: label.to_owned() })
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
        self.inner.time(origin);
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
        let NamedKernel { kernel, name } = kernel;
        self.hook.launch(&mut self.inner, &Launch { kernel, name, args, lane, after })
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.inner.wait(event)
    }

    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        self.hook.is_over(&mut self.inner, event)
    }

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.inner.happened(event)
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
        self.inner.download(from, out)
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
