//! What an engine counts of its own work.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_call::{Moved, Route};

/// What a rank's engine has done since it was made, as it was counted where it was done: nothing
/// here follows from what programs say.
pub trait Counters {
    /// What this rank moved, by op and axes. Of a message the sender makes the call and the receiver
    /// moves the bytes, both under `send`.
    fn moved(&mut self) -> BTreeMap<Route, Moved>;

    /// Time inside matrix products.
    fn products(&mut self) -> Duration;

    /// Bytes beside the arenas that kernels use while they run.
    fn bytes_beside(&mut self) -> usize;

    /// Processor time that the rank's own thread worked; waiting for other ranks is not counted. None
    /// where nobody counts it.
    fn busy(&mut self) -> Option<Duration>;
}
