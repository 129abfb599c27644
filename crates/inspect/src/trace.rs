//! A measured step as files: a trace for Perfetto and `chrome://tracing`, and a drawing of the measured
//! timeline above the predicted one.

mod chrome;
mod hidden;
mod picture;
mod replay;

use std::io;
use std::path::{Path, PathBuf};

use phalanx_sys::Staged;

use crate::writable::can_write;
use phalanx_error::{Error, Problem, Result};
use phalanx_session::{Session, Trace};

pub use chrome::chrome;
pub use hidden::HiddenTransfers;
pub(crate) use picture::played_picture;
pub use picture::{Timelines, picture};
pub use replay::Replay;

/// The warm-up steps before the traced one, in which caches fill and memory is first touched: as
/// many as in benchmarks.
pub const WARM_UP: usize = 3;

/// Which of a run's steps is traced: the first after the warm-up, or the last if it comes before.
pub fn traced_step(steps: usize) -> usize {
    steps.min(WARM_UP + 1)
}

/// Writes the trace of a run's session to files, once there is one.
#[derive(Debug)]
pub struct Tracing {
    file: PathBuf,
    /// Whether the files were written, once the step was taken.
    outcome: Option<Result<Written>>,
}

/// Where a trace was written, and its summary.
#[derive(Clone, PartialEq, Debug)]
pub struct Written {
    /// The step, counted from 1.
    pub step: u64,
    /// The events.
    pub file: PathBuf,
    /// The drawing.
    pub drawing: PathBuf,
    /// Milliseconds that the step took.
    pub measured: f64,
    /// The same with the durations of its actions alone: waiting follows from the scripts.
    pub replayed: f64,
    /// The same with the usual durations.
    pub predicted: f64,
    /// What ranks did while transfers inside programs were open.
    pub transfers: HiddenTransfers,
}

impl Tracing {
    /// Refuses files that cannot be written.
    pub fn new(file: &Path) -> Result<Self> {
        if file.metadata().is_ok_and(|found| !found.is_file()) {
            let message = format!("no trace can be written to {}", file.display());
            let problem = Problem::new(message).because("a drawing is made next to it");
            return Err(Error::refused(problem.fix("name a regular file, such as trace.json")));
        }
        for path in [file, &drawing_of(file)] {
            can_write(path, format!("no trace can be written to {}", path.display()))?;
        }
        Ok(Self { file: file.to_path_buf(), outcome: None })
    }

    /// Writes the files if the session's last step was the one to trace. A problem is reported at
    /// the end of the run: it must not stop the training.
    pub fn look(&mut self, session: &mut Session) {
        if let Some(trace) = session.take_trace() {
            self.outcome = Some(write(&trace, &self.file));
        }
    }

    /// Where the files are; nothing if the run ended before the step.
    pub fn outcome(&mut self) -> Result<Option<Written>> {
        self.outcome.take().transpose()
    }
}

/// Writes a trace to `file` and its drawing next to it, either both files or none.
pub fn write(trace: &Trace, file: &Path) -> Result<Written> {
    let drawing = drawing_of(file);
    let played = Timelines::new(trace)?;
    let stage = |path: &Path, text: String| {
        Staged::write(path, |to: &mut dyn io::Write| to.write_all(text.as_bytes()))
    };
    let staged = [
        stage(file, chrome(trace, &played).to_string() + "\n")?,
        stage(&drawing, picture(&played))?,
    ];
    staged.into_iter().try_for_each(Staged::put_in_place)?;
    let Replay { step: measured, replayed, predicted, .. } = played.replay;
    let [replayed, predicted] = [replayed.makespan, predicted.makespan];
    let (step, file) = (trace.step, file.to_path_buf());
    let transfers = HiddenTransfers::of(trace);
    Ok(Written { step, file, drawing, measured, replayed, predicted, transfers })
}

/// `trace.svg` for `trace.json`, and `trace.txt.svg` for `trace.txt`.
pub fn drawing_of(file: &Path) -> PathBuf {
    if file.extension().is_some_and(|extension| extension == "json") {
        return file.with_extension("svg");
    }
    let mut name = file.as_os_str().to_owned();
    name.push(".svg");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_lies_beside_its_trace() {
        for (file, drawing) in [
            ("a/t.json", "a/t.svg"),
            ("t", "t.svg"),
            ("t.trace", "t.trace.svg"),
            (".json", ".json.svg"),
        ] {
            assert_eq!(drawing_of(Path::new(file)), Path::new(drawing));
        }
    }

    #[test]
    fn short_runs_trace_their_last_step() {
        assert_eq!([1, 3, 4, 100].map(traced_step), [1, 3, 4, 4]);
    }
}
