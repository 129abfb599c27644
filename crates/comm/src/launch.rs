//! Starting the ranks of a world: which of them live in this process, and their endpoints.
//!
//! A launcher is called once, by the process that will run its ranks. If ranks are threads it
//! returns all endpoints of the world; if they are processes, each process gets only its own. So
//! users of a launcher must distinguish the ranks of the world from the local ones.

use crate::communicator::Communicator;
use crate::error::CommError;

/// Starts the local ranks of a world.
pub trait Launcher {
    /// How many ranks the world has.
    fn ranks(&self) -> usize;

    /// The ranks of a new world that live in this process, the lowest first; at least one.
    fn launch(&self) -> Result<Vec<LocalRank>, CommError>;

    /// If the world has ranks in other processes: an endpoint of a second world of the same ranks,
    /// over which processes exchange what their ranks answer. It is asked for once, after `launch`.
    fn beside(&self) -> Result<Option<Box<dyn Communicator>>, CommError> {
        Ok(None)
    }
}

/// A rank that lives in this process.
pub struct LocalRank {
    /// Its end of the transport, which knows which rank it is.
    pub endpoint: Box<dyn Communicator>,
    /// The cores that its threads may run on.
    pub cores: Vec<usize>,
}

/// For each local rank the cores for its threads: as many of its own if ranks are bound and there are
/// enough ([`phalanx_sys::Topology::assign`]), otherwise all that this process may use.
pub(crate) fn share_cores(ranks: usize, threads: usize, bind: bool) -> Vec<Vec<usize>> {
    let own = if bind { phalanx_sys::Topology::here().assign(ranks, threads.max(1)) } else { None };
    own.unwrap_or_else(|| vec![phalanx_sys::allowed_cores(); ranks])
}
