//! The processor time of a thread, and a clock that all processes of a machine share.

use std::time::Duration;

/// Processor time that the calling thread has used so far; zero if the system does not report it.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for writing one `timespec`, all that the call does with it.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    if failed != 0 {
        return Duration::ZERO;
    }
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Nanoseconds of the machine's clock that never goes back: the same for all its processes. Zero if
/// the system does not report it.
pub fn machine_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for writing one `timespec`, all that the call does with it.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    if failed != 0 {
        return 0;
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn computing_takes_processor_time_and_sleeping_does_not() {
        let start = thread_cpu_time();
        std::thread::sleep(Duration::from_millis(60));
        let slept = thread_cpu_time() - start;
        assert!(slept < Duration::from_millis(30), "{slept:?}");
        let (clock, start) = (Instant::now(), thread_cpu_time());
        while thread_cpu_time() - start < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        assert!(clock.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn the_clock_of_the_machine_goes_on_while_nothing_is_computed() {
        let start = machine_nanos();
        std::thread::sleep(Duration::from_millis(5));
        assert!(machine_nanos() - start >= 5_000_000);
    }
}
