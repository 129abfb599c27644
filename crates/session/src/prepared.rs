//! A session before it has memory: planned, compiled, and started from one of several sources.

use phalanx_ir::Param;

use super::command::{Command, LocalRanks};
use super::known::Known;
use super::restore::{NewRun, StateSource};
use super::{
    Backend, Lowered, MemoryExcess, Models, Planner, ReadParam, Session, Settings, Size, host,
    together,
};
use phalanx_error::{Error, Result};

/// A session that is planned and compiled, but has no weights and no tensor memory yet.
pub struct Prepared {
    ranks: Box<dyn LocalRanks>,
    known: Known,
}

impl Prepared {
    /// Plans, compiles and loads everything on this machine, and refuses a plan that takes too much
    /// memory.
    pub fn new(models: &Models, settings: Settings) -> Result<Self> {
        let backend = host::ranks(settings.device);
        Self::of(&Lowered::new(models, settings)?, &*backend)
    }

    /// The same for programs that are already compiled, on any backend.
    pub fn of(lowered: &Lowered, backend: &dyn Backend) -> Result<Self> {
        Self::load(lowered, backend)?.map_err(|over| Error::refused(over.problem()))
    }

    /// The same; gives how the plan exceeds its memory limit, if it does.
    pub fn load(lowered: &Lowered, backend: &dyn Backend) -> Result<Result<Self, MemoryExcess>> {
        Size::of(lowered).check()?;
        let planner = Planner::new(lowered)?;
        let known = Known::of(&planner)?;
        // Ranks that compile take memory and time, so a plan that does not fit starts none.
        Ok(match known.over() {
            Some(over) => Err(over),
            None => {
                let mut ranks = backend.launch(&planner)?;
                together::agree(&mut *ranks, "the plan", planner.digest()?)?;
                Ok(Self { ranks, known })
            }
        })
    }

    /// Allocates memory and reads the initial weights from `read`: each rank its part.
    pub fn start(self, read: &ReadParam<'_>) -> Result<Session> {
        self.start_with(&NewRun(read), 0)
    }

    /// The same from a source of state.
    pub fn start_from(self, source: &dyn StateSource) -> Result<Session> {
        self.start_with(source, 0)
    }

    /// Takes over the memory in which earlier processes of the same ranks have left the state after
    /// so many steps.
    pub fn take_over(mut self, steps: u64) -> Result<Session> {
        self.ranks.ask(Command::TakeOver(steps))?;
        Ok(self.started(steps))
    }

    /// Allocates memory and goes on from a checkpoint, of any layout, after so many steps.
    pub fn resume(self, source: &dyn StateSource, steps: u64) -> Result<Session> {
        self.start_with(source, steps)
    }

    fn start_with(mut self, source: &dyn StateSource, steps: u64) -> Result<Session> {
        self.ranks.ask(Command::Start(source, steps))?;
        Ok(self.started(steps))
    }

    fn started(self, steps: u64) -> Session {
        let Self { ranks, known } = self;
        let (trace_at, trace, bound, logged, leads) = (None, None, 0, None, false);
        Session { ranks, known, steps, trace_at, trace, bound, logged, leads }
    }

    /// The model's parameters, in its order.
    pub fn parameters(&self) -> &[Param] {
        &self.known.params
    }
}
