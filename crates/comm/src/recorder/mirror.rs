//! What a recorder on one host shows to the recorder on another, so that one program sees all ranks.
//!
//! Clocks of hosts differ: moments travel as the time that has passed since.

use phalanx_sys::machine_nanos;

use super::text::{Did, Noted};
use super::words::{JobWords, RankWords};
use crate::sync::{AtomicU64, Ordering};

/// What the run has said of itself, as the first rank's host knows it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JobSnapshot {
    /// The words, in an order that both sides know.
    pub numbers: Vec<u64>,
    /// Whether the last step is taken.
    pub over: bool,
    /// Nanoseconds since the ledger was true.
    pub ago: u64,
    /// The run's folder.
    pub folder: String,
}

/// What one rank says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RankSnapshot {
    /// The words, in an order that both sides know.
    pub numbers: Vec<u64>,
    /// Whether it has panicked, whether it waits for all others, and whether it is stopped.
    pub flags: Vec<bool>,
    /// Nanoseconds since it did something.
    pub quiet: u64,
    /// The phase of the step it is in.
    pub phase: String,
    /// What it did last.
    pub events: Vec<SeenEvent>,
}

/// One of the last events of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeenEvent {
    /// Its number among the events of the rank.
    pub number: u64,
    /// Nanoseconds since.
    pub ago: u64,
    /// The step it belongs to.
    pub step: u64,
    /// What happened, by its place in the list of kinds.
    pub did: usize,
    /// The action or call in words.
    pub words: String,
}

impl JobWords {
    /// What the run has said.
    pub fn snapshot(&self) -> JobSnapshot {
        JobSnapshot {
            numbers: self.numbers().map(|word| word.load(Ordering::SeqCst)).collect(),
            over: self.is_over(),
            ago: machine_nanos().saturating_sub(self.marked()),
            folder: self.folder(),
        }
    }

    /// Takes over what another recorder knows.
    pub fn show(&self, seen: &JobSnapshot) {
        self.folder.set(&seen.folder);
        self.marked.store(machine_nanos().saturating_sub(seen.ago), Ordering::SeqCst);
        for (word, number) in self.numbers().zip(&seen.numbers) {
            word.store(*number, Ordering::SeqCst);
        }
        self.over.store(seen.over, Ordering::SeqCst);
    }

    fn numbers(&self) -> impl Iterator<Item = &AtomicU64> {
        let lists = self.smaller.iter().chain(&self.first).chain(&self.spent);
        // What says that restarts are allowed comes after what it allows.
        lists.chain([&self.timeout, &self.furthest, &self.floor, &self.allowed])
    }
}

impl RankWords {
    /// What this recorder knows, with the last few events and the last call.
    pub fn snapshot(&self, last: usize, is_stopped: bool) -> RankSnapshot {
        let now = machine_nanos();
        let mut events: Vec<SeenEvent> = self
            .numbered()
            .map(|(number, event)| SeenEvent {
                number,
                ago: now.saturating_sub(event.at),
                step: event.step,
                did: Did::ALL.iter().position(|did| *did == event.did).unwrap_or(0),
                words: event.words(),
            })
            .collect();
        events.sort_by_key(|event| std::cmp::Reverse(event.number));
        // Reports name the last call, however long ago it was.
        let called = |event: &SeenEvent| Did::ALL[event.did] == Did::Called;
        let call = events.iter().position(called).filter(|place| *place >= last);
        let call = call.map(|place| events.swap_remove(place));
        events.truncate(last);
        events.extend(call);
        RankSnapshot {
            numbers: self.numbers().map(|word| word.load(Ordering::SeqCst)).to_vec(),
            flags: vec![self.has_panicked(), self.meets(), is_stopped],
            quiet: now.saturating_sub(self.pulse()),
            phase: self.phase(),
            events,
        }
    }

    /// Takes over what another recorder knows.
    pub fn show(&self, seen: &RankSnapshot) {
        let now = machine_nanos();
        for (word, number) in self.numbers().into_iter().zip(&seen.numbers) {
            word.store(*number, Ordering::SeqCst);
        }
        let flags = [&self.panicked, &self.meets, &self.stopped];
        flags.into_iter().zip(&seen.flags).for_each(|(word, is)| word.store(*is, Ordering::SeqCst));
        self.pulse.store(now.saturating_sub(seen.quiet), Ordering::SeqCst);
        self.phase.set(&seen.phase);
        for SeenEvent { number, ago, step, did, words } in &seen.events {
            let did = Did::ALL.get(*did).copied().unwrap_or(Did::Began);
            let at = now.saturating_sub(*ago);
            self.place(*number, &Noted { at, step: *step, did, label: words, call: None });
        }
    }

    fn numbers(&self) -> [&AtomicU64; 5] {
        [&self.process, &self.begun, &self.entered, &self.done, &self.waits_for]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use phalanx_recovery::{Allowed, Ledger, RankProgress, Spent};

    use super::*;
    use crate::call::OpKind;
    use crate::recorder::FlightRecorder;

    #[test]
    fn a_recorder_shows_what_another_has_seen() {
        let [one, other] = [0, 1].map(|_| FlightRecorder::create(2).unwrap());
        let allowed = Allowed { restarts: 3, smaller: [4, 2, 1, 0, 0, 0, 0, 0] };
        one.job().allow("runs/a", allowed, Duration::from_secs(7), (5, 40));
        let mut ledger = Ledger::default();
        ledger.add(Spent::Recovery, Duration::from_millis(5));
        ledger.add_step(9, Duration::from_millis(7));
        one.job().keep(&ledger, machine_nanos());
        let rank = one.rank(1);
        rank.set_process(4711);
        rank.begin_step(8);
        rank.enter(8);
        rank.set_phase("B");
        rank.note_call(Did::Called, "norm", (OpKind::AllReduce, "[0, 1]", 7));
        (0..20).for_each(|n| rank.note_action(Did::Began, &format!("blocks.{n} F mb 0")));
        other.job().show(&one.job().snapshot());
        (0..2).for_each(|_| other.rank(1).show(&rank.snapshot(4, true)));
        assert_eq!(other.job().allowed(), Some(allowed));
        assert_eq!((other.job().folder(), other.job().first()), ("runs/a".into(), (5, 40)));
        assert_eq!(other.job().ledger(), ledger);
        let seen = other.rank(1);
        assert_eq!(seen.progress(), RankProgress { entered: 8, done: 0 });
        assert_eq!((seen.process(), seen.phase(), seen.is_stopped()), (4711, "B".into(), true));
        let events = seen.events();
        assert_eq!(events.len(), 5);
        assert_eq!(events[0].words(), "all_reduce #7 of group [0, 1] at `norm`");
        assert_eq!(events[0].did, Did::Called);
        assert_eq!((events[4].words(), events[4].step), ("blocks.19 F mb 0".into(), 8));
    }
}
