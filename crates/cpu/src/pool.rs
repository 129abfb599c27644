//! The worker pool: a fixed set of threads that one rank computes with.
//!
//! The caller is worker 0; the others live as long as the pool. A run gives one closure to every
//! worker and returns when all have finished it, so a whole step can be one run in which each
//! worker handles its own rows and synchronises with the others only at barriers. A worker that
//! panics, or that keeps the others waiting too long at a barrier, poisons the pool: the others
//! leave their barriers at once and the run ends with an error that says what happened first.

mod barrier;
mod wait_queue;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use barrier::Barrier;
use barrier::LeftPoisonedBarrier;
use wait_queue::{Patience, WaitQueue};

/// How the workers of a pool wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Whether waiting workers may spin: true only if every worker of every rank on this machine
    /// has a core to itself. Otherwise they yield and then sleep.
    pub spin: bool,
    /// How long a worker may wait at a barrier before the pool is poisoned.
    pub timeout: Duration,
}

impl PoolSettings {
    /// The settings that suit a machine on which `workers` threads compute at the same time, over
    /// all pools of all ranks.
    pub fn for_workers_on_this_machine(workers: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { spin: workers <= cores, timeout: Duration::from_secs(60) }
    }
}

/// Why a run did not finish: the first thing that went wrong in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker} of the pool failed: {message}")]
pub struct PoolError {
    /// The worker that panicked, or that did not come to a barrier.
    pub worker: usize,
    /// The panic's message, or what was waited for and how long.
    pub message: String,
}

/// What every worker of a run executes: its own number and its end of the barrier are given.
pub type Job<'a> = dyn Fn(usize, &Barrier<'_>) + Sync + 'a;

/// A fixed set of worker threads; see the module's description.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` workers (at least one) on a machine that only this pool uses.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with_settings(threads, PoolSettings::for_workers_on_this_machine(threads))
    }

    /// A pool of `threads` workers (at least one), including the calling thread.
    ///
    /// Fails if the system refuses a thread.
    pub fn with_settings(threads: usize, settings: PoolSettings) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let mut pool = Self {
            shared: Arc::new(Shared::new(threads, settings)),
            handles: Vec::with_capacity(threads - 1),
        };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            pool.handles.push(
                std::thread::Builder::new()
                    .name(format!("worker {worker}"))
                    .spawn(move || shared.serve(worker))?,
            );
        }
        Ok(pool)
    }

    /// How many workers take part in a run, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `job` once on every worker and returns when all have left it.
    ///
    /// After an error the pool stays poisoned, and every later run returns that same error without
    /// running anything. A worker that never leaves the job keeps this call from returning, because
    /// it still holds what the job borrows; the message of a timeout is then visible only through
    /// the panic hook (by default, on standard error).
    pub fn run(&mut self, job: &Job<'_>) -> Result<(), PoolError> {
        let shared = &*self.shared;
        shared.outcome()?;
        if shared.threads > 1 {
            shared.publish(job);
        }
        shared.perform(0, job);
        if shared.threads > 1 {
            shared.await_finish();
        }
        shared.outcome()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.wait_queue.ring();
        for handle in self.handles.drain(..) {
            // A worker catches every panic of its jobs, so the result can be ignored.
            let _ = handle.join();
        }
    }
}

/// How many times a worker polls without giving up its core, if cores are not oversubscribed: about
/// a tenth of a millisecond, longer than workers of an undisturbed pool wait for each other.
const SPINS: u32 = 5_000;
/// How many times it then polls and yields its core: alone on the machine that costs another
/// millisecond of polling, but if others compete for the cores, the late worker gets one.
const PATIENT_YIELDS: u32 = 2_000;
/// How many times a worker yields before it sleeps, if it may not spin.
const YIELDS: u32 = 16;

/// Keeps a value that one worker writes often out of the cache lines of its neighbours.
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

/// The job of the current run, its lifetime erased.
type ErasedJob = *const Job<'static>;

struct Shared {
    threads: usize,
    settings: PoolSettings,
    job: UnsafeCell<Option<ErasedJob>>,
    generation: AtomicU32,
    finished: Padded<AtomicUsize>,
    closing: AtomicBool,
    round: AtomicU32,
    arrived: Padded<AtomicUsize>,
    seen: Vec<Padded<AtomicU32>>,
    poisoned: AtomicBool,
    failure: Mutex<Option<PoolError>>,
    wait_queue: WaitQueue,
}

// SAFETY: the only field that is not already shareable is `job`. It is written by `publish` alone,
// which holds the pool exclusively and runs while no worker is inside a job (each has counted
// itself as finished, with release order, before `await_finish` returned); workers read it after
// seeing the generation that `publish` stored with release order. The closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is what makes the type not `Send`, and the closure it points to
// is `Sync`, so it may be called from any thread.
unsafe impl Send for Shared {}

impl Shared {
    fn new(threads: usize, settings: PoolSettings) -> Self {
        Self {
            threads,
            settings,
            job: UnsafeCell::new(None),
            generation: AtomicU32::new(0),
            finished: Padded::default(),
            closing: AtomicBool::new(false),
            round: AtomicU32::new(0),
            arrived: Padded::default(),
            seen: (0..threads).map(|_| Padded::default()).collect(),
            poisoned: AtomicBool::new(false),
            failure: Mutex::new(None),
            wait_queue: WaitQueue::default(),
        }
    }

    /// Lets the other workers begin `job`. The caller must wait for them before it drops the job.
    fn publish(&self, job: &Job<'_>) {
        // SAFETY: only the lifetime changes. `run` does not return, and does not unwind (`perform`
        // catches panics), before `await_finish` has seen every worker leave the job.
        let erased: ErasedJob = unsafe { std::mem::transmute::<&Job<'_>, &Job<'static>>(job) };
        self.finished.0.store(0, Ordering::Relaxed);
        // SAFETY: no worker reads the cell now: see the reason given for `Sync`.
        unsafe { *self.job.get() = Some(erased) };
        self.generation.fetch_add(1, Ordering::Release);
        self.wait_queue.ring();
    }

    /// The main loop of a worker other than the caller.
    fn serve(&self, worker: usize) {
        let mut done = 0;
        loop {
            self.wait_queue
                .wait(self.patience(), None, || self.generation.load(Ordering::Acquire) != done);
            done = done.wrapping_add(1);
            if self.closing.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: the generation was seen with acquire order, so the cell holds the job that
            // `publish` wrote before it, and nobody writes the cell until this worker has finished.
            if let Some(job) = unsafe { *self.job.get() } {
                // SAFETY: `run` keeps the closure alive until this worker has counted itself below.
                self.perform(worker, unsafe { &*job });
            }
            self.finished.0.fetch_add(1, Ordering::Release);
            self.wait_queue.ring();
        }
    }

    /// Runs the job as `worker`, turning a panic into the pool's failure.
    fn perform(&self, worker: usize, job: &Job<'_>) {
        let barrier = Barrier::new(self, worker);
        // A poisoned pool runs nothing any more, so no later job sees what this one left half done;
        // the caller learns of the failure from `run` and decides about its own data.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker, &barrier)))
            && !panic.is::<LeftPoisonedBarrier>()
        {
            self.poison(worker, panic_message(&*panic));
        }
    }

    fn await_finish(&self) {
        self.wait_queue.wait(self.patience(), None, || {
            self.finished.0.load(Ordering::Acquire) == self.threads - 1
        });
    }

    #[cold]
    fn poison(&self, worker: usize, message: &str) {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| PoolError { worker, message: message.to_owned() });
        self.poisoned.store(true, Ordering::Release);
        self.wait_queue.ring();
    }

    fn outcome(&self) -> Result<(), PoolError> {
        if !self.poisoned.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*self.failure.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    fn patience(&self) -> Patience {
        if self.settings.spin {
            Patience { spins: SPINS, yields: PATIENT_YIELDS }
        } else {
            Patience { spins: 0, yields: YIELDS }
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&'static str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "a panic whose payload is not text"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    /// Both ways of waiting must behave alike; the machine decides only which one is faster.
    fn both(timeout: Duration) -> [PoolSettings; 2] {
        [true, false].map(|spin| PoolSettings { spin, timeout })
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn every_worker_runs_each_job_once() {
        for settings in both(LONG) {
            for threads in 1..=4 {
                let mut pool = Pool::with_settings(threads, settings).unwrap();
                let calls: Vec<AtomicU64> = (0..threads).map(|_| AtomicU64::new(0)).collect();
                for _ in 0..100 {
                    pool.run(&|worker, _| {
                        calls[worker].fetch_add(1, Ordering::Relaxed);
                    })
                    .unwrap();
                }
                assert!(calls.iter().all(|n| n.load(Ordering::Relaxed) == 100));
            }
        }
    }

    /// Each round, every worker publishes the round's number and must find it at all the others
    /// after the barrier: a barrier that lets anyone through early or late shows a wrong number.
    #[test]
    fn barrier_separates_rounds() {
        for settings in both(LONG) {
            let mut pool = Pool::with_settings(3, settings).unwrap();
            let cells: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
            for run in 0..10 {
                pool.run(&|worker, barrier| {
                    for round in 0..20 {
                        let stamp = run * 1000 + round;
                        cells[worker].store(stamp, Ordering::Relaxed);
                        barrier.wait();
                        assert!(cells.iter().all(|c| c.load(Ordering::Relaxed) == stamp));
                        barrier.wait();
                    }
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn workers_wake_after_sleeping_between_runs() {
        for settings in both(LONG) {
            let mut pool = Pool::with_settings(2, settings).unwrap();
            let calls = AtomicU64::new(0);
            for _ in 0..3 {
                std::thread::sleep(Duration::from_millis(20));
                pool.run(&|_, barrier| {
                    barrier.wait();
                    calls.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            }
            assert_eq!(calls.load(Ordering::Relaxed), 6);
        }
    }

    #[test]
    fn panic_frees_the_others_and_poisons_the_pool() {
        for settings in both(LONG) {
            for culprit in 0..3 {
                let mut pool = Pool::with_settings(3, settings).unwrap();
                let start = Instant::now();
                let error = pool
                    .run(&|worker, barrier| {
                        barrier.wait();
                        assert!(worker != culprit, "row {} is missing", 40 + worker);
                        barrier.wait();
                        panic!("nobody may pass a poisoned barrier");
                    })
                    .unwrap_err();
                assert_eq!(error.worker, culprit);
                assert_eq!(error.message, format!("row {} is missing", 40 + culprit));
                assert!(start.elapsed() < LONG / 2, "the others waited for the timeout");
                let again = pool.run(&|_, _| panic!("a poisoned pool runs nothing"));
                assert_eq!(again.unwrap_err(), error);
            }
        }
    }

    #[test]
    fn timeout_names_the_missing_worker() {
        for settings in both(Duration::from_millis(100)) {
            let mut pool = Pool::with_settings(3, settings).unwrap();
            let error = pool
                .run(&|worker, barrier| {
                    if worker != 2 {
                        barrier.wait();
                    }
                })
                .unwrap_err();
            assert_eq!(error.worker, 2);
            assert!(error.message.contains("for worker 2,"), "{}", error.message);
            assert!(error.message.contains("100ms"), "{}", error.message);
        }
    }

    #[test]
    fn one_worker_needs_no_others() {
        let mut pool = Pool::new(1).unwrap();
        let caller = std::thread::current().id();
        pool.run(&|worker, barrier| {
            assert_eq!((worker, std::thread::current().id()), (0, caller));
            barrier.wait();
        })
        .unwrap();
        let error = pool.run(&|_, _| panic!("alone")).unwrap_err();
        assert_eq!((error.worker, &*error.message), (0, "alone"));
    }
}
