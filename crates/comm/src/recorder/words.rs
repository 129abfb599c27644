//! The words of a recorder: of the job, and of each rank. Each has one writer at a time.

use std::time::Duration;

use phalanx_recovery::{Allowed, Ledger, RankProgress, Spent, StartPoint};
use phalanx_sys::machine_nanos;

use super::text::{Did, Event, Noted, RecordedEvent, Text};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// What the launcher and the first rank tell each other, and the epochs to come. All words are zero
/// at the beginning.
#[repr(C, align(128))]
pub struct JobWords {
    /// That this is a recorder, of this build.
    pub(super) mark: [u64; 2],
    pub(super) ranks: u64,
    epoch: AtomicU64,
    active: AtomicU64,
    origin: [AtomicU64; 2],
    /// One more than the restarts that are allowed; 0 before the run has said so.
    pub(super) allowed: AtomicU64,
    pub(super) smaller: [AtomicU64; Allowed::LAYOUTS],
    pub(super) timeout: AtomicU64,
    pub(super) first: [AtomicU64; 2],
    /// Whether ranks are on several hosts, and this recorder shows what others have seen.
    spread: AtomicBool,
    pub(super) over: AtomicBool,
    pub(super) spent: [AtomicU64; Spent::ALL.len()],
    pub(super) furthest: AtomicU64,
    restarts: AtomicU64,
    pub(super) marked: AtomicU64,
    pub(super) floor: AtomicU64,
    lost: AtomicU64,
    cause: Text<16>,
    phase: Text<4>,
    pub(super) folder: Text<512>,
}

impl JobWords {
    /// Begins an epoch of this many ranks. Written by the launcher, while no rank runs.
    pub fn begin(&self, epoch: u64, ranks: usize, from: StartPoint) {
        let (kind, step) = match from {
            StartPoint::Beginning => (0, 0),
            StartPoint::Checkpoint(step) => (1, step),
            StartPoint::Memory(step) => (2, step),
            StartPoint::Copies(step) => (3, step),
        };
        self.origin[0].store(kind, Ordering::SeqCst);
        self.origin[1].store(step, Ordering::SeqCst);
        self.active.store(ranks as u64, Ordering::SeqCst);
        self.restarts.store(epoch, Ordering::SeqCst);
        self.epoch.store(epoch, Ordering::SeqCst);
    }

    /// Says that ranks are on several hosts. Written by the launcher, before any rank runs.
    pub fn set_spread(&self) {
        self.spread.store(true, Ordering::SeqCst);
    }

    /// Whether ranks are on several hosts: their processes have numbers of their hosts.
    pub fn is_spread(&self) -> bool {
        self.spread.load(Ordering::SeqCst)
    }

    /// The epoch that runs.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// How many ranks it has.
    pub fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst) as usize
    }

    /// Where it began.
    pub fn origin(&self) -> StartPoint {
        let step = self.origin[1].load(Ordering::SeqCst);
        match self.origin[0].load(Ordering::SeqCst) {
            0 => StartPoint::Beginning,
            1 => StartPoint::Checkpoint(step),
            2 => StartPoint::Memory(step),
            _ => StartPoint::Copies(step),
        }
    }

    /// Remembers which rank was lost, how, and in which phase of a step.
    pub fn lost(&self, rank: usize, cause: &str, phase: &str) {
        self.lost.store(rank as u64, Ordering::SeqCst);
        self.cause.set(cause);
        self.phase.set(phase);
    }

    /// The rank that was lost last, how, and in which phase of a step.
    pub fn last_lost(&self) -> (usize, String, String) {
        (self.lost.load(Ordering::SeqCst) as usize, self.cause.get(), self.phase.get())
    }

    /// The run says that it can be started again: its folder, the longest wait for a rank, and the
    /// step and the samples with which it began. Written by the first rank.
    pub fn allow(&self, folder: &str, allowed: Allowed, timeout: Duration, first: (u64, u64)) {
        self.folder.set(folder);
        self.timeout.store(timeout.as_millis() as u64, Ordering::SeqCst);
        for (word, ranks) in self.smaller.iter().zip(allowed.smaller) {
            word.store(ranks as u64, Ordering::SeqCst);
        }
        self.first[0].store(first.0, Ordering::SeqCst);
        self.first[1].store(first.1, Ordering::SeqCst);
        self.allowed.store(allowed.restarts.saturating_add(1), Ordering::SeqCst);
    }

    /// What the run allows, if it has said so.
    pub fn allowed(&self) -> Option<Allowed> {
        let restarts = self.allowed.load(Ordering::SeqCst).checked_sub(1)?;
        let smaller = std::array::from_fn(|at| self.smaller[at].load(Ordering::SeqCst) as usize);
        Some(Allowed { restarts, smaller })
    }

    /// The run's folder; empty before it is known.
    pub fn folder(&self) -> String {
        self.folder.get()
    }

    /// The longest wait for a rank.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout.load(Ordering::SeqCst))
    }

    /// The step and the samples with which the run began.
    pub fn first(&self) -> (u64, u64) {
        (self.first[0].load(Ordering::SeqCst), self.first[1].load(Ordering::SeqCst))
    }

    /// Says that the last step is taken: nothing is started again, and memory is not kept.
    pub fn finish(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// Whether the last step is taken.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Where the time went so far.
    pub fn ledger(&self) -> Ledger {
        let spent = Spent::ALL
            .map(|kind| Duration::from_nanos(self.spent[kind as usize].load(Ordering::Relaxed)));
        let restarts = self.restarts.load(Ordering::SeqCst);
        Ledger::of(spent, self.furthest.load(Ordering::Relaxed), restarts)
    }

    /// Keeps a ledger for the epochs to come, and when it was true.
    pub fn keep(&self, ledger: &Ledger, at: u64) {
        for kind in Spent::ALL {
            let nanos = ledger.spent(kind).as_nanos() as u64;
            self.spent[kind as usize].store(nanos, Ordering::Relaxed);
        }
        self.furthest.store(ledger.furthest(), Ordering::Relaxed);
        self.marked.store(at, Ordering::Relaxed);
    }

    /// When the ledger was true, on the machine's clock.
    pub fn marked(&self) -> u64 {
        self.marked.load(Ordering::Relaxed)
    }

    /// Remembers how long the products of a step take alone.
    pub fn set_floor(&self, seconds: f64) {
        self.floor.store(seconds.to_bits(), Ordering::Relaxed);
    }

    /// The same, if it was measured.
    pub fn floor(&self) -> Option<f64> {
        Some(f64::from_bits(self.floor.load(Ordering::Relaxed))).filter(|seconds| *seconds > 0.0)
    }
}

/// How many events of a rank are kept.
const EVENTS: usize = 256;

/// What one rank says. Its process alone writes it; the launcher clears it between epochs.
#[repr(C, align(128))]
pub struct RankWords {
    pub(super) process: AtomicU64,
    /// One more than the file descriptor, in this process, of the memory that state is kept in.
    memory: AtomicU64,
    pub(super) begun: AtomicU64,
    pub(super) entered: AtomicU64,
    pub(super) done: AtomicU64,
    pub(super) panicked: AtomicBool,
    /// When it did something last.
    pub(super) pulse: AtomicU64,
    /// One more than the rank that it waits for; 0 if it does not.
    pub(super) waits_for: AtomicU64,
    /// Whether it waits for all others between commands.
    pub(super) meets: AtomicBool,
    /// Whether it is stopped, as far as its own host has said.
    pub(super) stopped: AtomicBool,
    pub(super) phase: Text<2>,
    /// How many events were recorded.
    count: AtomicU64,
    events: [Event; EVENTS],
}

impl RankWords {
    /// Begins an epoch after this step. Written by the launcher, before the rank runs; what was
    /// recorded stays. Unless the state of that step lies in memory already, the rank counts as
    /// inside an update until it is [`ready`](Self::ready).
    pub fn begin(&self, from: StartPoint) {
        self.process.store(0, Ordering::SeqCst);
        self.memory.store(0, Ordering::SeqCst);
        self.panicked.store(false, Ordering::SeqCst);
        self.waits_for.store(0, Ordering::SeqCst);
        self.meets.store(false, Ordering::SeqCst);
        self.stopped.store(false, Ordering::SeqCst);
        self.phase.set("");
        let step = from.step();
        let inside = !matches!(from, StartPoint::Memory(_));
        self.entered.store(step + u64::from(inside), Ordering::SeqCst);
        for word in [&self.begun, &self.done] {
            word.store(step, Ordering::SeqCst);
        }
    }

    /// Says that the state after this step lies in memory.
    pub fn ready(&self, step: u64) {
        self.entered.store(step, Ordering::SeqCst);
        self.beat();
    }

    /// Says which process the rank is.
    pub fn set_process(&self, process: u32) {
        self.process.store(u64::from(process), Ordering::SeqCst);
    }

    /// The process of the rank; 0 if none has come.
    pub fn process(&self) -> u64 {
        self.process.load(Ordering::SeqCst)
    }

    /// Says where the memory is that the rank keeps its state in, or all ranks of one host: a file descriptor of its
    /// process.
    pub(crate) fn set_memory(&self, fd: i32) {
        self.memory.store(fd as u64 + 1, Ordering::SeqCst);
    }

    /// The same, once it is known.
    pub fn memory(&self) -> Option<u64> {
        self.memory.load(Ordering::SeqCst).checked_sub(1)
    }

    /// Begins a step.
    pub fn begin_step(&self, step: u64) {
        self.begun.store(step, Ordering::SeqCst);
        self.beat();
    }

    /// Says that the next action changes what lasts beyond the step.
    pub fn enter(&self, step: u64) {
        self.entered.store(step, Ordering::SeqCst);
    }

    /// Ends a step.
    pub fn end_step(&self, step: u64) {
        self.done.store(step, Ordering::SeqCst);
        self.beat();
    }

    /// The step that was begun last.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// How far the rank has come.
    pub fn progress(&self) -> RankProgress {
        let (entered, done) = (&self.entered, &self.done);
        RankProgress { entered: entered.load(Ordering::SeqCst), done: done.load(Ordering::SeqCst) }
    }

    /// Says that the process has panicked: what it has in memory cannot be trusted.
    pub fn panic(&self) {
        self.panicked.store(true, Ordering::SeqCst);
    }

    /// Whether it has panicked.
    pub fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::SeqCst)
    }

    /// Says in which phase of a step the rank is.
    pub fn set_phase(&self, phase: &str) {
        self.phase.set(phase);
    }

    /// The phase of a step that it is in.
    pub fn phase(&self) -> String {
        self.phase.get()
    }

    /// Says which rank this one waits for, if it waits.
    pub(crate) fn wait_for(&self, rank: Option<usize>) {
        let word = rank.map_or(0, |rank| rank as u64 + 1);
        self.waits_for.store(word, Ordering::Relaxed);
    }

    /// The rank that it waits for.
    pub fn waits_for(&self) -> Option<usize> {
        self.waits_for.load(Ordering::Relaxed).checked_sub(1).map(|rank| rank as usize)
    }

    /// Says whether its process waits for all others, between commands.
    pub fn set_meets(&self, meets: bool) {
        self.meets.store(meets, Ordering::Relaxed);
        self.beat();
    }

    /// Whether its process waits for all others, between commands.
    pub fn meets(&self) -> bool {
        self.meets.load(Ordering::Relaxed)
    }

    fn beat(&self) {
        self.pulse.store(machine_nanos(), Ordering::Relaxed);
    }

    /// When it did something last, on the machine's clock.
    pub fn pulse(&self) -> u64 {
        self.pulse.load(Ordering::Relaxed)
    }

    /// Records an action of the script.
    pub fn note_action(&self, did: Did, label: &str) {
        self.note(did, label, None);
    }

    /// Records a call between ranks.
    pub(crate) fn note_call(&self, did: Did, site: &str, call: (crate::call::OpKind, &str, u64)) {
        self.note(did, site, Some(call));
    }

    fn note(&self, did: Did, label: &str, call: Option<(crate::call::OpKind, &str, u64)>) {
        let at = machine_nanos();
        self.pulse.store(at, Ordering::Relaxed);
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let step = self.begun.load(Ordering::Relaxed);
        self.place(number, &Noted { at, step, did, label, call });
    }

    pub(super) fn place(&self, number: u64, noted: &Noted<'_>) {
        self.events[number as usize % EVENTS].set(number, noted);
    }

    /// Whether its host has said that it is stopped.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// The last events, the newest last. Events that are being written are left out.
    pub fn events(&self) -> Vec<RecordedEvent> {
        let mut all: Vec<(u64, RecordedEvent)> = self.numbered().collect();
        all.sort_by_key(|(number, _)| *number);
        all.into_iter().map(|(_, event)| event).collect()
    }
    pub(super) fn numbered(&self) -> impl Iterator<Item = (u64, RecordedEvent)> {
        self.events.iter().filter_map(Event::get)
    }
}
