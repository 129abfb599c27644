//! The processes of a job, wherever they run: what the launcher's loop asks of those that start and
//! watch them.

use phalanx_comm::FlightRecorder;
use phalanx_error::Result;
use phalanx_recovery::{Left, ProcessEnd, StartPoint};
use phalanx_sys::process::Signal;

/// The processes that run at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Epoch {
    /// Its number, from 0.
    pub(crate) number: u64,
    pub(crate) ranks: usize,
    /// Where they begin.
    pub(crate) from: StartPoint,
}

/// Starts and watches the processes of a job.
pub(crate) trait Crew {
    /// Starts all ranks of an epoch; gives those that could not be started, and why. That is an error in
    /// the first epoch.
    fn start(&mut self, epoch: Epoch, recorder: &FlightRecorder) -> Result<Vec<(usize, String)>>;

    /// Looks at all processes: gives the ranks that have ended since the last look, and how. What ranks
    /// on other hosts say of themselves is in the recorder then.
    fn look(&mut self, recorder: &FlightRecorder) -> Vec<(usize, ProcessEnd)>;

    /// Sends a signal to all processes that run.
    fn send(&mut self, signal: Signal);

    /// Whether the process of a rank is stopped.
    fn is_stopped(&self, rank: usize, recorder: &FlightRecorder) -> bool;

    /// The exit code of a rank that has ended by itself.
    fn code(&self, rank: usize) -> Option<i32>;

    /// Adds what an epoch has left, all of whose processes have ended, and where the next one can run.
    fn find_left(&mut self, recorder: &FlightRecorder, left: &mut Left);

    /// The job has ended, with this exit code.
    fn finish(&mut self, code: u8);
}
