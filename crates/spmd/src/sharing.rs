//! How the ranks that hold the same parameters share them.
//!
//! Along a data-parallel axis every rank needs the same weights and computes its own summand of the
//! gradient. Each may keep everything and sum gradients, or keep shards of optimizer state,
//! gradients and weights, and gather what it needs while it needs it. A strategy states this once
//! ([`Sharing`]); resolved for a unit it is [`UnitFacts`], and scripts read only these.

use phalanx_call::Tier;
use phalanx_ir::{Axis, Mesh};

use crate::error::SpmdError;

/// Which parameters are packed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grouping {
    /// The parameters of `per_unit` consecutive instances of a repeated segment; of any other
    /// segment, the parameters of one instance.
    Segments {
        /// How many, at least one.
        per_unit: usize,
    },
    /// In the order in which their gradients complete, up to a number of bytes of gradients.
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
    /// Like [`Keep::Run`], but units of segments that are not repeated are kept for the backward:
    /// they are needed again soon.
    Root,
    /// From a micro-batch's forward until its backward has ended.
    Backward,
}

/// How much of a unit a rank keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Share {
    /// All of it.
    Whole,
    /// One of the equal parts that ranks divide it into.
    Shard,
    /// All of it on the first rank along the axes, and nothing on the others.
    Root,
}

/// How a rank keeps one kind of a unit's state from step to step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// How much of it.
    pub share: Share,
    /// In which memory.
    pub tier: Tier,
}

impl Kept {
    /// All of it, where programs run.
    pub const WHOLE: Self = Self { share: Share::Whole, tier: Tier::Device };
    /// A shard, where programs run.
    pub const SHARD: Self = Self { share: Share::Shard, tier: Tier::Device };
    /// All of it on the first rank, where programs run.
    pub const ROOT: Self = Self { share: Share::Root, tier: Tier::Device };

    /// Whether it is a part of the unit.
    pub fn is_shard(&self) -> bool {
        self.share == Share::Shard
    }
}

/// When ranks gather the shards of a unit's weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gathering {
    /// Never: every rank updates all of them.
    Never,
    /// After the update, because every rank keeps all of them and updates a part, or one rank updates
    /// all.
    AfterUpdate,
    /// For the runs that read them.
    ForRuns {
        /// How many runs ahead they are gathered.
        prefetch: usize,
        /// The units of at most this many runs are gathered at a time; a later gather waits for a
        /// release.
        in_flight: usize,
        /// How long they are kept.
        keep: Keep,
    },
}

/// When the ranks' gradients are summed, and into what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduction {
    /// After the last contribution of a step: every rank gets the whole sum.
    Whole,
    /// After the last contribution: each rank gets its part of the sum, in its place in the whole.
    OwnPart,
    /// After the last contribution: the first rank along the axes gets the whole sum.
    OnRoot,
    /// After each micro-batch: its gradient is summed into the shard in which a rank accumulates.
    IntoShard,
}

/// What is kept of a unit, and when ranks exchange it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitFacts {
    /// The axes that shard the unit, major to minor. None of them shards the unit's parameters
    /// themselves.
    pub axes: Vec<Axis>,
    /// Weights as programs read them.
    pub weights: Kept,
    /// The gradient that the update reads.
    pub gradient: Kept,
    /// The optimizer's state, including master weights.
    pub state: Kept,
    /// When weights are gathered.
    pub gathering: Gathering,
    /// When gradients are summed.
    pub reduction: Reduction,
    /// The most elements that one call of a reduction takes.
    pub reduce_elements: usize,
    /// The most elements that one call of a gather produces.
    pub gather_elements: usize,
}

impl UnitFacts {
    /// Every rank keeps everything.
    pub const fn replicated() -> Self {
        Self {
            axes: Vec::new(),
            weights: Kept::WHOLE,
            gradient: Kept::WHOLE,
            state: Kept::WHOLE,
            gathering: Gathering::Never,
            reduction: Reduction::Whole,
            reduce_elements: usize::MAX,
            gather_elements: usize::MAX,
        }
    }

    /// Whether the rank at a place of a mesh updates what it holds, or another rank does so for it.
    pub fn updates(&self, mesh: &Mesh, place: usize) -> bool {
        self.state.share != Share::Root || mesh.shard(place, &self.axes) == 0
    }
}

/// How ranks share units.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sharing {
    /// Which parameters are packed together.
    pub grouping: Grouping,
    /// The facts of a unit whose parameters are not sharded by these axes.
    facts: UnitFacts,
    /// The strategy that set it.
    by: Option<&'static str>,
}

impl Sharing {
    /// Every rank keeps everything; one unit per segment.
    pub const fn none() -> Self {
        Self {
            grouping: Grouping::Segments { per_unit: 1 },
            facts: UnitFacts::replicated(),
            by: None,
        }
    }

    /// One unit per segment, with these facts. Without axes nothing is sharded.
    pub fn over(facts: UnitFacts) -> Self {
        match facts.axes.is_empty() {
            true => Self::none(),
            false => Self { facts, ..Self::none() },
        }
    }

    /// Sets everything, for one strategy; a second strategy is an error.
    pub fn set(&mut self, by: &'static str, sharing: Self) -> Result<(), SpmdError> {
        match self.by {
            Some(first) => Err(SpmdError::Sharing { first, second: by }),
            None => {
                *self = Self { by: Some(by), ..sharing };
                Ok(())
            }
        }
    }

    /// The facts of units whose parameters are not sharded.
    pub fn facts(&self) -> &UnitFacts {
        &self.facts
    }

    /// The facts of a unit whose parameters these axes shard. Ranks along them hold different
    /// blocks, so only the other axes shard the unit; if none is left, each rank keeps its whole
    /// block.
    pub fn unit(&self, blocks: &[Axis]) -> UnitFacts {
        let mut facts = self.facts.clone();
        facts.axes.retain(|axis| !blocks.contains(axis));
        match facts.axes.is_empty() {
            true => UnitFacts::replicated(),
            false => facts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As with experts, whose weights the batch's axis shards: the unit is sharded by the rest of
    /// that axis.
    #[test]
    fn shards_are_dealt_over_axes_that_do_not_cut_the_unit() {
        let [dp, ep] = ["dp", "ep"].map(|name| Axis::new(name).unwrap());
        let facts = UnitFacts {
            axes: vec![dp, ep],
            state: Kept::SHARD,
            gathering: Gathering::AfterUpdate,
            reduction: Reduction::OwnPart,
            ..UnitFacts::replicated()
        };
        let sharing = Sharing::over(facts.clone());
        assert_eq!(sharing.unit(&[]), facts);
        assert_eq!(sharing.unit(&[ep]), UnitFacts { axes: vec![dp], ..facts });
        assert_eq!(sharing.unit(&[dp, ep]), UnitFacts::replicated());
    }
}
