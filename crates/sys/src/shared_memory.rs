//! Memory that several processes of a machine map: a file that exists only in memory.
//!
//! It has no name in any file system and no size limit of its own; pages that nobody has touched
//! take no memory, so it may be made far larger than what will be used. It lives as long as one
//! process holds it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::process::Command;

use crate::SysError;

/// Shared memory as this process sees it. Every handle that was opened separately can hold the
/// signs of life of its owner ([`SharedMemory::hold`]).
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    path: PathBuf,
    base: *mut u8,
    len: usize,
}

// SAFETY: a mapping is not bound to a thread. This type gives out only its address; who follows it
// must prevent data races, also with other processes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

const PAGE: usize = SharedMemory::PAGE;

impl SharedMemory {
    /// A multiple of the size of a page on every system.
    pub const PAGE: usize = 64 << 10;

    /// New memory of this many bytes, all zero. Its size is final.
    pub fn create(bytes: usize) -> Result<Self, SysError> {
        let path = PathBuf::from("shared memory");
        let fail = |doing| {
            let path = path.clone();
            move |source| SysError::File { path, doing, source }
        };
        let file = system::create().map_err(fail("creating it"))?;
        if file_limit().is_some_and(|limit| limit < bytes as u64) {
            // The system would not refuse, but end the process.
            return Err(fail("setting its size")(io::ErrorKind::FileTooLarge.into()));
        }
        file.set_len(bytes as u64).map_err(fail("setting its size"))?;
        // No process may cut it while others use it: they would be ended.
        system::seal(&file).map_err(fail("fixing its size"))?;
        Self::map(file, path, bytes)
    }

    /// The memory behind a file descriptor that this process has inherited, or has open. The
    /// descriptor stays open, and is not inherited any further.
    pub fn open(number: RawFd) -> Result<Self, SysError> {
        // A descriptor that was opened separately, so that what it holds ends with this process.
        let path = PathBuf::from(format!("/proc/self/fd/{number}"));
        let fail = |doing| {
            let path = path.clone();
            move |source| SysError::File { path, doing, source }
        };
        let file =
            File::options().read(true).write(true).open(&path).map_err(fail("opening it"))?;
        let metadata = file.metadata().map_err(fail("asking for its size"))?;
        if !metadata.is_file() || metadata.len() == 0 {
            return Err(SysError::NotAFile { path, found: "something else than shared memory" });
        }
        system::keep(number).map_err(fail("keeping it from other programs"))?;
        Self::map(file, path, metadata.len() as usize)
    }

    fn map(file: File, path: PathBuf, len: usize) -> Result<Self, SysError> {
        match system::map(&file, len) {
            Ok(base) => Ok(Self { file, path, base, len }),
            Err(source) => Err(SysError::File { path, doing: "mapping it into memory", source }),
        }
    }

    /// Lets the process that a command starts inherit this memory under the number of [`Self::fd`].
    pub fn pass_to(&self, command: &mut Command) {
        crate::process::pass_to(self.file.as_fd(), command);
    }

    /// The file descriptor, which other programs do not inherit by themselves.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The first byte; aligned to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// How many bytes there are.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the pages of a range back to the system: they are zero again. Both ends are rounded
    /// inwards to whole pages.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub fn clear(&self, range: Range<usize>) -> Result<(), SysError> {
        assert!(range.end <= self.len, "{range:?} of {} bytes", self.len);
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if start >= end {
            return Ok(());
        }
        system::punch(&self.file, start, end - start).map_err(|source| SysError::File {
            path: self.path.clone(),
            doing: "giving pages back",
            source,
        })
    }

    /// Holds a byte until this handle is dropped, or its process ends in whatever way. Returns
    /// whether it could: not if another handle holds it.
    pub fn hold(&self, byte: usize) -> Result<bool, SysError> {
        system::lock(&self.file, byte).map_err(|source| SysError::File {
            path: self.path.clone(),
            doing: "locking a byte of it",
            source,
        })
    }

    /// Whether another handle holds a byte.
    pub fn is_held(&self, byte: usize) -> bool {
        system::is_locked(&self.file, byte)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that another thread is just starting has it open, too, until it
        // runs its own program.
        system::unlock(&self.file);
        system::unmap(self.base, self.len);
    }
}

/// The largest file that this process may make (`ulimit -f`); `None` without a limit.
pub fn file_limit() -> Option<u64> {
    system::file_limit()
}

#[cfg(target_os = "linux")]
mod system {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd};

    fn done(answer: libc::c_int) -> io::Result<libc::c_int> {
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }

    pub(super) fn create() -> io::Result<File> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string; the descriptor is new and ours.
        unsafe { Ok(File::from_raw_fd(done(libc::memfd_create(c"phalanx".as_ptr(), flags))?)) }
    }

    pub(super) fn seal(file: &File) -> io::Result<()> {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: changes only the file, which is open.
        done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
    }

    pub(super) fn map(file: &File, len: usize) -> io::Result<*mut u8> {
        let (access, how) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address that the system chooses.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, how, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base.cast()) }
    }

    pub(super) fn unmap(base: *mut u8, len: usize) {
        // SAFETY: the mapping is ours, and by the rules of its owner nobody uses it any more.
        unsafe { libc::munmap(base.cast(), len) };
    }

    pub(super) fn punch(file: &File, start: usize, len: usize) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (start, len) = (start as libc::off_t, len as libc::off_t);
        // SAFETY: changes only the file, which is open.
        done(unsafe { libc::fallocate(file.as_raw_fd(), mode, start, len) }).map(drop)
    }

    pub(super) fn keep(number: RawFd) -> io::Result<()> {
        // SAFETY: changes only a flag of a descriptor.
        done(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) }).map(drop)
    }

    fn bytes(from: usize, count: usize, kind: libc::c_int) -> libc::flock {
        // SAFETY: the struct has only numbers, for which zero is a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as _;
        lock.l_whence = libc::SEEK_SET as _;
        (lock.l_start, lock.l_len) = (from as libc::off_t, count as libc::off_t);
        lock
    }

    pub(super) fn lock(file: &File, at: usize) -> io::Result<bool> {
        let lock = bytes(at, 1, libc::F_WRLCK);
        // SAFETY: the call reads the struct.
        match done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives all bytes free that this handle holds.
    pub(super) fn unlock(file: &File) {
        // A length of zero reaches to the end.
        let lock = bytes(0, 0, libc::F_UNLCK);
        // SAFETY: the call reads the struct. If it fails, closing the file does the same, a little later.
        let _ = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    }

    pub(super) fn is_locked(file: &File, at: usize) -> bool {
        let mut lock = bytes(at, 1, libc::F_WRLCK);
        // SAFETY: the call fills the struct.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        // Who cannot be asked counts as alive: a mistake only makes others wait longer.
        answer != 0 || libc::c_int::from(lock.l_type) != libc::F_UNLCK
    }

    pub(super) fn file_limit() -> Option<u64> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is ours to fill.
        let answer = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
        (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }
}

/// Other systems lack files in memory whose size can be fixed.
#[cfg(not(target_os = "linux"))]
mod system {
    use super::*;

    pub(super) fn create() -> io::Result<File> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "shared memory needs Linux"))
    }

    pub(super) fn seal(_: &File) -> io::Result<()> {
        create().map(drop)
    }

    pub(super) fn map(_: &File, _: usize) -> io::Result<*mut u8> {
        create().map(|_| std::ptr::null_mut())
    }

    pub(super) fn unmap(_: *mut u8, _: usize) {}

    pub(super) fn punch(_: &File, _: usize, _: usize) -> io::Result<()> {
        create().map(drop)
    }

    pub(super) fn keep(_: RawFd) -> io::Result<()> {
        create().map(drop)
    }

    pub(super) fn lock(_: &File, _: usize) -> io::Result<bool> {
        create().map(|_| false)
    }

    pub(super) fn unlock(_: &File) {}

    pub(super) fn is_locked(_: &File, _: usize) -> bool {
        true
    }

    pub(super) fn file_limit() -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    fn byte(memory: &SharedMemory, at: usize) -> *mut u8 {
        assert!(at < memory.len());
        memory.as_ptr().wrapping_add(at)
    }

    #[test]
    fn two_views_show_the_same_bytes_and_cleared_ones_are_zero() {
        // Far more than the machine has: only what is touched counts.
        let one = SharedMemory::create(1 << 42).unwrap();
        let other = SharedMemory::open(one.fd().as_raw_fd()).unwrap();
        assert_eq!(other.len(), 1 << 42);
        assert_ne!(one.as_ptr(), other.as_ptr());
        for at in [0, 7, (1 << 42) - 1] {
            // SAFETY: both bytes are inside their mappings, and this thread alone uses them.
            unsafe { *byte(&one, at) = 7 };
            // SAFETY: as above.
            assert_eq!(unsafe { *byte(&other, at) }, 7);
        }
        one.clear(1..1 << 42).unwrap();
        // SAFETY: as above. The first page was not cleared whole.
        unsafe { assert_eq!([*byte(&other, 0), *byte(&other, (1 << 42) - 1)], [7, 0]) };
    }

    #[test]
    fn a_held_byte_is_free_again_when_its_holder_is_gone() {
        let memory = SharedMemory::create(PAGE).unwrap();
        let holder = SharedMemory::open(memory.fd().as_raw_fd()).unwrap();
        assert!(holder.hold(3).unwrap() && memory.is_held(3) && !memory.is_held(4));
        assert!(!memory.hold(3).unwrap());
        drop(holder);
        assert!(!memory.is_held(3) && memory.hold(3).unwrap());
    }

    /// A process that is being started has all files of this one open until its program runs.
    #[test]
    fn a_held_byte_is_free_while_another_process_is_started() {
        let memory = SharedMemory::create(PAGE).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::process::Command::new("true").status().unwrap();
                }
            });
            let (start, mut late) = (Instant::now(), 0);
            while start.elapsed() < Duration::from_millis(300) {
                let holder = SharedMemory::open(memory.fd().as_raw_fd()).unwrap();
                late += usize::from(!holder.hold(3).unwrap());
                drop(holder);
                late += usize::from(memory.is_held(3));
            }
            over.store(true, Ordering::Relaxed);
            assert_eq!(late, 0);
        });
    }

    #[test]
    fn what_is_no_shared_memory_is_refused() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = SharedMemory::open(one.as_raw_fd()).unwrap_err().to_string();
        assert!(error.contains(&format!("/proc/self/fd/{}", one.as_raw_fd())), "{error}");
        let error = SharedMemory::create(1 << 60).unwrap_err().to_string();
        assert!(error.contains("shared memory") && error.contains("mapping"), "{error}");
    }
}
