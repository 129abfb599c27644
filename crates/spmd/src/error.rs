//! Errors of partitioning, with the values, the place and what would work.

use phalanx_ir::{Axis, IrError, VerifyError};

/// Why a program cannot be partitioned as asked.
#[derive(Debug, thiserror::Error)]
pub enum SpmdError {
    /// A mesh with more axes than layouts can name.
    #[error(
        "the mesh ({mesh}) has more than {most} axes with several ranks\n  usual fix: merge some \
        of them"
    )]
    TooManyAxes {
        /// The mesh.
        mesh: String,
        /// The limit.
        most: usize,
    },
    /// Two annotations of one value contradict each other.
    #[error(transparent)]
    Conflict(Box<Conflict>),
    /// Two strategies both decide how ranks share parameters.
    #[error(
        "`{first}` and `{second}` both say how data-parallel ranks share parameters, gradients and \
         optimizer state\n  usual fix: keep one of the two, or set how many ranks share a copy \
         (hybrid sharding): shards within groups, copies between groups"
    )]
    Sharing {
        /// The strategy that came first.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A group of ranks that share one copy of the weights does not divide the axis.
    #[error(
        "groups of {shard} ranks cannot share one copy each: {shard} does not divide the {size} \
        ranks of `{axis}`\n  usual fix: a divisor of {size}"
    )]
    Shards {
        /// The axis.
        axis: String,
        /// Its ranks.
        size: usize,
        /// How many ranks should share a copy.
        shard: usize,
    },
    /// Tokens cannot travel in two steps.
    #[error(
        "{ranks} ranks with experts are no product of two numbers above 1: tokens cannot travel in \
        two steps\n  nearest that work: {} ranks",
        if *ranks < 4 { 4 } else { ranks + 1 }
    )]
    Factors {
        /// The ranks that experts are distributed to.
        ranks: usize,
    },
    /// A stage of ZeRO that does not exist.
    #[error(
        "there is no stage {stage} of ZeRO\n  nearest that work: 1 (optimizer state), 2 (gradients too), 3 (weights too)"
    )]
    ZeroStage {
        /// What was asked for.
        stage: u8,
    },
    /// An annotation that is not a possible layout.
    #[error("{segment}: wrong annotation of {value} by `{by}`: {what}")]
    Annotation {
        /// The segment.
        segment: String,
        /// The value.
        value: String,
        /// Who annotated.
        by: String,
        /// What is wrong.
        what: String,
    },
    /// An axis covers two factors of a dim and must be split.
    #[error(
        "{segment}: axis `{axis}` ({size} ranks) straddles the factors of a dim of {value} \
         ({left} parts are left in the major one); split it: {axis} = {left}×{rest}"
    )]
    Straddle {
        /// The segment.
        segment: String,
        /// The axis.
        axis: Axis,
        /// Its ranks.
        size: usize,
        /// The value.
        value: String,
        /// Parts that the major factor still has.
        left: usize,
        /// What remains of the axis for the next factor.
        rest: usize,
    },
    /// Splits of one axis that contradict each other.
    #[error(
        "axis `{axis}` ({size} ranks) would have to be split into parts of {cuts:?}, which do not \
        divide each other"
    )]
    Splits {
        /// The axis.
        axis: String,
        /// Its ranks.
        size: usize,
        /// The parts that were asked for, as products from the major end.
        cuts: Vec<usize>,
    },
    /// Padding that would lie between elements.
    #[error(
        "{segment}: dim {dim} of {value} has {size} elements and would be padded to {padded}, but {what}"
    )]
    Padding {
        /// The segment.
        segment: String,
        /// The value.
        value: String,
        /// The dim.
        dim: usize,
        /// Its elements.
        size: usize,
        /// The padded extent.
        padded: usize,
        /// Why that is not possible.
        what: String,
    },
    /// What the strategies ask for does not fit.
    #[error("{segment}: {what}")]
    Strategy {
        /// The segment.
        segment: String,
        /// What is wrong and what would work.
        what: String,
    },
    /// No layout keeps the segment within the limit.
    #[error(
        "{segment}: parameters and kept values need {needed} bytes per rank even in the smallest \
        layout found, but the limit is {limit}\n  usual fix: more ranks, a smaller batch or \
        recomputation"
    )]
    Memory {
        /// The segment.
        segment: String,
        /// Bytes per rank.
        needed: usize,
        /// The limit.
        limit: usize,
    },
    /// A layout that cannot be reached from another.
    #[error("{segment}: no sequence of collectives takes {value} from {from} to {to}")]
    Unreachable {
        /// The segment.
        segment: String,
        /// The value.
        value: String,
        /// The layout it has.
        from: String,
        /// The layout it should have.
        to: String,
    },
    /// The program itself is wrong.
    #[error(transparent)]
    Ir(#[from] IrError),
    /// The partitioned program does not type-check: a bug of phalanx.
    #[error("the partitioned program does not verify: {0}")]
    Verify(#[from] Box<VerifyError>),
}

/// Two annotations that contradict each other.
#[derive(Debug, thiserror::Error)]
#[error(
    "{segment}: `{first_by}` wants {value} {first} over `{axis}`, but `{second_by}` wants it \
    {second}\n  an axis can do only one thing to a value\n  \
     usual fix: drop one of the two, or split `{axis}` so that each has its own part"
)]
pub struct Conflict {
    /// The segment.
    pub segment: String,
    /// The value.
    pub value: String,
    /// The axis.
    pub axis: Axis,
    /// Who annotated first.
    pub first_by: String,
    /// What it wants.
    pub first: String,
    /// Who annotated second.
    pub second_by: String,
    /// What it wants.
    pub second: String,
}
