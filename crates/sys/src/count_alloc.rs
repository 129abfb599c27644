//! A global allocator with counters, to test that a step allocates nothing, and that streamed data
//! is never in memory all at once.
//!
//! A test binary installs it with `#[global_allocator]`, takes [`counts`] before and after, and
//! compares, or asks for the [`peak`] of some work; the command installs it too, to report what the
//! matrix library allocates. Calls that are allowed to allocate run inside [`exempt`]; their
//! allocations are counted separately, so that they can still be reported. The exemption belongs to
//! a thread: a pool thread that works for an exempt call must enter it itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Sub;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// The system allocator with counters. Growing in place counts as an allocation, freeing as none.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// What was allocated since the process started, by all threads together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations outside every exemption.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Allocations inside an exemption.
    pub exempt_allocations: u64,
    /// Their bytes.
    pub exempt_bytes: u64,
    /// Bytes of the largest of these allocations so far.
    pub exempt_largest: u64,
}

/// The counters now; all zero unless [`CountingAllocator`] is the global allocator.
pub fn counts() -> Counts {
    Counts {
        allocations: COUNTED.allocations.load(Relaxed),
        bytes: COUNTED.bytes.load(Relaxed),
        exempt_allocations: EXEMPTED.allocations.load(Relaxed),
        exempt_bytes: EXEMPTED.bytes.load(Relaxed),
        exempt_largest: EXEMPTED.largest.load(Relaxed),
    }
}

/// Runs `work` and returns the peak of the bytes that all threads held, above the bytes held
/// before. Only one call at a time: a second call would reset the peak of the first.
pub fn peak<R>(work: impl FnOnce() -> R) -> (R, u64) {
    let before = HELD.now.load(Relaxed);
    HELD.most.store(before, Relaxed);
    let result = work();
    (result, u64::try_from(HELD.most.load(Relaxed) - before).unwrap_or(0))
}

/// Runs `work`; what this thread allocates meanwhile counts as exempt. Scopes nest.
pub fn exempt<R>(work: impl FnOnce() -> R) -> R {
    let _guard = Exemption::enter();
    work()
}

/// An exemption of the current thread that lasts until it is dropped.
///
/// It cannot be sent to another thread, where dropping it would end the wrong exemption.
#[derive(Debug)]
pub struct Exemption {
    this_thread: PhantomData<*const ()>,
}

impl Exemption {
    /// Begins an exemption.
    pub fn enter() -> Self {
        DEPTH.with(|depth| depth.set(depth.get() + 1));
        Self { this_thread: PhantomData }
    }
}

impl Drop for Exemption {
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            allocations: self.allocations - earlier.allocations,
            bytes: self.bytes - earlier.bytes,
            exempt_allocations: self.exempt_allocations - earlier.exempt_allocations,
            exempt_bytes: self.exempt_bytes - earlier.exempt_bytes,
            exempt_largest: self.exempt_largest,
        }
    }
}

// SAFETY: every call is passed on unchanged to the system allocator, whose guarantees hold; the
// counting neither allocates nor panics.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        hold(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc`, passed on unchanged.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        hold(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`, passed on unchanged.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        hold(size as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract of `realloc`, passed on unchanged.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        hold(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`, passed on unchanged.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Ends the process with a word and the code of a failure if the system refused memory: the standard
/// library would abort, and nothing could be done without memory anyway.
fn checked(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && bytes > 0 {
        refused(bytes);
    }
    memory
}

#[cold]
fn refused(bytes: usize) -> ! {
    // Without an allocation: the digits are written to the stack.
    let mut text = [b' '; 20];
    let (mut at, mut left) = (text.len(), bytes);
    while left > 0 || at == text.len() {
        at -= 1;
        text[at] = b'0' + (left % 10) as u8;
        left /= 10;
    }
    system::fail(&[
        b"error: out of memory: the system refused ".as_slice(),
        &text[at..],
        b" bytes\n  usual fix: a smaller batch or model, fewer ranks or threads, or a higher limit \
          (ulimit -v)\n",
    ])
}

#[cfg(unix)]
mod system {
    pub(super) fn fail(parts: &[&[u8]]) -> ! {
        for part in parts {
            // SAFETY: the bytes are ours. Standard error itself is not used: its lock may be held.
            let _ = unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
        }
        // SAFETY: ends the process without running anything else, which might allocate.
        unsafe { libc::_exit(1) }
    }
}

#[cfg(not(unix))]
mod system {
    pub(super) fn fail(_: &[&[u8]]) -> ! {
        std::process::abort()
    }
}

/// Bytes that are held now, and their peak.
struct Balance {
    now: AtomicI64,
    most: AtomicI64,
}

static HELD: Balance = Balance { now: AtomicI64::new(0), most: AtomicI64::new(0) };

fn hold(bytes: i64) {
    let now = HELD.now.fetch_add(bytes, Relaxed) + bytes;
    HELD.most.fetch_max(now, Relaxed);
}

struct Counter {
    allocations: AtomicU64,
    bytes: AtomicU64,
    largest: AtomicU64,
}

impl Counter {
    const fn new() -> Self {
        Self {
            allocations: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            largest: AtomicU64::new(0),
        }
    }
}

static COUNTED: Counter = Counter::new();
static EXEMPTED: Counter = Counter::new();

thread_local! {
    // Constant and without a destructor, so that touching it inside the allocator never
    // allocates and works until the very end of a thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    let counter = if DEPTH.with(Cell::get) > 0 { &EXEMPTED } else { &COUNTED };
    counter.allocations.fetch_add(1, Relaxed);
    counter.largest.fetch_max(bytes as u64, Relaxed);
    counter.bytes.fetch_add(bytes as u64, Relaxed);
}
