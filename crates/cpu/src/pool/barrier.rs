//! The barrier at which the workers of a run synchronise. A worker that waits too long poisons the
//! pool and names the workers that it waited for.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Padded, Shared};

/// One worker's end of the pool's barrier.
pub struct Barrier<'a> {
    shared: &'a Shared,
    worker: usize,
}

impl<'a> Barrier<'a> {
    pub(super) fn new(shared: &'a Shared, worker: usize) -> Self {
        Self { shared, worker }
    }

    /// Waits until every worker of the run has called this as many times as this worker.
    ///
    /// What any worker wrote before is visible to all afterwards. If the pool is poisoned this does
    /// not return: it unwinds out of the job, and the run reports the cause.
    #[inline]
    pub fn wait(&self) {
        let shared = self.shared;
        if shared.threads == 1 {
            return;
        }
        let round = shared.round.load(Ordering::Relaxed);
        shared.seen[self.worker].0.store(round.wrapping_add(1), Ordering::Relaxed);
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == shared.threads {
            // All other workers wait for the round to change, so none can arrive in between.
            shared.arrived.0.store(0, Ordering::Relaxed);
            shared.round.store(round.wrapping_add(1), Ordering::Release);
            shared.wait_queue.ring();
        } else {
            self.wait_for_round_after(round);
        }
    }

    fn wait_for_round_after(&self, round: u32) {
        let shared = self.shared;
        let passed = || shared.round.load(Ordering::Acquire) != round;
        let wait = || {
            shared.wait_queue.wait(shared.patience(), Some(shared.settings.timeout), || {
                passed() || shared.poisoned.load(Ordering::Acquire)
            })
        };
        // After a suspended process continues, the time is over although no worker was late; a
        // second full wait distinguishes the two cases.
        let in_time = wait() || wait();
        if passed() {
            return;
        }
        if !in_time {
            self.report_missing(round);
        }
        resume_unwind(Box::new(LeftPoisonedBarrier));
    }

    /// Poisons the pool, with the first worker that has not arrived at this round as the cause.
    #[cold]
    fn report_missing(&self, round: u32) {
        let missing = |(_, seen): &(usize, &Padded<AtomicU32>)| {
            seen.0.load(Ordering::Relaxed) != round.wrapping_add(1)
        };
        let all = || self.shared.seen.iter().enumerate().filter(missing);
        let names: Vec<String> = all().map(|(worker, _)| worker.to_string()).collect();
        let message = format!(
            "worker {} waited {:?} at a barrier for worker {}, which did not arrive; \
             all workers of a run must call the barrier the same number of times",
            self.worker,
            self.shared.settings.timeout,
            names.join(" and worker "),
        );
        let culprit = all().map(|(worker, _)| worker).next().unwrap_or(0);
        self.shared.poison(culprit, &message);
        // The panic hook shows the sentence even if the missing worker never lets the run end.
        panic!("{message}");
    }
}

/// The panic payload of a worker that leaves a poisoned barrier.
pub(super) struct LeftPoisonedBarrier;
