//! Launches the one rank of this process.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::environment::MeetingPoint;
use super::job::Membership;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::launch::{Launcher, LocalRank, share_cores};
use crate::streams::over_streams;
use crate::threads::{Options, SharedWorld};

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
    /// Whether all ranks are on this host, so that they can share memory.
    fn is_one_host(&self) -> bool {
        let own = self.job.environment();
        let by_launcher = own.local.is_some_and(|(_, count)| count == own.ranks);
        by_launcher || matches!(own.meet, MeetingPoint::Path(_))
    }

    /// The rank of this process in a new world whose ranks share memory. Rank 0 makes the memory, and
    /// tells the others where they find it.
    fn share_memory(&self) -> Result<LocalRank, CommError> {
        let (job, rank) = (&self.job, self.job.rank());
        let world = match rank {
            0 => Some(SharedWorld::create(job.ranks(), &self.options)?),
            _ => None,
        };
        let place = world.as_ref().map(|world| {
            format!("/proc/{}/fd/{}", std::process::id(), world.fd().as_raw_fd()).into_bytes()
        });
        let place = job.from_first(place.unwrap_or_default())?;
        let place = Path::new(OsStr::from_bytes(&place));
        let memory = File::options().read(true).write(true).open(place);
        let memory = memory.map_err(|error| CommError::System {
            what: format!("the memory that rank 0 shares, {}", place.display()),
            error: error.to_string(),
        })?;
        let local = SharedWorld::attach(memory.as_raw_fd(), rank, self.options.clone())?;
        // When all have connected, all have the memory, and rank 0 need not keep it for them.
        job.connect()?;
        Ok(local)
    }

    /// The rank of this process in a new world whose ranks share no memory.
    fn over_sockets(&self) -> Result<LocalRank, CommError> {
        let Options { threads_per_rank, bind, .. } = self.options;
        let local = self.job.environment().local;
        let (place, count) = local.unwrap_or((0, 1));
        let cores = share_cores(count, threads_per_rank, bind && local.is_some()).remove(place);
        let streams = self.job.connect()?;
        let endpoint = over_streams(self.job.rank(), streams, self.options.clone());
        Ok(LocalRank { endpoint, cores })
    }
}

impl Launcher for Processes {
    fn ranks(&self) -> usize {
        self.job.ranks()
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let local = match self.is_one_host() {
            true => self.share_memory()?,
            false => self.over_sockets()?,
        };
        Ok(vec![local])
    }

    fn beside(&self) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let options = Options { timeout: BETWEEN_COMMANDS, ..Options::default() };
        Ok(Some(over_streams(self.job.rank(), self.job.connect()?, options)))
    }
}
