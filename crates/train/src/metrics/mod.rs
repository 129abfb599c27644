//! The output of a run: step lines for people, JSON for programs, a picture at the end.

mod jsonl;
mod line;
mod load_plot;
mod plot;
mod zscore;

pub use jsonl::{
    EvaluationLine, LackedRoom, MoeLine, OneRank, Repeated, RestartLine, Resumed, SavedLine, Step,
    Summary, Taken,
};
pub use line::{GpuPart, StepLine};
pub use load_plot::LoadPlot;
pub use plot::LossPlot;
pub use zscore::ZScore;
