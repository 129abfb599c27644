//! An engine that forgets what calls should wait for: what an executor with a missing edge asks.

use phalanx_engine::{Engine, EngineError, Event};
use phalanx_testing::{Hook, Launch, Wrapped};

/// Drops the events that some calls name.
pub(crate) struct Forgetful<F> {
    /// Whether the call of this number, from 0, loses its events.
    forgets: F,
    calls: usize,
}

impl<F: Fn(usize) -> bool> Forgetful<F> {
    pub(crate) fn around<E: Engine>(inner: E, forgets: F) -> Wrapped<E, Self> {
        Wrapped::new(inner, Self { forgets, calls: 0 })
    }
}

impl<E: Engine, F: Fn(usize) -> bool> Hook<E> for Forgetful<F> {
    fn launch(
        &mut self,
        engine: &mut E,
        call: &Launch<'_, E::Kernel>,
    ) -> Result<Event, EngineError> {
        self.calls += 1;
        match (self.forgets)(self.calls - 1) {
            true => call.unordered_on(engine),
            false => call.on(engine),
        }
    }
}
