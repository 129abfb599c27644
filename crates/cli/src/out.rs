//! Writing to the standard streams. A closed pipe is not an error.

use std::io::Write;

use phalanx::config::Loaded;

/// A line, or several, on standard output.
pub(crate) fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    phalanx::train::output::note(writeln!(out, "{text}").and_then(|()| out.flush()));
}

/// A line, or several, on standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A configuration, after its notes were shown on standard error.
pub(crate) fn noted(loaded: Loaded) -> Loaded {
    loaded.notes.iter().for_each(|note| error(&format!("note: {note}")));
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
