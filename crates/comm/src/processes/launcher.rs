//! Launches the one rank of this process.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::environment::MeetingPoint;
use super::job::Membership;
use crate::communicator::{CallWatch, Communicator};
use crate::error::CommError;
use crate::launch::{Launcher, LocalRank, share_cores};
use crate::recorder::{CallRecorder, FlightRecorder};
use crate::streams::over_streams;
use crate::threads::{ArenaLife, Options, SharedWorld, Waiting};

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
    /// Where their calls are recorded, if anywhere.
    pub recorder: Option<Arc<FlightRecorder>>,
    /// The memory that they keep their state in.
    pub memory: StateMemory,
}

/// Whether what ranks keep in memory outlives their processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateMemory {
    /// It ends with them.
    Own,
    /// The recorder says where it is, so that the launcher can hold it.
    Held,
    /// The same, and it is that of ranks before them, behind this file descriptor: that of the first rank on one host,
    /// which all share, and on several each rank's own.
    TakenOver(RawFd),
}

/// The memory that this process shows to the launcher.
static SHOWN: Mutex<Option<File>> = Mutex::new(None);

fn show(memory: Option<File>) {
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = memory;
}

impl Processes {
    /// The processes of a job, whose memory ends with them, and whose calls nobody records.
    pub fn new(job: Arc<Membership>, options: Options) -> Self {
        Self { job, options, recorder: None, memory: StateMemory::Own }
    }

    /// Stops showing the launcher the memory that ranks keep their state in: it ends with the ranks.
    pub fn hide_memory() {
        show(None);
    }

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
        let recorder = self.recorder.as_ref();
        let world = match (rank, self.memory) {
            (0, StateMemory::TakenOver(fd)) => {
                Some(SharedWorld::renew(fd, job.ranks(), &self.options)?)
            }
            (0, _) => Some(SharedWorld::create(job.ranks(), &self.options)?),
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
        let options =
            Options { watch: self.watch(), arena: self.arena_life(), ..self.options.clone() };
        let local = SharedWorld::attach(memory.as_raw_fd(), rank, options)?;
        // When all have connected, all have the memory, and rank 0 need not keep it for them.
        job.connect()?;
        if let (0, Some(recorder), false) = (rank, recorder, self.memory == StateMemory::Own) {
            recorder.rank(rank).set_memory(memory.as_raw_fd());
            show(Some(memory));
        }
        Ok(local)
    }

    fn arena_life(&self) -> ArenaLife {
        match self.memory {
            StateMemory::Own => ArenaLife::Own,
            StateMemory::Held => ArenaLife::Kept,
            StateMemory::TakenOver(_) => ArenaLife::TakenOver,
        }
    }

    /// The memory of a rank that shares it with no other, but with the agent of its host: a world of one rank, from
    /// which it has its arena. Nothing if the memory may end with the rank.
    fn keep_memory(&self) -> Result<Option<Box<dyn Communicator>>, CommError> {
        let Some(recorder) = self.recorder.as_ref().filter(|_| self.memory != StateMemory::Own)
        else {
            return Ok(None);
        };
        let world = match self.memory {
            StateMemory::TakenOver(fd) => SharedWorld::renew(fd, 1, &self.options)?,
            _ => SharedWorld::create(1, &self.options)?,
        };
        let options = Options { arena: self.arena_life(), ..self.options.clone() };
        let local = SharedWorld::attach(world.fd().as_raw_fd(), 0, options)?;
        let memory = world.fd().try_clone_to_owned().map_err(|error| CommError::System {
            what: "the memory of a rank".to_owned(),
            error: error.to_string(),
        })?;
        recorder.rank(self.job.rank()).set_memory(memory.as_raw_fd());
        show(Some(File::from(memory)));
        Ok(Some(local.endpoint))
    }

    /// Records this rank's calls.
    fn watch(&self) -> Option<Arc<dyn CallWatch>> {
        let (recorder, rank) = (self.recorder.clone()?, self.job.rank());
        Some(Arc::new(CallRecorder { recorder, rank }))
    }

    /// The rank of this process in a new world whose ranks share no memory.
    fn over_sockets(&self) -> Result<LocalRank, CommError> {
        if self.options.exchanges_first {
            return Err(CommError::System {
                what: "exchanges that go before other calls".to_owned(),
                error: "they can where all ranks are on one host (parallel.comm_priority = \"none\" works \
                        on several)"
                    .to_owned(),
            });
        }
        let Options { threads_per_rank, bind, .. } = self.options;
        let local = self.job.environment().local;
        let (place, count) = local.unwrap_or((0, 1));
        let cores = share_cores(count, threads_per_rank, bind && local.is_some()).remove(place);
        let (job, kept) = (&self.job, self.keep_memory()?);
        let options = Options { watch: self.watch(), ..self.options.clone() };
        let endpoint = match job.mpi() {
            Some(_) => over_streams(job.rank(), job.connect()?, options, count, kept),
            None => over_streams(job.rank(), job.connect_two_ways()?, options, count, kept),
        };
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
        let waiting = Waiting::Park;
        let options = Options { timeout: BETWEEN_COMMANDS, waiting, ..Options::default() };
        Ok(Some(over_streams(self.job.rank(), self.job.connect()?, options, 1, None)))
    }
}
