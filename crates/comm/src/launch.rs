//! How the ranks of a world come to be: which of them live in this process, and their endpoints.
//!
//! A launcher is asked once, by the process that will run its ranks. Where ranks are threads it
//! gives all endpoints of the world; where they are processes, each process gets its own alone. So
//! whoever uses a launcher keeps apart the ranks of the world and those that are local.

use crate::communicator::Communicator;
use crate::error::CommError;

/// Brings up the local ranks of a world.
pub trait Launcher {
    /// How many ranks the world has.
    fn ranks(&self) -> usize;

    /// The ranks of a new world that live in this process, the lowest first; at least one.
    fn launch(&self) -> Result<Vec<LocalRank>, CommError>;
}

/// A rank that lives in this process.
pub struct LocalRank {
    /// Its end of the transport, which knows which rank it is.
    pub endpoint: Box<dyn Communicator>,
    /// The cores that its threads may run on.
    pub cores: Vec<usize>,
}

/// By local rank, the cores for its threads: `threads` of its own for each if they are to be bound
/// and there are enough, otherwise all that this process may use.
pub(crate) fn share_cores(ranks: usize, threads: usize, bind: bool) -> Vec<Vec<usize>> {
    let (all, threads) = (phalanx_sys::allowed_cores(), threads.max(1));
    let enough = bind && ranks.saturating_mul(threads) <= all.len();
    let of = |rank: usize| match enough {
        true => all[rank * threads..][..threads].to_vec(),
        false => all.clone(),
    };
    (0..ranks).map(of).collect()
}
