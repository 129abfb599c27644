//! Where the time of a run goes. Every moment belongs to something: at each mark, the time since the
//! last one is added to what it was spent for. If the run has a launcher, the sums outlive this process.

use std::time::Duration;

use phalanx_recovery::{Ledger, Spent};
use phalanx_session::job;
use phalanx_sys::machine_nanos;
use serde::Serialize;

/// The clock of a run.
pub(crate) struct Times {
    ledger: Ledger,
    last: u64,
}

impl Times {
    /// Goes on where the processes before this one have left it, or begins now.
    pub(crate) fn begin() -> Self {
        match job::recorder().filter(|_| job::is_first()) {
            Some(recorder) => {
                let words = recorder.job();
                Self { ledger: words.ledger(), last: words.marked() }
            }
            None => Self { ledger: Ledger::default(), last: machine_nanos() },
        }
    }

    /// The first step of this process begins.
    pub(crate) fn steps_begin(&mut self) {
        let again = self.ledger.restarts > 0;
        self.mark(if again { Spent::Recovery } else { Spent::Start });
    }

    /// A step has ended.
    pub(crate) fn step(&mut self, step: u64) {
        let time = self.since();
        self.ledger.add_step(step, time);
        self.keep();
    }

    /// Something has ended.
    pub(crate) fn mark(&mut self, kind: Spent) {
        let time = self.since();
        self.ledger.add(kind, time);
        self.keep();
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn since(&mut self) -> Duration {
        let now = machine_nanos();
        let before = std::mem::replace(&mut self.last, now);
        Duration::from_nanos(now.saturating_sub(before))
    }

    fn keep(&self) {
        if let Some(recorder) = job::recorder().filter(|_| job::is_first()) {
            recorder.job().keep(&self.ledger, self.last);
        }
    }
}

/// The ledger of a run, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct LedgerLine {
    /// Steps that brought the run further, and evaluations.
    pub productive: f64,
    /// Steps that had been taken before a failure, and were taken again.
    pub redone: f64,
    /// From the last finished step before a failure to the first step after it.
    pub recovery: f64,
    /// Waiting for checkpoints between steps.
    pub checkpoint: f64,
    /// From the start to the first step, and from the last step to the end.
    pub start: f64,
    /// How many times ranks were started again.
    pub restarts: u64,
    /// The productive share of the time after the start.
    pub goodput: f64,
}

impl From<&Ledger> for LedgerLine {
    fn from(ledger: &Ledger) -> Self {
        let seconds = |kind: Spent| ledger.spent(kind).as_secs_f64();
        Self {
            productive: seconds(Spent::Productive),
            redone: seconds(Spent::Redone),
            recovery: seconds(Spent::Recovery),
            checkpoint: seconds(Spent::Checkpoint),
            start: seconds(Spent::Start),
            restarts: ledger.restarts,
            goodput: ledger.goodput().unwrap_or(0.0),
        }
    }
}
