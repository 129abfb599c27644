//! Writing to the standard streams. A closed pipe is not an error. Of several processes of a job, the
//! first alone writes results.

use std::io::Write;

use phalanx::config::Loaded;
use phalanx::session::job;

/// A line, or several, on standard output.
pub(crate) fn line(text: &str) {
    if !job::is_first() {
        return;
    }
    let mut out = std::io::stdout().lock();
    phalanx::train::output::note(writeln!(out, "{text}").and_then(|()| out.flush()));
}

/// A line, or several, on standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A configuration, after its notes were shown on standard error.
pub(crate) fn noted(loaded: &Loaded) -> &Loaded {
    let notes = loaded.notes.iter().filter(|_| job::is_first());
    notes.for_each(|note| error(&format!("note: {note}")));
    loaded
}

/// A value as compact JSON on standard output.
pub(crate) fn json(value: &impl serde::Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => line(&text),
        // Plain structs of numbers and text always serialise.
        Err(problem) => error(&format!("error: {problem}")),
    }
}
