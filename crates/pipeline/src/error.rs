//! Errors of schedules.

/// A result whose error is [`PipelineError`].
pub type Result<T, E = PipelineError> = std::result::Result<T, E>;

/// What can be wrong with a schedule, its table or its costs.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// Numbers for which the schedule does not exist.
    #[error("{what}\n  {why}\n  nearest that work: {nearest}")]
    Shape {
        /// What is wrong, with the values.
        what: String,
        /// Why that cannot work.
        why: String,
        /// The closest values that would.
        nearest: String,
    },
    /// An unknown name.
    #[error("there is no schedule `{name}`\n  nearest that work: {known}")]
    Unknown {
        /// The name given.
        name: String,
        /// The known names, or the likely one.
        known: String,
    },
    /// Stages that are not assigned to stage groups exactly once.
    #[error(
        "{what}\n  each replica of a stage, 0 to the last, is in exactly one stage group and \
        chunk\n  usual fix: {help}"
    )]
    Placement {
        /// What is wrong, with the values.
        what: String,
        /// What would work.
        help: String,
    },
    /// Work that is missing.
    #[error(
        "stage {stage} (stage group {stage_group}, chunk {chunk}) never runs {phase} of micro-batch \
         {microbatch}\n  each micro-batch of 0 to {last} needs one F, one B and one W, or one BW for \
         both, on every stage\n  {help}"
    )]
    Missing {
        /// The stage.
        stage: usize,
        /// The stage group that holds it.
        stage_group: usize,
        /// Its chunk in that group.
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
    /// A turn that repeats work, or whose micro-batch or chunk does not exist.
    #[error("stage group {stage_group}, turn {index} ({turn}): {why}\n  {help}")]
    Turn {
        /// The stage group.
        stage_group: usize,
        /// The turn's index in its list, from 0.
        index: usize,
        /// The turn.
        turn: String,
        /// What is wrong with it.
        why: String,
        /// What would work.
        help: String,
    },
    /// Turns and messages that wait for each other in a cycle.
    #[error("the schedule would deadlock\n  {}\n  {help}", .cycle.join("\n  "))]
    Deadlock {
        /// What waits for what, one line each; the last waits for the first.
        cycle: Vec<String>,
        /// What would work.
        help: String,
    },
    /// A table that is not a schedule.
    #[error("line {line}: {what}\n  {help}")]
    Csv {
        /// The line, from 1.
        line: usize,
        /// What is wrong, with the value.
        what: String,
        /// What would be accepted.
        help: String,
    },
    /// Costs with which a schedule cannot be simulated.
    #[error("{what}\n  {help}")]
    Costs {
        /// What is wrong, with the values.
        what: String,
        /// What would be accepted.
        help: String,
    },
}
