//! Whether the other end of a connection is still there: from when it was heard last, and when this end
//! looked. Both ends say [`BEAT`] by [`BEAT`] that they live.
//!
//! An end that was not there itself (stopped, or on a machine that slept) has heard nothing either. What it
//! has missed is not held against the other: it counts anew from when it is back.

use std::time::Duration;

/// How often an end says that it lives.
pub const BEAT: Duration = Duration::from_millis(200);

/// A host of which the coordinator has heard nothing for so long is lost.
pub const LOST: Duration = Duration::from_secs(2);

/// An agent that has heard nothing of its coordinator for so long ends its ranks: before others take their
/// places.
pub const ALONE: Duration = Duration::from_millis(1500);

/// An end that did not look for so long was not there itself.
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

    /// How long nothing was heard, if that is longer than `most`. `heard` is when something came last.
    pub fn look(&mut self, heard: Duration, now: Duration, most: Duration) -> Option<Duration> {
        if now.saturating_sub(self.looked) > ABSENT {
            self.since = now;
        }
        self.looked = now;
        let quiet = now.saturating_sub(heard.max(self.since));
        (quiet > most).then_some(quiet)
    }
}
