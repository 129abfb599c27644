//! Starts ranks as threads: all ranks of the world are local.

use super::options::Options;
use super::world::World;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::launch::{Launcher, LocalRank, share_cores};

/// Ranks that are threads of this process.
#[derive(Clone, Debug)]
pub struct Threads {
    /// How many; at least one.
    pub ranks: usize,
    /// How they wait, and for how long.
    pub options: Options,
}

impl Threads {
    /// This many ranks, with default options.
    pub fn new(ranks: usize) -> Self {
        Self { ranks, options: Options::default() }
    }
}

impl Launcher for Threads {
    fn ranks(&self) -> usize {
        self.ranks.max(1)
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let (ranks, options) = (Launcher::ranks(self), &self.options);
        let endpoints = World::new(ranks, options.clone()).into_endpoints()?;
        let cores = share_cores(ranks, options.threads_per_rank, options.bind);
        let local = |(endpoint, cores)| {
            let endpoint: Box<dyn Communicator> = Box::new(endpoint);
            LocalRank { endpoint, cores }
        };
        Ok(endpoints.into_iter().zip(cores).map(local).collect())
    }
}
