//! Errors between ranks; each names the rank to look at.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use phalanx_ir::DType;

use crate::call::{OpKind, ReduceOp};
use crate::site::Site;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// Two members of a group did not call the same thing.
    #[error("call #{sequence} of group {group} does not match: {one}, but {other}{reason}")]
    Mismatch {
        /// The group's ranks.
        group: Arc<str>,
        /// The index of the call in its group, from 0.
        sequence: u64,
        /// What one of them called.
        one: Box<Side>,
        /// What the other called.
        other: Box<Side>,
        /// What does not match, if the two calls alone do not show it.
        reason: String,
    },
    /// A rank did not arrive, or arrived and never continued.
    #[error("{0}")]
    Missing(Box<Missing>),
    /// Another rank failed before.
    #[error("stopped because {0}")]
    Aborted(Failure),
    /// A call that is invalid by itself.
    #[error("{kind} at `{site}` on rank {rank}: {problem}")]
    BadCall {
        /// What was called.
        kind: OpKind,
        /// Where.
        site: Site,
        /// The rank that called.
        rank: usize,
        /// What is wrong, and what would work.
        problem: String,
    },
    /// A list of ranks that is not a group.
    #[error("{ranks:?} is not a group: a group has at least one rank, and none twice")]
    BadGroup {
        /// The list.
        ranks: Vec<usize>,
    },
    /// A group that this rank cannot use.
    #[error("rank {rank} of {world} cannot use group {group}: {problem}")]
    NotMember {
        /// The rank that asked.
        rank: usize,
        /// How many ranks there are.
        world: usize,
        /// The group.
        group: String,
        /// Why it cannot.
        problem: &'static str,
    },
    /// A handle that was waited for already, or belongs to another endpoint.
    #[error(
        "rank {rank} has no call for this handle: it was already waited for, or belongs to \
        another rank"
    )]
    UnknownHandle {
        /// The rank of the endpoint.
        rank: usize,
    },
    /// The processes of a job did not come together.
    #[error("{problem}: {fix}")]
    Meeting {
        /// What is wrong, with the ranks.
        problem: String,
        /// What to do.
        fix: String,
    },
    /// The system refused something that the ranks need.
    #[error("{what}: {error}")]
    System {
        /// What was asked for.
        what: String,
        /// What the system said.
        error: String,
    },
}

/// The first thing that went wrong among the ranks of a world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} failed: {message}")]
pub struct Failure {
    /// The rank where it happened, or was noticed first.
    pub rank: usize,
    /// Its own message.
    pub message: Arc<str>,
}

/// What one rank called.
#[derive(Clone, Debug, PartialEq)]
pub struct Side {
    /// The global rank.
    pub rank: usize,
    /// What it called.
    pub kind: OpKind,
    /// How values are combined, if they are.
    pub reduction: Option<ReduceOp>,
    /// Whether the result is added to what is there.
    pub accumulate: bool,
    /// The root's or the peers' global ranks, as text; empty if there are none.
    pub peers: String,
    /// The type of elements.
    pub dtype: DType,
    /// `outer`, `rows` and `len` of a block.
    pub shape: [usize; 3],
    /// Where it was called.
    pub site: Site,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} calls {}", self.rank, self.kind)?;
        match self.reduction {
            Some(ReduceOp::Sum) => f.write_str(" sum")?,
            Some(ReduceOp::Max) => f.write_str(" max")?,
            None => {}
        }
        if self.accumulate {
            f.write_str(" added to the receiving buffer")?;
        }
        f.write_str(&self.peers)?;
        write!(f, " of {}", Data { dtype: self.dtype, shape: self.shape })?;
        write!(f, " at `{}`", self.site)
    }
}

/// `f32 x 4096` or `f32 x 2x8x512`.
struct Data {
    dtype: DType,
    shape: [usize; 3],
}

impl fmt::Display for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> =
            self.shape.iter().skip_while(|&&n| n == 1).map(usize::to_string).collect();
        let dims = if dims.is_empty() { "1".to_string() } else { dims.join("x") };
        write!(f, "{} x {dims}", self.dtype)
    }
}

/// Ranks that were waited for until the timeout.
#[derive(Clone, Debug, PartialEq)]
pub struct Missing {
    /// The rank that waited.
    pub rank: usize,
    /// The ranks that it waited for, by global rank: at least one.
    pub missing: Vec<usize>,
    /// Whether they called and never continued, or never called.
    pub arrived: bool,
    /// The group's ranks.
    pub group: Arc<str>,
    /// The index of the call in its group, from 0.
    pub sequence: u64,
    /// What the waiting rank called.
    pub call: Side,
    /// How long it waited.
    pub waited: Duration,
    /// The first missing rank and what it called last, as text.
    pub last: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.missing.iter().map(usize::to_string).collect();
        let plural = if ranks.len() > 1 { "s" } else { "" };
        let did = if self.arrived { "arrived at but never finished" } else { "never arrived at" };
        let Side { kind, dtype, shape, site, .. } = &self.call;
        let data = Data { dtype: *dtype, shape: *shape };
        write!(f, "rank{plural} {} {did} {kind} #{}", ranks.join(", "), self.sequence)?;
        write!(f, " of group {} ({data}, at `{site}`), ", self.group)?;
        write!(f, "rank {} waited {:.1} s; {}", self.rank, self.waited.as_secs_f64(), self.last)
    }
}
