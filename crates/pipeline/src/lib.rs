//! Pipelines: the order in which stage groups run micro-batches through the stages of a model.
//!
//! A [`Schedule`] is plain data: for every stage group a list of [`Turn`]s, and which stage each of
//! its chunks is. One small file of [`schedules`] per system states its rule. A schedule is checked
//! when it is made, so every schedule can be run, simulated and drawn: [`simulate()`] gives the
//! start and end of every turn, [`picture`] draws them, and [`csv`] writes the schedule as a table
//! and reads it back. [`split`] says which layers of a model each stage has, and [`plan`] how many stages to make of them.
//!
//! ```
//! use phalanx_pipeline::{NamedSchedule, ScheduleShape, Times, TurnCosts, simulate};
//!
//! let schedule = NamedSchedule::OneFOneB.build(ScheduleShape::new(4, 8))?;
//! let times = Times { f: 1.0, b: 1.0, w: 1.0 };
//! let timeline = simulate(&schedule, &TurnCosts::even(times, 0.0)?)?;
//! assert_eq!(timeline.makespan, (8.0 + 4.0 - 1.0) * 3.0);
//! assert_eq!(timeline.peak_in_flight, [4, 3, 2, 1]);
//! # Ok::<(), phalanx_pipeline::PipelineError>(())
//! ```
#![forbid(unsafe_code)]

mod check;
mod costs;
pub mod csv;
mod deadlock;
mod deadlock_remedy;
mod error;
mod evict;
mod expand;
mod flow;
mod named;
mod named_words;
pub mod picture;
mod placement;
pub mod plan;
mod rounds;
mod schedule;
pub mod schedules;
mod simulate;
pub mod split;
mod turn;
mod words;
mod written;

pub use costs::{Times, TurnCosts};
pub use error::{PipelineError, Result};
pub use flow::{At, Direction, StageMessage};
pub use named::{NamedSchedule, ScheduleShape};
pub use phalanx_script::{ParkedMove, Part};
pub use placement::{HeldStage, Placement};
pub use schedule::Schedule;
pub use schedules::{Demand, RoundConcat, Warmup, zb_auto};
pub use simulate::{Timed, Timeline, simulate};
pub use turn::{Turn, Turns, b, bwd, fwd, w, weave};
