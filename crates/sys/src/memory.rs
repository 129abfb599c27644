//! How much memory this process really holds, in the system's own words.

/// Bytes now resident in memory; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    field("VmRSS:")
}

/// The most bytes that were ever resident at once; `None` where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    field("VmHWM:")
}

/// Bytes of memory that this machine has, or that the process is allowed where that is fewer;
/// `None` where the system does not say.
pub fn machine_bytes() -> Option<u64> {
    let total = parse(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    // Containers are limited by their control group, which says "max" where there is no limit.
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = limits.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let limits = limits.filter_map(|text| text.trim().parse().ok());
    Some(limits.fold(total, u64::min))
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
        assert!(machine_bytes().unwrap() >= resident_bytes().unwrap());
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
