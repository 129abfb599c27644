//! How much memory this process really holds, in the system's own words.

/// Bytes now resident in memory; `None` where the system does not say.
pub fn resident_bytes() -> Option<u64> {
    field("VmRSS:")
}

/// The most bytes that were ever resident at once; `None` where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    field("VmHWM:")
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
