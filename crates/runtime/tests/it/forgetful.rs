//! An engine that forgets what calls should wait for: what an executor with a missing edge asks.

use phalanx_engine::{Args, Engine, EngineError, Event};
use phalanx_ir::Program;
use phalanx_script::{Lane, Slots};

/// Passes calls on, but drops the events that some of them name.
pub(crate) struct Forgetful<E> {
    pub(crate) inner: E,
    /// Whether the call of this number, from 0, loses its events.
    pub(crate) forgets: Box<dyn Fn(usize) -> bool>,
    calls: usize,
}

impl<E> Forgetful<E> {
    pub(crate) fn new(inner: E, forgets: impl Fn(usize) -> bool + 'static) -> Self {
        let forgets = Box::new(forgets);
        Self { inner, forgets, calls: 0 }
    }
}

impl<E: Engine> Engine for Forgetful<E> {
    type Kernel = E::Kernel;

    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<E::Kernel, EngineError> {
        self.inner.compile(program, slots, ranks)
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError> {
        self.inner.reserve(bytes)
    }

    fn launch(
        &mut self,
        kernel: &E::Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        self.calls += 1;
        let kept = if (self.forgets)(self.calls - 1) { &[] } else { after };
        self.inner.launch(kernel, args, lane, kept)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.inner.wait(event)
    }

    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.upload(offset, bytes)
    }

    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError> {
        self.inner.download(offset, out)
    }

    fn launch_observed(
        &mut self,
        kernel: &E::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.inner.launch_observed(kernel, args, pattern)
    }
}
