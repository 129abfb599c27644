//! Errors, written so that the reader knows what to change.
//!
//! A [`Problem`] says what is wrong, where it was written, why that cannot work and what would. An
//! [`Error`] adds the one distinction a caller acts on: was the request *refused* before anything
//! started (several independent problems may be reported together), or did something *fail* that
//! had been started? The typed error behind a problem, if there is one, is its cause
//! ([`Error::cause`]).

#![forbid(unsafe_code)]

mod amount;
mod printable;
mod problem;

use std::error::Error as StdError;
use std::fmt;

pub use amount::{bytes, counted, short, three_digits};
pub use printable::printable;
pub use problem::{Location, Problem, Remedy};

use phalanx_engine::EngineError;
use phalanx_ir::IrError;
use phalanx_models::hf::HfError;
use phalanx_pipeline::PipelineError;
use phalanx_runtime::RuntimeError;
use phalanx_script::ScriptError;
use phalanx_spmd::SpmdError;
use phalanx_sys::SysError;

/// A result whose error is this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a request was not carried out. Its text, also as `Debug`, is what the command prints: so
/// `fn main() -> Result<(), phalanx::Error>` ends with the same words.
#[derive(Clone, PartialEq, Eq)]
pub enum Error {
    /// The request cannot work as given; nothing was started. Exit code 2.
    Refused(Vec<Problem>),
    /// Something was started and then failed. Exit code 1.
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

    /// The typed error behind this one, if it is an `E`: one of the problems' causes, or a source
    /// of such a cause.
    ///
    /// ```
    /// use phalanx_error::Error;
    /// use phalanx_ir::{IrError, Mesh};
    ///
    /// let error = Error::from("dp=0".parse::<Mesh>().unwrap_err());
    /// assert!(matches!(error.cause(), Some(IrError::EmptyAxis { .. })));
    /// assert!(std::error::Error::source(&error).is_some());
    /// ```
    pub fn cause<E: StdError + 'static>(&self) -> Option<&E> {
        let causes = self.problems().iter().filter_map(Problem::cause);
        causes.flat_map(chain).find_map(|cause| cause.downcast_ref())
    }

    /// Changes every text of the error; causes stay.
    pub fn reworded(self, reword: impl Fn(&str) -> String) -> Self {
        match self {
            Error::Refused(problems) => {
                Error::Refused(problems.into_iter().map(|p| p.reworded(&reword)).collect())
            }
            Error::Failed(problem) => Error::failed(problem.reworded(&reword)),
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, problem) in self.problems().iter().enumerate() {
            let line = if number > 0 { "\n" } else { "" };
            write!(f, "{line}{problem}")?;
        }
        Ok(())
    }
}

/// The text for people: `main` prints an error it returns with `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.problems().iter().find_map(Problem::cause)
    }
}

impl From<IrError> for Error {
    /// A model that cannot be built as asked; nothing has been started.
    fn from(error: IrError) -> Self {
        Error::refused(Problem::of(error))
    }
}

impl From<SpmdError> for Error {
    /// A model that cannot be divided among ranks as asked; nothing has been started.
    fn from(error: SpmdError) -> Self {
        Error::refused(Problem::of(error))
    }
}

impl From<ScriptError> for Error {
    fn from(error: ScriptError) -> Self {
        Error::refused(Problem::of(error))
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
        lines.fold(problem, Problem::because).caused_by(error)
    }
}

impl From<RuntimeError> for Error {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Script(error) => error.into(),
            RuntimeError::Engine(error) => error.into(),
            other => Error::failed(Problem::of(other)),
        }
    }
}

impl From<EngineError> for Error {
    /// Programs are compiled and memory is allocated before the first step; only calls can fail
    /// later.
    fn from(error: EngineError) -> Self {
        let fix =
            "a smaller model or batch, more train.microbatches, or train.recompute = \"full\"";
        match error {
            EngineError::Unsupported { .. } => Error::refused(Problem::of(error)),
            EngineError::Threads { .. } => Error::refused(Problem::of(error).fix(
                "fewer threads of each rank (run.threads), fewer ranks, or a higher limit (ulimit \
                 -u, ulimit -v)",
            )),
            EngineError::Memory { .. } => Error::refused(Problem::of(error).fix(fix)),
            _ => Error::failed(Problem::of(error)),
        }
    }
}

impl From<HfError> for Error {
    fn from(error: HfError) -> Self {
        let (problem, refused) = (Problem::from(error.diagnostic()), error.is_bad_input());
        match refused {
            true => Error::refused(problem.caused_by(error)),
            false => Error::failed(problem.caused_by(error)),
        }
    }
}

impl From<SysError> for Error {
    /// These errors happen while something is written.
    fn from(error: SysError) -> Self {
        Error::failed(Problem::from(error.diagnostic()).caused_by(error))
    }
}

/// An error, its source, and so on.
fn chain<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
    fn what_main_prints_is_the_text_for_people() {
        let problem = Problem::new("there is nothing to train on").fix("call Trainer::data");
        let error = Error::refused(problem);
        assert_eq!(format!("{error:?}"), error.to_string());
    }

    /// The cause of a cause is found too, and new words do not lose it.
    #[test]
    fn causes_are_found_by_their_type() {
        let io = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let sys = SysError::on_file(Path::new("w.safetensors"), "reading it", io);
        let error = Error::from(HfError::Read(sys)).reworded(str::to_uppercase);
        assert!(matches!(error.cause(), Some(HfError::Read(_))));
        assert!(error.cause::<SysError>().is_some());
        assert!(error.cause::<IrError>().is_none());
        assert!(error.to_string().contains("W.SAFETENSORS"), "{error}");
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
