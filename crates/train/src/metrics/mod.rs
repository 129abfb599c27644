//! The output of a run: step lines for people, JSON for programs, a picture at the end.

mod jsonl;
mod line;
mod plot;
mod zscore;

pub use jsonl::{EvaluationLine, OneRank, RestartLine, Resumed, SavedLine, Step, Summary};
pub use line::{GpuPart, StepLine};
pub use plot::LossPlot;
pub use zscore::ZScore;
