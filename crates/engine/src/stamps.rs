//! When calls happened, on a host's clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Event;

/// When a call happened, counted from the origin that timing was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Times {
    /// When it was its turn: from here to the start it waited for others.
    pub issued: Duration,
    /// When everything that it waits for had happened.
    pub started: Duration,
    /// When it was over, or first seen to be.
    pub ended: Duration,
}

/// Notes of an engine whose host sees calls start and end. While timing is off they cost nothing.
#[derive(Debug, Default)]
pub struct Stamps {
    origin: Option<Instant>,
    /// Issued, started and ended, as far as known.
    calls: BTreeMap<Event, [Option<Duration>; 3]>,
}

impl Stamps {
    /// Turns timing on, from an origin and without the notes of before; or off, which keeps them.
    pub fn time(&mut self, origin: Option<Instant>) {
        self.origin = origin;
        if origin.is_some() {
            self.calls.clear();
        }
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

    /// It is over; who notices later changes nothing.
    pub fn end(&mut self, event: Event) {
        self.note(event, 2);
    }

    /// When a call happened, if all of it was seen.
    pub fn of(&self, event: Event) -> Option<Times> {
        match *self.calls.get(&event)? {
            [Some(issued), Some(started), Some(ended)] => Some(Times { issued, started, ended }),
            _ => None,
        }
    }

    fn note(&mut self, event: Event, what: usize) {
        if let Some(origin) = self.origin {
            self.calls.entry(event).or_default()[what].get_or_insert(origin.elapsed());
        }
    }
}
