//! When calls happened, on a host's clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Event;

/// When a call happened, counted from the origin that timing was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallTimes {
    /// When it was issued: from here to its start it waited for others.
    pub issued: Duration,
    /// When everything that it waits for had happened.
    pub started: Duration,
    /// When it ended, or when its end was first noticed.
    pub ended: Duration,
}

/// A part of a call, such as one kernel of a program, and when it ran.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CallPart {
    /// What ran.
    pub name: String,
    /// From when, counted as the call's times are.
    pub started: Duration,
    /// Until when.
    pub ended: Duration,
    /// What it has to do with transfers between ranks.
    pub kind: PartKind,
}

/// What a part of a call has to do with transfers between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PartKind {
    /// Nothing.
    Computes,
    /// It is one, from its start to its end.
    Transfers,
    /// It starts one that runs beside what follows.
    Starts,
    /// It waits for the end of one that was started.
    Ends,
    /// It takes one on that was started and has not ended.
    TakesOn,
}

impl PartKind {
    /// All of them.
    pub const ALL: [PartKind; 5] = [
        PartKind::Computes,
        PartKind::Transfers,
        PartKind::Starts,
        PartKind::Ends,
        PartKind::TakesOn,
    ];
}

/// Times that an engine records on the host when calls start and end. While timing is off this
/// costs nothing.
#[derive(Debug, Default)]
pub struct Stamps {
    origin: Option<Instant>,
    /// Issued, started and ended, as far as known.
    calls: BTreeMap<Event, [Option<Duration>; 3]>,
    parts: BTreeMap<Event, Vec<CallPart>>,
}

impl Stamps {
    /// Turns timing on, with an origin and without earlier times; or off, which keeps the times.
    pub fn time(&mut self, origin: Option<Instant>) {
        self.origin = origin;
        if origin.is_some() {
            self.calls.clear();
            self.parts.clear();
        }
    }

    /// The origin of times, while timing is on.
    pub fn origin(&self) -> Option<Instant> {
        self.origin
    }

    /// What a call consisted of.
    pub fn consists_of(&mut self, event: Event, parts: Vec<CallPart>) {
        self.parts.insert(event, parts);
    }

    /// The parts of a call, as far as they were noted.
    pub fn parts(&self, event: Event) -> Vec<CallPart> {
        self.parts.get(&event).cloned().unwrap_or_default()
    }

    /// Whether timing is on.
    pub fn is_on(&self) -> bool {
        self.origin.is_some()
    }

    /// A call is issued now.
    pub fn issue(&mut self, event: Event) {
        self.note(event, 0);
    }

    /// All that it waits for has happened.
    pub fn start(&mut self, event: Event) {
        self.note(event, 1);
    }

    /// It has ended; only the first notice counts.
    pub fn end(&mut self, event: Event) {
        self.note(event, 2);
    }

    /// The times of a call, if all of them are known.
    pub fn of(&self, event: Event) -> Option<CallTimes> {
        match *self.calls.get(&event)? {
            [Some(issued), Some(started), Some(ended)] => {
                Some(CallTimes { issued, started, ended })
            }
            _ => None,
        }
    }

    fn note(&mut self, event: Event, what: usize) {
        if let Some(origin) = self.origin {
            self.calls.entry(event).or_default()[what].get_or_insert(origin.elapsed());
        }
    }
}
