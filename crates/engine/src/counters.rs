//! What an engine counts of its own work.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_call::{Moved, Route};

/// What a rank's engine has done since it was created, counted where it happens: nothing here is
/// computed from programs.
pub trait Counters {
    /// What this rank moved, by op and axes. For a message, the call counts at the sender and the
    /// bytes at the receiver, both under `send`.
    fn moved(&mut self) -> BTreeMap<Route, Moved>;

    /// Whether exchanges of rows move no more than there are; if not, regions travel whole.
    fn moves_rows(&self) -> bool {
        true
    }

    /// Time inside matrix products.
    fn products(&mut self) -> Duration;

    /// Bytes outside the arenas that kernels use while they run.
    fn scratch_bytes(&mut self) -> usize;

    /// Processor time that the rank's own thread worked; waiting for other ranks is not counted.
    /// `None` if it is not measured.
    fn busy(&mut self) -> Option<Duration>;
}
