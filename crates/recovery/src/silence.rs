//! Whether the other end of a connection is still alive, from the time of its last message and the times at which
//! this end looked. Both ends send a heartbeat every [`BEAT`].
//!
//! An end that was stopped itself, or whose machine slept, has received nothing either. That time does not count: it
//! starts to count again when it runs again.

use std::time::Duration;

/// The time between two heartbeats.
pub const BEAT: Duration = Duration::from_millis(200);

/// A host from which the coordinator has received nothing for so long is lost.
pub const LOST: Duration = Duration::from_secs(2);

/// An agent that has received nothing from its coordinator for so long ends its ranks. That is shorter than [`LOST`], so
/// they are gone before others take their places.
pub const ALONE: Duration = Duration::from_millis(1500);

/// An end that did not look for so long was stopped itself.
pub const ABSENT: Duration = Duration::from_millis(500);

/// Times are counted from any moment that both calls have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Silence {
    looked: Duration,
    /// Nothing before this counts.
    since: Duration,
}

impl Silence {
    /// The connection was made now.
    pub fn begin(now: Duration) -> Self {
        Self { looked: now, since: now }
    }

    /// How long nothing was received, if that is longer than `most`. `heard` is when the last message came.
    pub fn look(&mut self, heard: Duration, now: Duration, most: Duration) -> Option<Duration> {
        if now.saturating_sub(self.looked) > ABSENT {
            self.since = now;
        }
        self.looked = now;
        let quiet = now.saturating_sub(heard.max(self.since));
        (quiet > most).then_some(quiet)
    }
}
