//! Errors, written so that the reader knows what to change.
//!
//! A [`Problem`] says what is wrong, where it was written, why that cannot work and what would. An
//! [`Error`] adds the one distinction a caller acts on: was the request *refused* before anything
//! started (several independent problems may be reported together), or did something *fail* that
//! had been started?

#![forbid(unsafe_code)]

mod amount;
mod printable;

use std::fmt;
use std::path::Path;

pub use amount::{bytes, counted, short, three_digits};
pub use printable::printable;

use phalanx_engine::EngineError;
use phalanx_ir::IrError;
use phalanx_models::hf::HfError;
use phalanx_pipeline::PipelineError;
use phalanx_runtime::RuntimeError;
use phalanx_script::ScriptError;
use phalanx_spmd::SpmdError;
use phalanx_sys::{Diagnostic, SysError};

/// A result whose error is this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a request was not carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The request cannot work as given; nothing was started. Exit code 2.
    #[error("{}", in_order(.0))]
    Refused(Vec<Problem>),
    /// Something was started and then failed. Exit code 1.
    #[error("{0}")]
    Failed(Box<Problem>),
}

impl Error {
    /// A refusal for one reason.
    pub fn refused(problem: Problem) -> Self {
        Error::Refused(vec![problem])
    }

    /// A failure after the start.
    pub fn failed(problem: Problem) -> Self {
        Error::Failed(Box::new(problem))
    }

    /// Adds a line of explanation to the last problem.
    pub fn because(self, line: impl Into<String>) -> Self {
        self.with(|problem| problem.because(line))
    }

    /// Adds the place that the last problem came from.
    pub fn at(self, place: Location) -> Self {
        self.with(|problem| problem.at(place))
    }

    fn with(self, add: impl FnOnce(Problem) -> Problem) -> Self {
        match self {
            Error::Refused(mut problems) => {
                let last = problems.pop().map(add);
                problems.extend(last);
                Error::Refused(problems)
            }
            Error::Failed(problem) => Error::failed(add(*problem)),
        }
    }

    /// The exit code of the command that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Refused(_) => 2,
            Error::Failed(_) => 1,
        }
    }

    /// The problems behind this error, in the order they are printed.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Error::Refused(problems) => problems,
            Error::Failed(problem) => std::slice::from_ref(problem),
        }
    }
}

impl From<IrError> for Error {
    /// A model that cannot be built as asked; nothing has been started.
    fn from(error: IrError) -> Self {
        Error::refused(Problem::new(error.to_string()))
    }
}

impl From<SpmdError> for Error {
    /// A model that cannot be divided among ranks as asked; nothing has been started.
    fn from(error: SpmdError) -> Self {
        Error::refused(Problem::new(error.to_string()))
    }
}

impl From<ScriptError> for Error {
    fn from(error: ScriptError) -> Self {
        Error::refused(Problem::new(error.to_string()))
    }
}

impl From<PipelineError> for Error {
    /// A schedule that cannot be built, or a file that is not a schedule table; nothing has been
    /// started.
    fn from(error: PipelineError) -> Self {
        Error::refused(error.into())
    }
}

impl From<PipelineError> for Problem {
    fn from(error: PipelineError) -> Self {
        let text = error.to_string();
        let mut lines = text.lines().map(str::trim);
        let problem = Problem::new(lines.next().unwrap_or_default());
        lines.fold(problem, Problem::because)
    }
}

impl From<RuntimeError> for Error {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Script(error) => error.into(),
            RuntimeError::Engine(error) => error.into(),
            other => Error::failed(Problem::new(other.to_string())),
        }
    }
}

impl From<EngineError> for Error {
    /// Programs are compiled and memory is allocated before the first step; only calls can fail
    /// later.
    fn from(error: EngineError) -> Self {
        let problem = Problem::new(error.to_string());
        match error {
            EngineError::Unsupported { .. } => Error::refused(problem),
            EngineError::Threads { .. } => Error::refused(problem.fix(
                "fewer threads of each rank (run.threads), fewer ranks, or a higher limit (ulimit \
                 -u, ulimit -v)",
            )),
            EngineError::Memory { .. } => Error::refused(problem.fix(
                "a smaller model or batch, more train.microbatches, or train.recompute = \"full\"",
            )),
            _ => Error::failed(problem),
        }
    }
}

impl From<HfError> for Error {
    fn from(error: HfError) -> Self {
        let problem = Problem::from(error.diagnostic());
        match error.is_bad_input() {
            true => Error::refused(problem),
            false => Error::failed(problem),
        }
    }
}

impl From<SysError> for Error {
    /// These errors happen while something is written.
    fn from(error: SysError) -> Self {
        Error::failed(error.diagnostic().into())
    }
}

/// One thing that is wrong, as plain data. [`fmt::Display`] prints it as
///
/// ```text
/// error: model.heads = 6 does not divide model.width = 64 (config.toml:4)
///   every head takes an equal share of the width
///   nearest that work: model.heads = 4 or 8
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// What is wrong, with the values found.
    pub message: String,
    /// Where the values came from; empty where there is no such place.
    pub places: Vec<Location>,
    /// Why it cannot work, a line each.
    pub because: Vec<String>,
    /// What would work.
    pub remedy: Option<Remedy>,
}

impl Problem {
    /// A problem with only a message so far.
    pub fn new(message: impl Into<String>) -> Self {
        Problem { message: message.into(), places: Vec::new(), because: Vec::new(), remedy: None }
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

impl From<Diagnostic> for Problem {
    fn from(told: Diagnostic) -> Self {
        let remedy = told.fix.map(Remedy::Fix);
        let because = told.because.into_iter().collect();
        Problem { message: told.what, places: Vec::new(), because, remedy }
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

fn in_order(problems: &[Problem]) -> String {
    let all: Vec<String> = problems.iter().map(Problem::to_string).collect();
    all.join("\n")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_prints_in_the_shape_of_a_refusal() {
        let place = |line| Location {
            source: "config.toml".into(),
            line: Some(line),
            key: Some("train.batch_size".into()),
        };
        let problem = Problem::new("train.batch_size = 8 leaves ranks without work")
            .at(place(14))
            .at(place(15))
            .because("each rank needs a sequence")
            .nearest("train.batch_size = 16");
        assert_eq!(
            problem.to_string(),
            "error: train.batch_size = 8 leaves ranks without work (config.toml:14, config.toml:15)\n  \
             each rank needs a sequence\n  nearest that work: train.batch_size = 16"
        );
    }

    #[test]
    fn kinds_map_to_exit_codes() {
        let problem = Problem::new("loss is NaN at step 3");
        assert_eq!(Error::refused(problem.clone()).exit_code(), 2);
        assert_eq!(Error::failed(problem.clone()).exit_code(), 1);
        let both = Error::Refused(vec![problem.clone(), problem]);
        assert_eq!(both.to_string().lines().count(), 2);
    }

    #[test]
    fn a_full_disk_is_told_with_path_and_remedy() {
        let error = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let text = Problem::io("cannot write", Path::new("runs/a/metrics.jsonl"), &error);
        let text = text.to_string();
        assert!(text.contains("runs/a/metrics.jsonl"), "{text}");
        assert!(text.contains("usual fix: free some space"), "{text}");
    }
}
