//! What a job does when a rank is lost, as pure code: no clock, no file, no process.
//!
//! [`Coordinator`] takes events (a process has ended, a rank hangs) and gives actions (end the others,
//! start all again from here). [`blame`] finds the rank that all others wait for, and [`Silence`] a host
//! that no longer answers. [`Ledger`] adds up where the time of a run went. The launcher of a job does the rest: it watches and starts processes.
#![forbid(unsafe_code)]

mod blame;
mod coordinator;
mod ledger;
mod silence;

pub use blame::{Blame, Life, RankSight, blame};
pub use coordinator::{
    Allowed, Coordinator, JobAction, JobEnd, JobEvent, Left, ProcessEnd, RankProgress, StartPoint,
};
pub use ledger::{Ledger, Spent};
pub use silence::{ABSENT, ALONE, BEAT, LOST, Silence};
