//! How much memory this process really uses, and could get, as the system reports it.

use std::path::{Path, PathBuf};

/// Bytes now resident in memory; `None` if the system does not report it.
pub fn resident_bytes() -> Option<u64> {
    field("VmRSS:")
}

/// The peak of resident bytes; `None` if the system does not report it.
pub fn peak_resident_bytes() -> Option<u64> {
    field("VmHWM:")
}

/// The memory of a machine, and how much of it is available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Bytes of memory, or the limit of the process if that is lower.
    pub total: u64,
    /// Bytes that are available now without swapping: free memory, and file caches.
    pub available: u64,
}

/// Address space that is kept for everything besides tensors: code, stacks, buffers of files.
const SET_ASIDE: u64 = 64 << 20;

/// The memory of this machine, and of the control groups that this process is in, and of the limit
/// of its address space (`ulimit -v`); `None` if the system does not report it.
pub fn machine() -> Option<Machine> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let (total, available) = (parse(&text, "MemTotal:")?, parse(&text, "MemAvailable:")?);
    let groups = groups(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
    let groups = groups.iter().filter_map(|folder| group(folder));
    let limits = groups.chain(address_space());
    Some(limits.fold(Machine { total, available }, |machine, limit| Machine {
        total: machine.total.min(limit.total),
        available: machine.available.min(limit.available),
    }))
}

/// Takes less address space if this process has a limit of it: the C library would reserve 64 MiB
/// for each thread, and where that fails, try again at each allocation.
pub fn save_address_space() {
    if system::address_limit().is_some() {
        system::one_arena();
    }
}

/// The limit of the address space (`ulimit -v`), and what it leaves for tensors; `None` without one.
pub fn address_space() -> Option<Machine> {
    let (total, used) = (system::address_limit()?, field("VmSize:")?);
    Some(Machine { total, available: total.saturating_sub(used).saturating_sub(SET_ASIDE) })
}

#[cfg(unix)]
mod system {
    pub(super) fn address_limit() -> Option<u64> {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is ours to fill.
        let answer = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) };
        (answer == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    pub(super) fn one_arena() {
        // SAFETY: changes only how the C library's allocator behaves from now on.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }

    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    pub(super) fn one_arena() {}
}

#[cfg(not(unix))]
mod system {
    pub(super) fn address_limit() -> Option<u64> {
        None
    }

    pub(super) fn one_arena() {}
}

/// The folders of the memory control groups of a process, from its own group to the root: each may
/// set a limit. Inside a container the root is the container's own group.
fn groups(own: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    // `0::/path` is the one hierarchy of today; older systems have one for each resource.
    let found = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (kind, path) = (parts.next()?, parts.next()?);
        match kind {
            "" => Some((root.to_path_buf(), path)),
            kind if kind.split(',').any(|k| k == "memory") => Some((root.join("memory"), path)),
            _ => None,
        }
    });
    let (root, path) = found.unwrap_or((root.to_path_buf(), "/"));
    let own = root.join(path.trim_start_matches('/'));
    own.ancestors().take_while(|folder| folder.starts_with(&root)).map(PathBuf::from).collect()
}

/// What one control group allows; `None` if it sets no limit.
fn group(folder: &Path) -> Option<Machine> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |names: [&str; 2]| {
        names.iter().find_map(|name| read(name)).and_then(|text| text.trim().parse::<u64>().ok())
    };
    // A group without a limit says "max", or a number beyond any memory.
    let total = number(["memory.max", "memory.limit_in_bytes"])?;
    let used = number(["memory.current", "memory.usage_in_bytes"])?;
    let stat = read("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let cached: u64 = cached.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let taken = used.saturating_sub(cached);
    Some(Machine { total, available: total.saturating_sub(taken) })
}

fn field(name: &str) -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// Linux writes lines such as `VmRSS:      1234 kB`, where kB means 1024 bytes.
fn parse(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_and_a_strange_one_is_unknown() {
        let status = "Name:\tx\nVmHWM:\t   20 kB\nVmRSS:\t   12 kB\nVmSwap:\tlots\n";
        assert_eq!(parse(status, "VmRSS:"), Some(12 * 1024));
        assert_eq!(parse(status, "VmHWM:"), Some(20 * 1024));
        assert_eq!(parse(status, "VmSwap:"), None);
        assert_eq!(parse(status, "VmData:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_machine_holds_more_than_this_process() {
        let machine = machine().unwrap();
        assert!(machine.total >= resident_bytes().unwrap());
        assert!(machine.available <= machine.total, "{machine:?}");
    }

    #[test]
    fn every_group_up_to_the_root_may_set_a_limit() {
        let names = |own| -> Vec<String> {
            groups(own).iter().map(|path| path.display().to_string()).collect()
        };
        let root = "/sys/fs/cgroup";
        assert_eq!(names("0::/\n"), [root.to_owned() + "/"]);
        assert_eq!(
            names("0::/a/b\n"),
            [format!("{root}/a/b"), format!("{root}/a"), root.to_owned()]
        );
        assert_eq!(
            names("4:cpu:/c\n3:memory,x:/d\n"),
            [format!("{root}/memory/d"), format!("{root}/memory")]
        );
        assert_eq!(names("").len(), 1);
    }

    #[test]
    fn a_group_has_what_is_allowed_less_what_is_used_and_cannot_be_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(group(dir.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(group(dir.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(group(dir.path()), Some(Machine { total: 1000, available: 300 }));
        write("memory.stat", "anon 500\ninactive_file 150\n");
        assert_eq!(group(dir.path()), Some(Machine { total: 1000, available: 450 }));
        write("memory.max", "600\n");
        assert_eq!(group(dir.path()), Some(Machine { total: 600, available: 50 }));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn touching_memory_shows() {
        let size = 64 << 20;
        let before = resident_bytes().unwrap();
        let mut arena = crate::Arena::new(size).unwrap();
        arena.as_mut_slice().fill(1);
        let after = resident_bytes().unwrap();
        // Other tests of this binary may free memory meanwhile, hence the slack.
        assert!(after >= before + size as u64 / 2, "{before} → {after}");
        assert!(peak_resident_bytes().unwrap() >= after / 2);
    }
}
