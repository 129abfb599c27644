//! Whether printed output was really written.
//!
//! A closed pipe (`| head -1`) is not an error; a full disk is one, because the user will look for
//! the output there.

use std::io;
use std::sync::Mutex;

/// The system's error for the first line that could not be written.
static LOST: Mutex<Option<String>> = Mutex::new(None);

/// Records the result of a write to standard output.
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
