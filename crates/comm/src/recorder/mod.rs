//! A flight recorder: what the ranks of a job did last, in memory that outlives their processes.
//!
//! The launcher of a job makes it and keeps it; each process of a rank maps it and writes its own
//! part: how far it has come, what it waits for, and the last few hundred actions and calls. So
//! after a process was killed, the launcher knows what it was doing; and while all live, anyone who
//! may look into the launcher's files can see who waits for whom (`phalanx doctor`).

mod mirror;
mod text;
mod words;

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use phalanx_sys::SharedMemory;

pub use mirror::{JobSnapshot, RankSnapshot, SeenEvent};
pub use text::{Did, RecordedEvent};
pub use words::{JobWords, RankWords};

use crate::call::OpKind;
use crate::communicator::CallWatch;
use crate::error::CommError;
use crate::site::Site;

/// The recorder of a job, as one process sees it.
pub struct FlightRecorder {
    memory: SharedMemory,
}

impl FlightRecorder {
    /// A new recorder for this many ranks, at least one.
    pub fn create(ranks: usize) -> Result<Self, CommError> {
        let ranks = ranks.max(1);
        let memory = SharedMemory::create(bytes(ranks)).map_err(|error| {
            refused(format!("{error}; allow larger files (ulimit -f) and more address space (-v)"))
        })?;
        let new = Self { memory };
        let words: *mut JobWords = new.memory.as_ptr().cast();
        // SAFETY: the memory is long enough, aligned to pages, and nobody else knows it yet.
        unsafe {
            (*words).mark = mark();
            (*words).ranks = ranks as u64;
        }
        Ok(new)
    }

    /// The recorder behind a file descriptor that this process has inherited, or has open.
    pub fn open(number: RawFd) -> Result<Self, CommError> {
        let memory = SharedMemory::open(number).map_err(|error| refused(error.to_string()))?;
        let foreign = || refused("the file descriptor is not of a recorder of this version".into());
        if memory.len() < size_of::<JobWords>() {
            return Err(foreign());
        }
        let words: *const JobWords = memory.as_ptr().cast();
        // SAFETY: the memory is long enough, and every bit pattern is a number; both were written
        // before any other process knew the memory.
        let (found, ranks) = unsafe { ((*words).mark, (*words).ranks) };
        let fits = usize::try_from(ranks)
            .is_ok_and(|ranks| ranks > 0 && ranks <= memory.len() && memory.len() == bytes(ranks));
        if found != mark() || !fits {
            return Err(foreign());
        }
        Ok(Self { memory })
    }

    /// The recorder that another process has open: `/proc/PROCESS/fd/NUMBER`.
    pub fn open_path(path: &Path) -> Result<Self, CommError> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|error| refused(format!("{}: {error}", path.display())))?;
        Self::open(file.as_raw_fd())
    }

    /// The file descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// Lets the process that a command starts inherit the recorder, under the number of [`Self::fd`].
    pub fn pass_to(&self, command: &mut Command) {
        self.memory.pass_to(command);
    }

    /// How many ranks it has room for.
    pub fn ranks(&self) -> usize {
        self.job().ranks as usize
    }

    /// What concerns all ranks.
    pub fn job(&self) -> &JobWords {
        // SAFETY: the memory begins with these words, is mapped as long as `self`, and is only
        // changed through atomics once others know it.
        unsafe { &*self.memory.as_ptr().cast() }
    }

    /// What a rank says.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn rank(&self, rank: usize) -> &RankWords {
        assert!(rank < self.ranks(), "rank {rank} of {}", self.ranks());
        // SAFETY: the words of this many ranks follow those of the job; zeros are valid, and they
        // are only changed through atomics.
        unsafe { &*self.memory.as_ptr().add(first()).cast::<RankWords>().add(rank) }
    }
}

/// Where the words of ranks begin.
fn first() -> usize {
    size_of::<JobWords>().next_multiple_of(align_of::<RankWords>())
}

fn bytes(ranks: usize) -> usize {
    let all = ranks.saturating_mul(size_of::<RankWords>()).saturating_add(first());
    all.checked_next_multiple_of(SharedMemory::PAGE).unwrap_or(usize::MAX)
}

/// What a recorder is recognised by: a number of our own, and one that changes with its layout.
fn mark() -> [u64; 2] {
    let sizes = [size_of::<JobWords>(), size_of::<RankWords>(), OpKind::ALL.len()];
    let version = env!("CARGO_PKG_VERSION").bytes().map(usize::from);
    let digest = version.chain(sizes).fold(0xcbf2_9ce4_8422_2325, |digest: u64, part| {
        (digest ^ part as u64).wrapping_mul(0x0100_0000_01b3)
    });
    [u64::from_le_bytes(*b"phx rec\0"), digest]
}

fn refused(error: String) -> CommError {
    CommError::System { what: "the memory in which ranks record what they do".to_owned(), error }
}

/// Records the calls of one rank.
pub(crate) struct CallRecorder {
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) rank: usize,
}

impl CallWatch for CallRecorder {
    fn began(&self, op: OpKind, group: &str, number: u64, site: Site) {
        self.recorder.rank(self.rank).note_call(Did::Called, site.name(), (op, group, number));
    }

    fn ended(&self, op: OpKind, group: &str, number: u64, site: Site) {
        self.recorder.rank(self.rank).note_call(Did::Returned, site.name(), (op, group, number));
    }

    fn waits(&self, rank: Option<usize>) {
        self.recorder.rank(self.rank).wait_for(rank);
    }
}

#[cfg(test)]
mod tests {
    use phalanx_recovery::{Allowed, Ledger, RankProgress, Spent, StartPoint};
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_one_process_writes_another_reads() {
        let made = FlightRecorder::create(3).unwrap();
        let own = FlightRecorder::open(made.fd().as_raw_fd()).unwrap();
        assert_eq!(own.ranks(), 3);
        made.job().begin(2, 3, StartPoint::Memory(7));
        assert_eq!((own.job().epoch(), own.job().origin()), (2, StartPoint::Memory(7)));
        assert_eq!(own.job().allowed(), None);
        let allowed = Allowed { restarts: 0, smaller: [2, 1, 0, 0, 0, 0, 0, 0] };
        own.job().allow("runs/a", allowed, Duration::from_secs(3), (4, 64));
        assert_eq!((made.job().allowed(), made.job().folder()), (Some(allowed), "runs/a".into()));
        assert_eq!((made.job().first(), made.job().timeout().as_secs()), ((4, 64), 3));
        let mut ledger = Ledger::default();
        ledger.add(Spent::Start, Duration::from_millis(5));
        ledger.add_step(9, Duration::from_millis(7));
        own.job().keep(&ledger, 11);
        ledger.restarts = 2;
        assert_eq!((made.job().ledger(), made.job().marked()), (ledger, 11));
        own.rank(2).begin_step(8);
        own.rank(2).enter(8);
        assert_eq!(made.rank(2).progress(), RankProgress { entered: 8, done: 0 });
        own.rank(2).end_step(8);
        assert_eq!(made.rank(2).progress(), RankProgress { entered: 8, done: 8 });
        assert_eq!(made.rank(1).progress(), RankProgress::default());
    }

    #[test]
    fn the_newest_events_stay() {
        let made = FlightRecorder::create(1).unwrap();
        let rank = made.rank(0);
        for number in 0..1000 {
            rank.begin_step(number);
            rank.note_action(Did::Began, &format!("blocks.{number} F mb 0"));
            rank.note_call(Did::Called, "norm", (OpKind::AllReduce, "[0, 1]", number));
        }
        let events = rank.events();
        assert_eq!(events.len(), 256);
        assert!(events.is_sorted_by_key(|event| event.at));
        let last = events.last().unwrap();
        assert_eq!(last.words(), "all_reduce #999 of group [0, 1] at `norm`");
        assert_eq!((last.step, last.did), (999, Did::Called));
        assert_eq!(events[254].words(), "blocks.999 F mb 0");
    }

    #[test]
    fn long_texts_are_cut_and_others_memory_is_refused() {
        let made = FlightRecorder::create(1).unwrap();
        made.rank(0).note_action(Did::Began, &"é".repeat(1000));
        assert_eq!(made.rank(0).events()[0].label, "é".repeat(40));
        let other = SharedMemory::create(bytes(1)).unwrap();
        let Err(error) = FlightRecorder::open(other.fd().as_raw_fd()) else { panic!("accepted") };
        assert!(error.to_string().contains("is not of a recorder"), "{error}");
    }
}
