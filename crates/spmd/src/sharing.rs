//! How the ranks that hold the same parameters share them.
//!
//! Along a data-parallel axis every rank needs the same weights and forms its own share of the
//! gradient. Each may keep everything and sum gradients ([`Sharded::Nothing`]), or keep a shard of
//! the optimizer's state, of the gradients and of the weights, and gather what it needs for as long
//! as it needs it. Strategies fill in this page; the script is made from it.

use phalanx_ir::Axis;

use crate::error::SpmdError;

/// What is kept in shards, one per rank; each includes what comes before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Sharded {
    /// Every rank keeps everything.
    #[default]
    Nothing,
    /// Optimizer state: gradients are reduced into shards, and the new weights are gathered.
    State,
    /// Gradients as well: what a micro-batch forms is reduced at once.
    Gradients,
    /// Weights as well: they are gathered for the runs that read them.
    Weights,
}

/// Which parameters lie together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grouping {
    /// Those of one segment instance.
    Segments,
    /// In the order in which their gradients complete, up to so many bytes of gradients.
    Buckets {
        /// Bytes after which the bucket that is reduced first is closed.
        first: usize,
        /// Bytes after which any other is closed.
        cap: usize,
    },
}

/// How long a gathered unit is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Keep {
    /// Until the run that reads it ends; its backward gathers it again.
    #[default]
    Run,
    /// As [`Keep::Run`], but what belongs to no repeated segment stays for its backward: it is
    /// needed again soon.
    Root,
    /// From a micro-batch's forward until its backward has ended.
    Backward,
}

/// How ranks share units.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sharing {
    axes: Vec<Axis>,
    sharded: Sharded,
    /// The strategy that said so.
    by: Option<&'static str>,
    /// Which parameters lie together.
    pub grouping: Grouping,
    /// How many runs ahead a unit is gathered.
    pub prefetch: usize,
    /// How many runs' units are gathered at most at a time; a later gather waits for a release.
    pub in_flight: usize,
    /// How long a gathered unit is kept.
    pub keep: Keep,
    /// The most elements that one reduction of a unit takes.
    pub reduce_elements: usize,
    /// The most elements that one gather of a unit makes.
    pub gather_elements: usize,
}

impl Sharing {
    /// Every rank keeps everything; one unit per segment.
    pub const fn none() -> Self {
        Self {
            sharded: Sharded::Nothing,
            axes: Vec::new(),
            by: None,
            grouping: Grouping::Segments,
            prefetch: 1,
            in_flight: 2,
            keep: Keep::Run,
            reduce_elements: usize::MAX,
            gather_elements: usize::MAX,
        }
    }

    /// Shards over these axes, major to minor. Without axes nothing is in shards.
    pub fn over(sharded: Sharded, axes: Vec<Axis>) -> Self {
        match sharded == Sharded::Nothing || axes.is_empty() {
            true => Self::none(),
            false => Self { sharded, axes, ..Self::none() },
        }
    }

    /// Sets everything in the name of a strategy. Only one can.
    pub fn set(&mut self, by: &'static str, sharing: Self) -> Result<(), SpmdError> {
        match self.by {
            Some(first) => Err(SpmdError::Sharing { first, second: by }),
            None => {
                *self = Self { by: Some(by), ..sharing };
                Ok(())
            }
        }
    }

    /// The axes over which shards are dealt, major to minor.
    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// What is in shards.
    pub fn sharded(&self) -> Sharded {
        self.sharded
    }
}
