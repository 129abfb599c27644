//! Why a schedule is refused.

/// A result whose error is [`PipelineError`].
pub type Result<T, E = PipelineError> = std::result::Result<T, E>;

/// Every way in which a schedule, its table or its costs can be wrong.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// Numbers that a schedule can't be made from.
    #[error("{what}\n  {why}\n  nearest that work: {nearest}")]
    Shape {
        /// What is wrong, with the values.
        what: String,
        /// Why that cannot work.
        why: String,
        /// The closest that would.
        nearest: String,
    },
    /// A name that no schedule has.
    #[error("there is no schedule `{name}`\n  nearest that work: {known}")]
    Unknown {
        /// The name given.
        name: String,
        /// The names that there are, or the likely one.
        known: String,
    },
    /// Stages that are not laid on devices one by one.
    #[error(
        "{what}\n  every replica has each stage, 0 to the last, on exactly one device and chunk\n  \
         usual fix: {help}"
    )]
    Placement {
        /// What is wrong, with the values.
        what: String,
        /// What would work.
        help: String,
    },
    /// Something that is not done.
    #[error(
        "stage {stage} (device {device}, chunk {chunk}) never runs {phase} of micro-batch \
         {microbatch}\n  each micro-batch of 0 to {last} has one F, one B and one W, or one BW for \
         both, on every stage\n  {help}"
    )]
    Missing {
        /// The stage.
        stage: usize,
        /// The device that holds it.
        device: usize,
        /// The device's chunk that it is.
        chunk: usize,
        /// F, B or W.
        phase: &'static str,
        /// The micro-batch.
        microbatch: usize,
        /// The last micro-batch.
        last: usize,
        /// What would work.
        help: String,
    },
    /// Something that is done twice, or for a micro-batch or chunk that there isn't.
    #[error("device {device}, turn {index} ({turn}): {why}\n  {help}")]
    Turn {
        /// The device.
        device: usize,
        /// The turn's number on it, from 0.
        index: usize,
        /// The turn.
        turn: String,
        /// What is wrong about it.
        why: String,
        /// What would work.
        help: String,
    },
    /// Turns and messages that wait for each other in a circle.
    #[error("the schedule would deadlock\n  {}\n  {help}", .circle.join("\n  "))]
    Deadlock {
        /// Who waits for whom, a line each; the last waits for the first.
        circle: Vec<String>,
        /// What would work.
        help: String,
    },
    /// A table that is no schedule.
    #[error("line {line}: {what}\n  {help}")]
    Csv {
        /// The line, from 1.
        line: usize,
        /// What is wrong, with the value.
        what: String,
        /// What would be accepted.
        help: String,
    },
    /// Costs that a schedule can't be timed with.
    #[error("{what}\n  {help}")]
    Costs {
        /// What is wrong, with the values.
        what: String,
        /// What would be accepted.
        help: String,
    },
}
