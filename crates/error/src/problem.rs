//! One thing that is wrong: what, where, why, and what would work.

use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use phalanx_sys::Diagnostic;

use crate::printable::printable;

/// One thing that is wrong, as plain data. [`fmt::Display`] prints it as
///
/// ```text
/// error: model.heads = 6 does not divide model.width = 64 (config.toml:4)
///   every head takes an equal share of the width
///   nearest that work: model.heads = 4 or 8
/// ```
///
/// Two problems are equal if they say the same.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What is wrong, with the values found.
    pub message: String,
    /// Where the values came from; empty where there is no such place.
    pub places: Vec<Location>,
    /// Why it cannot work, a line each.
    pub because: Vec<String>,
    /// What would work.
    pub remedy: Option<Remedy>,
    /// The typed error behind it.
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Problem {
    /// A problem with only a message so far.
    pub fn new(message: impl Into<String>) -> Self {
        let (message, places, because) = (message.into(), Vec::new(), Vec::new());
        Problem { message, places, because, remedy: None, cause: None }
    }

    /// The problem that a typed error is, in its words.
    pub fn of(error: impl StdError + Send + Sync + 'static) -> Self {
        Problem::new(error.to_string()).caused_by(error)
    }

    /// Adds the typed error behind it.
    pub fn caused_by(mut self, error: impl StdError + Send + Sync + 'static) -> Self {
        self.cause = Some(Arc::new(error));
        self
    }

    /// The typed error behind it, if there is one.
    pub fn cause(&self) -> Option<&(dyn StdError + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn StdError + 'static))
    }

    pub(crate) fn reworded(mut self, reword: &impl Fn(&str) -> String) -> Self {
        self.message = reword(&self.message);
        self.because = self.because.iter().map(|line| reword(line)).collect();
        self.remedy = self.remedy.map(|remedy| remedy.reworded(reword));
        self
    }

    /// Adds the place a value came from.
    pub fn at(mut self, place: Location) -> Self {
        self.places.push(place);
        self
    }

    /// Adds a line of explanation.
    pub fn because(mut self, line: impl Into<String>) -> Self {
        self.because.push(line.into());
        self
    }

    /// States the closest values that would be accepted.
    pub fn nearest(mut self, text: impl Into<String>) -> Self {
        self.remedy = Some(Remedy::Nearest(text.into()));
        self
    }

    /// States what usually fixes it.
    pub fn fix(mut self, text: impl Into<String>) -> Self {
        self.remedy = Some(Remedy::Fix(text.into()));
        self
    }

    /// Offers a likely correction of a misspelt name.
    pub fn guess(mut self, text: impl Into<String>) -> Self {
        self.remedy = Some(Remedy::Guess(text.into()));
        self
    }

    /// A system call on `path` went wrong while doing `what`; the remedy fits the kind of error.
    pub fn io(what: &str, path: &Path, error: &std::io::Error) -> Self {
        Problem::new(format!("{what} {}: {error}", path.display())).fix(io_remedy(error))
    }
}

impl PartialEq for Problem {
    fn eq(&self, other: &Self) -> bool {
        let said = |p: &Self| (p.message.clone(), p.places.clone(), p.because.clone());
        said(self) == said(other) && self.remedy == other.remedy
    }
}

impl Eq for Problem {}

impl From<Diagnostic> for Problem {
    fn from(told: Diagnostic) -> Self {
        let remedy = told.fix.map(Remedy::Fix);
        let because = told.because.into_iter().collect();
        Problem { because, remedy, ..Problem::new(told.what) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", printable(&self.message))?;
        let mut places: Vec<String> = self.places.iter().map(Location::to_string).collect();
        places.dedup();
        if !places.is_empty() {
            write!(f, " ({})", printable(&places.join(", ")))?;
        }
        for line in &self.because {
            write!(f, "\n  {}", printable(line))?;
        }
        match &self.remedy {
            Some(remedy) => write!(f, "\n  {}", printable(&remedy.to_string())),
            None => Ok(()),
        }
    }
}

/// What would work instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Remedy {
    /// The closest accepted values.
    Nearest(String),
    /// What usually fixes it.
    Fix(String),
    /// The name that was probably meant.
    Guess(String),
}

impl Remedy {
    fn reworded(self, reword: &impl Fn(&str) -> String) -> Self {
        match self {
            Remedy::Nearest(text) => Remedy::Nearest(reword(&text)),
            Remedy::Fix(text) => Remedy::Fix(reword(&text)),
            Remedy::Guess(text) => Remedy::Guess(reword(&text)),
        }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::Nearest(text) => write!(f, "nearest that work: {text}"),
            Remedy::Fix(text) => write!(f, "usual fix: {text}"),
            Remedy::Guess(text) => write!(f, "did you mean {text}?"),
        }
    }
}

/// Where a value was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Location {
    /// The file as the user named it, `preset NAME`, or `--set`.
    pub source: String,
    /// The line within it, counted from 1.
    pub line: Option<usize>,
    /// The configuration key, as `section.name`.
    pub key: Option<String>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", self.source),
            None => f.write_str(&self.source),
        }
    }
}

fn io_remedy(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "choose a place you may write to, for example --set run.dir=/tmp/runs"
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free some space, or write elsewhere with --set run.dir=DIR"
        }
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
            "move the file that is in the way, or write elsewhere with --set run.dir=DIR"
        }
        _ => phalanx_sys::remedy(error),
    }
}
