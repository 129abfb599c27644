//! A world whose ranks are processes of one machine: its memory, and how a process joins it.
//!
//! The process that starts the ranks creates the world, and passes one file descriptor to each process. The
//! memory behind it holds everything: boards, states, names, and a room for each rank's data. A
//! room is as large as the machine's memory, and takes only what is touched.
//!
//! A rank that dies is noticed in two ways: the starting process says so ([`SharedWorld::ended`]), and
//! each process holds a lock on its own byte of the file, which the system takes away with the
//! process; a rank that waits long asks for it.

use std::os::fd::{BorrowedFd, RawFd};
use std::process::Command;
use std::sync::Arc;

use phalanx_sys::memory::{address_space, machine};
use phalanx_sys::{SharedMemory, SysError, shared_memory};

use super::endpoint::Endpoint;
use super::head::{Head, WallLayout, mark};
use super::options::Options;
use super::wall::Wall;
use super::world::Shared;
use crate::error::{CommError, Failure};
use crate::launch::{LocalRank, share_cores};
use crate::sync::Ordering;

/// The memory of ranks that are processes, as the starting process holds it.
///
/// ```no_run
/// # use phalanx_comm::{Options, SharedWorld};
/// # use std::os::fd::AsRawFd;
/// # fn start(program: &str) -> Result<(), Box<dyn std::error::Error>> {
/// let world = SharedWorld::create(2, &Options::default())?;
/// for rank in 0..2 {
///     let mut command = std::process::Command::new(program);
///     command.env("FD", world.fd().as_raw_fd().to_string()).env("RANK", rank.to_string());
///     world.pass_to(&mut command);
///     command.spawn()?;
/// }
/// // Each process: `SharedWorld::attach(fd, rank, options)?.endpoint`.
/// # Ok(())
/// # }
/// ```
pub struct SharedWorld {
    shared: Shared,
    memory: Arc<SharedMemory>,
}

/// The most address space that a world takes: a process has 128 TiB.
const MOST_BYTES: usize = 16 << 40;

/// The most bytes for what a rank publishes.
const SHELF_BYTES: usize = 64 << 20;

/// A smaller room is of no use.
const LEAST_ROOM: usize = 1 << 20;

impl SharedWorld {
    /// New memory for this many ranks, at least one. Only `depth` is the same for all ranks; the
    /// other options are those that each rank attaches with.
    pub fn create(ranks: usize, options: &Options) -> Result<Self, CommError> {
        let mut room = most_room(ranks.max(1));
        loop {
            match Self::with_room(ranks, options, room) {
                // The processor, or a limit that is not known here, allows less.
                Err(_) if room > 64 * LEAST_ROOM => room /= 2,
                result => return result,
            }
        }
    }

    /// The same with this many bytes of data for each rank.
    pub(crate) fn with_room(
        ranks: usize,
        options: &Options,
        room: usize,
    ) -> Result<Self, CommError> {
        let ranks = ranks.max(1);
        let whole = |bytes: usize| (bytes / WallLayout::STEP).max(1) * WallLayout::STEP;
        let (shelf, room) = (whole(SHELF_BYTES.min(room / 8)), whole(room));
        let layout = WallLayout { ranks, shelf, room };
        let what = format!("a world of {ranks} ranks with {room} bytes each");
        let bytes = layout.bytes().filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| refused(&what, "there is no such size".to_string()))?;
        let memory = SharedMemory::create(bytes).map_err(|error| refused(&what, limits(&error)))?;
        let memory = Arc::new(memory);
        let wall = Wall::create(memory.clone(), options.slots(), layout);
        let shared = Shared::new(Arc::new(wall), options.clone());
        Ok(Self { shared, memory })
    }

    /// A new world of this many ranks in the memory of one whose processes have all ended, behind a
    /// file descriptor that this process has inherited. Arenas that ranks take over begin as they were.
    pub fn renew(number: RawFd, ranks: usize, options: &Options) -> Result<Self, CommError> {
        let refused = |error: String| refused("the memory of an earlier world", error);
        let memory = SharedMemory::open(number).map_err(|error| refused(limits(&error)))?;
        let layout = check_head(&memory).map_err(refused)?;
        if layout.ranks != ranks {
            return Err(refused(format!("it has {} ranks, not {ranks}", layout.ranks)));
        }
        if let Some(rank) = (0..ranks).find(|&rank| memory.is_held(rank)) {
            return Err(refused(format!("the process of rank {rank} still lives")));
        }
        let memory = Arc::new(memory);
        let wall = Wall::renew(memory.clone(), options.slots());
        let wall = wall.map_err(|error| refused(error.to_string()))?;
        let shared = Shared::new(Arc::new(wall), options.clone());
        Ok(Self { shared, memory })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.shared.wall.ranks()
    }

    /// The file descriptor of the memory. Processes that a command starts inherit it only by
    /// [`SharedWorld::pass_to`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Lets the process that a command starts inherit the file descriptor, under the same number.
    pub fn pass_to(&self, command: &mut Command) {
        self.memory.pass_to(command);
    }

    /// Says that the process of a rank has ended, once it was waited for. If it should not have, how
    /// it ended is the reason for which all ranks are stopped, unless there was one before.
    pub fn ended(&self, rank: usize, how: Option<&str>) {
        let wall = &self.shared.wall;
        wall.state(rank).gone.store(true, Ordering::SeqCst);
        if let Some(how) = how {
            let message = || format!("{how}; it {}", self.shared.last_finished(rank));
            self.shared.poison(wall.ranks(), rank, message);
        }
    }

    /// Stops all ranks because of one of them; returns the first failure, which may be an earlier
    /// one.
    pub fn stop(&self, rank: usize, message: &str) -> Failure {
        self.shared.poison(self.ranks(), rank, || message.to_string());
        let own = || Failure { rank, message: message.into() };
        self.failure().unwrap_or_else(own)
    }

    /// The first failure of any rank.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.failure()
    }

    /// What a rank finished last, for messages.
    pub fn last_finished(&self, rank: usize) -> String {
        self.shared.last_finished(rank)
    }

    /// Leaves a rank's words as if it had died while it touched other memory.
    #[cfg(test)]
    pub(crate) fn plant_touching(&self, rank: usize) {
        self.shared.wall.state(rank).touching.store(true, Ordering::SeqCst);
    }

    /// Makes this process a rank of the world behind a file descriptor, which it has inherited or
    /// has open. Each rank is attached once.
    pub fn attach(number: RawFd, rank: usize, options: Options) -> Result<LocalRank, CommError> {
        let refused = |error: String| refused(&format!("joining a world as rank {rank}"), error);
        let memory = SharedMemory::open(number).map_err(|error| refused(limits(&error)))?;
        let layout = check_head(&memory).map_err(refused)?;
        if rank >= layout.ranks {
            return Err(refused(format!("it has {} ranks, numbered from 0", layout.ranks)));
        }
        let memory = Arc::new(memory);
        let wall = Wall::attach(memory.clone());
        // First the lock, so that a rank that has come and does not hold it is gone.
        if !memory.hold(rank).map_err(|error| refused(error.to_string()))? {
            return Err(refused("another process is this rank".to_string()));
        }
        if wall.state(rank).came.swap(true, Ordering::SeqCst) {
            return Err(refused("its process has ended; start a new world".to_string()));
        }
        let cores = share_cores(layout.ranks, options.threads_per_rank, options.bind);
        let endpoint = Endpoint::new(Arc::new(Shared::new(Arc::new(wall), options)), rank)?;
        let cores = cores.into_iter().nth(rank).unwrap_or_default();
        Ok(LocalRank { endpoint: Box::new(endpoint), cores })
    }
}

/// As much as a rank could ever use: no more than the machine has, and than address space and file
/// sizes allow. Half of the address space is left for everything else.
fn most_room(ranks: usize) -> usize {
    let total = machine().map_or(MOST_BYTES as u64, |machine| machine.total);
    let space = address_space().map(|space| space.available / 2);
    let all = [Some(MOST_BYTES as u64), space, shared_memory::file_limit()];
    let all = all.into_iter().flatten().min().unwrap_or(MOST_BYTES as u64);
    // Shelves are an eighth of rooms at most.
    let each = (all / 8 * 7) as usize / (ranks + 1);
    each.min(total as usize).saturating_sub(WallLayout::STEP)
}

/// The layout of a wall in memory that claims to hold one.
fn check_head(memory: &SharedMemory) -> Result<WallLayout, String> {
    let foreign = || "the file descriptor is not of a world".to_string();
    if memory.len() < size_of::<Head>() {
        return Err(foreign());
    }
    let head: *const Head = memory.as_ptr().cast();
    // SAFETY: the memory is long enough, and every bit pattern is a number. What others may write
    // meanwhile is not read here.
    let ([ours, build], layout) = unsafe { ((*head).mark, (*head).layout) };
    if ours != mark()[0] {
        return Err(foreign());
    }
    if [ours, build] != mark() || layout.bytes() != Some(memory.len()) {
        return Err("the world was made by another version; use one for all ranks".to_string());
    }
    Ok(layout)
}

fn refused(what: &str, error: String) -> CommError {
    CommError::System { what: what.to_string(), error }
}

fn limits(error: &SysError) -> String {
    format!("{error}; allow more address space (ulimit -v) and larger files (ulimit -f)")
}
