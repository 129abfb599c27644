//! Whether there is a GPU to test on.

use std::io::Write;

use phalanx_cuda::Device;

/// Whether there is a GPU with its libraries. If not, the test that asks is skipped, which is written
/// where it is seen even if the test passes.
pub(crate) fn is_here(test: &str) -> bool {
    match Device::first() {
        Ok(_) => true,
        Err(why) => {
            let why = why.to_string();
            let line = why.lines().next().unwrap_or_default();
            let _ = writeln!(std::io::stderr(), "SKIPPED {test}: it needs a GPU; {line}");
            false
        }
    }
}
