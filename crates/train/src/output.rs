//! Whether what was printed has arrived.
//!
//! A reader who has gone away (`| head -1`) is no reason to fail; a full disk behind standard output
//! is, because somebody will look for what was written there.

use std::io;
use std::sync::Mutex;

/// The first line that could not be written, as the system tells it.
static LOST: Mutex<Option<String>> = Mutex::new(None);

/// Takes note of how a write to standard output ended.
pub fn note(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
        && let Ok(mut lost) = LOST.lock()
    {
        lost.get_or_insert(error.to_string());
    }
}

/// Why output was lost, if it was.
pub fn lost() -> Option<String> {
    LOST.lock().ok().and_then(|lost| lost.clone())
}
