//! Which processor cores a thread may run on.

mod topology;

pub use topology::{LogicalCore, Topology};

/// The cores that the calling thread may run on; empty if the system does not report them.
pub fn allowed_cores() -> Vec<usize> {
    let mut set = empty();
    // SAFETY: the pointer is valid for writing one set of the size given, all the call does.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if failed != 0 {
        return Vec::new();
    }
    // SAFETY: the set is initialised, and the index is below its size.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// How many threads may compute at the same time without sharing a physical core, as far as this process
/// may use them: fewer than it has cores if there are hyper-threads, or if it has a quota of time.
pub fn computing_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    match Topology::here().physical_cores() {
        0 => allowed,
        physical => allowed.min(physical),
    }
}

/// Lets the calling thread, and threads that it starts from now on, run only on these cores.
/// Returns whether the system did it.
pub fn bind_thread(cores: &[usize]) -> bool {
    let mut set = empty();
    for &core in cores.iter().filter(|&&core| core < libc::CPU_SETSIZE as usize) {
        // SAFETY: the set is initialised, and the index is below its size.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: the pointer is valid for reading one set of the size given, all the call does.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) == 0 }
}

fn empty() -> libc::cpu_set_t {
    // SAFETY: the set is plain bits, for which zero is a valid value: no cores.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_bound() {
        let before = allowed_cores();
        assert!(!before.is_empty());
        let last = before[before.len() - 1];
        let inside = std::thread::spawn(move || {
            assert!(bind_thread(&[last]));
            (allowed_cores(), std::thread::spawn(allowed_cores).join().unwrap())
        });
        assert_eq!(inside.join().unwrap(), (vec![last], vec![last]));
        assert_eq!(allowed_cores(), before);
        assert!(!bind_thread(&[]), "a thread needs a core");
    }
}
