//! The order of a pipeline, and its stages.

/// The order of a pipeline, by name.
///
/// ```
/// use phalanx::NamedSchedule;
///
/// let schedule: NamedSchedule = "zb-h1".parse()?;
/// assert_eq!(schedule, NamedSchedule::ZbH1);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_pipeline::NamedSchedule;
/// The order of a pipeline, checked when it is made: your own, for example.
///
/// ```
/// use phalanx::Schedule;
/// use phalanx::pipeline::{Placement, bwd, fwd};
///
/// // Two stages, three micro-batches: all forwards, then all backwards.
/// let schedule = Schedule::new("own", 3, Placement::looped(2, 1)?, |_| fwd(0..3).then(bwd(0..3)))?;
/// assert_eq!(schedule.microbatches(), 3);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[doc(inline)]
pub use phalanx_pipeline::Schedule;
/// What [`Trainer::schedule`](crate::Trainer::schedule) takes: a name, or a schedule of your own.
///
/// ```
/// use phalanx::{NamedSchedule, PipelineOrder};
///
/// let order = PipelineOrder::from(NamedSchedule::ZbH1);
/// assert!(matches!(order, PipelineOrder::Named(NamedSchedule::ZbH1)));
/// ```
#[doc(inline)]
pub use phalanx_session::PipelineOrder;
/// Which layers the stages of a pipeline get.
///
/// ```
/// use phalanx::StageSplit;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.mesh("pp=2").split(StageSplit::Count)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_session::StageSplit;
