//! Launches the one rank of this process.

use std::sync::Arc;
use std::time::Duration;

use super::job::Membership;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::launch::{Launcher, LocalRank, share_cores};
use crate::streams::over_streams;
use crate::threads::Options;

/// How long processes wait for each other between commands: one may be writing a large file. A
/// process that ends is noticed at once.
const BETWEEN_COMMANDS: Duration = Duration::from_secs(24 * 3600);

/// Ranks that are the processes of a job: the world has one rank of this process.
#[derive(Clone)]
pub struct Processes {
    /// The processes, which have met.
    pub job: Arc<Membership>,
    /// How long they wait, and where they run.
    pub options: Options,
}

impl Processes {
    /// An endpoint of a new world.
    fn endpoint(&self, options: Options) -> Result<Box<dyn Communicator>, CommError> {
        // Ranks that are all on one host (`MeetingPoint::Path`) could share memory: a transport that
        // does is chosen here, for `launch` alone.
        Ok(over_streams(self.job.rank(), self.job.connect()?, options))
    }
}

impl Launcher for Processes {
    fn ranks(&self) -> usize {
        self.job.ranks()
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let Options { threads_per_rank, bind, .. } = self.options;
        let local = self.job.environment().local;
        let (place, count) = local.unwrap_or((0, 1));
        let cores = share_cores(count, threads_per_rank, bind && local.is_some()).remove(place);
        Ok(vec![LocalRank { endpoint: self.endpoint(self.options.clone())?, cores }])
    }

    fn beside(&self) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let options = Options { timeout: BETWEEN_COMMANDS, ..Options::default() };
        self.endpoint(options).map(Some)
    }
}
