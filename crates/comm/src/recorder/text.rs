//! Short texts and events in shared memory, written by one process and read by others at any time.
//!
//! A reader may meet a writer in the middle. Texts are only for people, so a torn one does no harm;
//! an event is recognised as torn by its stamp, and left out.

use crate::call::OpKind;
use crate::sync::{AtomicU64, Ordering};

/// A text of at most `8 * N` bytes.
#[repr(C)]
pub(super) struct Text<const N: usize> {
    len: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Text<N> {
    /// Writes a text, cut to what fits; allocates nothing.
    pub(super) fn set(&self, text: &str) {
        let bytes = &text.as_bytes()[..text.len().min(8 * N)];
        self.len.store(0, Ordering::Relaxed);
        for (word, chunk) in self.words.iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        self.len.store(bytes.len() as u64, Ordering::Release);
    }

    pub(super) fn get(&self) -> String {
        let len = (self.len.load(Ordering::Acquire) as usize).min(8 * N);
        let words = self.words.iter().take(len.div_ceil(8));
        let bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).take(len).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// What a rank did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Did {
    /// It began an action of its script.
    Began,
    /// It ended an action, or has left it to run by itself.
    Ended,
    /// It began a call between ranks.
    Called,
    /// Such a call has ended.
    Returned,
}

impl Did {
    pub(super) const ALL: [Did; 4] = [Did::Began, Did::Ended, Did::Called, Did::Returned];

    /// The word in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Did::Began => "began",
            Did::Ended => "ended",
            Did::Called => "called",
            Did::Returned => "returned",
        }
    }
}

/// An event, as it is read back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedEvent {
    /// When, on the machine's clock, in nanoseconds.
    pub at: u64,
    /// The step it belongs to.
    pub step: u64,
    /// What happened.
    pub did: Did,
    /// The action's label, or the call's site.
    pub label: String,
    /// Of a call: the operation, its group, and its number in the group.
    pub call: Option<(OpKind, String, u64)>,
}

impl RecordedEvent {
    /// A call in words; an action's label.
    pub fn words(&self) -> String {
        match &self.call {
            Some((op, group, number)) => {
                format!("{op} #{number} of group {group} at `{}`", self.label)
            }
            None => self.label.clone(),
        }
    }
}

/// An event in shared memory.
#[repr(C, align(64))]
pub(super) struct Event {
    /// One more than its number; 0 while it is written.
    stamp: AtomicU64,
    at: AtomicU64,
    step: AtomicU64,
    /// What happened, and one more than the operation of a call.
    what: AtomicU64,
    number: AtomicU64,
    group: Text<5>,
    label: Text<10>,
}

/// What is written of an event.
pub(super) struct Noted<'a> {
    pub(super) at: u64,
    pub(super) step: u64,
    pub(super) did: Did,
    pub(super) label: &'a str,
    pub(super) call: Option<(OpKind, &'a str, u64)>,
}

impl Event {
    pub(super) fn set(&self, number: u64, noted: &Noted<'_>) {
        self.stamp.store(0, Ordering::SeqCst);
        self.at.store(noted.at, Ordering::Relaxed);
        self.step.store(noted.step, Ordering::Relaxed);
        let op = noted.call.map_or(0, |(op, ..)| op as u64 + 1);
        self.what.store((noted.did as u64) << 32 | op, Ordering::Relaxed);
        self.label.set(noted.label);
        if let Some((_, group, number)) = noted.call {
            self.group.set(group);
            self.number.store(number, Ordering::Relaxed);
        }
        self.stamp.store(number + 1, Ordering::Release);
    }

    /// Its number and what it says; nothing if it is empty or being written.
    pub(super) fn get(&self) -> Option<(u64, RecordedEvent)> {
        let stamp = self.stamp.load(Ordering::Acquire);
        let what = self.what.load(Ordering::Relaxed);
        let did = *Did::ALL.get((what >> 32) as usize)?;
        let op = (what as u32 as usize).checked_sub(1).and_then(|op| OpKind::ALL.get(op));
        let number = self.number.load(Ordering::Relaxed);
        let event = RecordedEvent {
            at: self.at.load(Ordering::Relaxed),
            step: self.step.load(Ordering::Relaxed),
            did,
            label: self.label.get(),
            call: op.map(|&op| (op, self.group.get(), number)),
        };
        let same = self.stamp.load(Ordering::SeqCst) == stamp;
        (same && stamp > 0).then_some((stamp.wrapping_sub(1), event))
    }
}
