//! Faults on purpose: a rank that ends, stops or hangs in a given phase of a given step, for tests of
//! what becomes of the job. They are asked for by one variable, which is read here alone.
//!
//! `PHALANX_FAULT="kill rank=1 step=3 phase=update; segv rank=0 step=5 phase=B nth=2 epoch=1"`: what,
//! on which rank, in which step and phase (at the `nth` action of that phase, 1 if not given), and in
//! which epoch of the job (0 if not given).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use phalanx_error::{Error, Problem, Result};
use phalanx_sys::process::{Fate, suffer};

const VARIABLE: &str = "PHALANX_FAULT";

/// What a rank suffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Suffers(Fate),
    Panics,
    Hangs,
    /// The process that has started the rank ends, as if its host was lost.
    LosesHost,
    /// That process stops, and the rank: the host says nothing any more, and closes nothing.
    Freezes,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Fault {
    kind: Kind,
    rank: usize,
    step: u64,
    phase: String,
    nth: u64,
    epoch: u64,
}

/// The faults of one rank in one epoch.
#[derive(Default)]
pub(crate) struct Faults {
    list: Vec<Fault>,
    /// How many actions of the phase of each fault were seen in its step.
    seen: Vec<AtomicU64>,
}

impl Faults {
    /// The faults that are asked for.
    pub(crate) fn asked(rank: usize, epoch: u64) -> Result<Self> {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        let mut list = read(&text)?;
        list.retain(|fault| fault.rank == rank && fault.epoch == epoch);
        let seen = list.iter().map(|_| AtomicU64::new(0)).collect();
        Ok(Self { list, seen })
    }

    /// An action of this phase is about to be issued.
    pub(crate) fn at(&self, step: u64, phase: &str) {
        for (fault, seen) in self.list.iter().zip(&self.seen) {
            if fault.step == step
                && fault.phase == phase
                && seen.fetch_add(1, Ordering::Relaxed) + 1 == fault.nth
            {
                fault.happen();
            }
        }
    }
}

impl Fault {
    fn happen(&self) {
        match self.kind {
            Kind::Suffers(fate) => suffer(fate),
            Kind::LosesHost => {
                signal_agent("-KILL");
                // The rank ends with it.
                std::thread::sleep(Duration::from_secs(60));
            }
            Kind::Freezes => {
                signal_agent("-STOP");
                suffer(Fate::Stop);
            }
            Kind::Panics => panic!("asked for by {VARIABLE}"),
            Kind::Hangs => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
        }
    }
}

/// Sends a signal to the process that has started this one.
fn signal_agent(signal: &str) {
    let agent = std::os::unix::process::parent_id().to_string();
    let _ = std::process::Command::new("kill").args([signal, &agent]).status();
}

fn read(text: &str) -> Result<Vec<Fault>> {
    let parts = text.split(';').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| one(part).ok_or_else(|| unknown(part))).collect()
}

fn one(text: &str) -> Option<Fault> {
    let mut words = text.split_whitespace();
    let kind = match words.next()? {
        "kill" => Kind::Suffers(Fate::Kill),
        "segv" => Kind::Suffers(Fate::Segfault),
        "stop" => Kind::Suffers(Fate::Stop),
        "panic" => Kind::Panics,
        "hang" => Kind::Hangs,
        "host" => Kind::LosesHost,
        "freeze" => Kind::Freezes,
        _ => return None,
    };
    let (mut rank, mut step, mut phase, mut nth, mut epoch) = (None, None, None, 1, 0);
    for word in words {
        let (key, value) = word.split_once('=')?;
        match key {
            "rank" => rank = Some(value.parse().ok()?),
            "step" => step = Some(value.parse().ok()?),
            "phase" => phase = Some(value.to_owned()),
            "nth" => nth = value.parse().ok()?,
            "epoch" => epoch = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(Fault { kind, rank: rank?, step: step?, phase: phase?, nth, epoch })
}

fn unknown(text: &str) -> Error {
    let problem = Problem::new(format!("{VARIABLE}: `{text}` is not a fault"));
    Error::refused(problem.fix("write it like `kill rank=1 step=3 phase=update nth=1 epoch=0`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_what_is_none_is_refused() {
        let found =
            read("kill rank=1 step=3 phase=update ; segv rank=0 step=5 phase=B nth=2 epoch=1;");
        let fault = |kind, rank, step, phase: &str, nth, epoch| Fault {
            kind,
            rank,
            step,
            phase: phase.to_owned(),
            nth,
            epoch,
        };
        let expected = [
            fault(Kind::Suffers(Fate::Kill), 1, 3, "update", 1, 0),
            fault(Kind::Suffers(Fate::Segfault), 0, 5, "B", 2, 1),
        ];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(read("").unwrap(), []);
        for bad in
            ["die rank=1 step=1 phase=F", "kill rank=1", "kill rank=x step=1 phase=F", "kill 1"]
        {
            let error = read(bad).unwrap_err();
            assert!(error.to_string().contains(bad), "{error}");
        }
    }

    #[test]
    fn only_the_asked_action_is_hit() {
        let list = read("panic rank=0 step=2 phase=F nth=2").unwrap();
        let faults = Faults { seen: vec![AtomicU64::new(0)], list };
        for (step, phase) in [(1, "F"), (2, "B"), (2, "F")] {
            faults.at(step, phase);
        }
        let hit = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| faults.at(2, "F")));
        assert!(hit.is_err());
        faults.at(2, "F");
    }
}
