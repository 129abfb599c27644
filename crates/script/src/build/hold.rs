//! What a rank keeps of each unit between steps.

use std::ops::Range;

use phalanx_ir::DType;

use super::{
    Buffer, BufferId, Category, Optimizer, Precision, Ranks, Script, Sharded, Source, Unit,
};
use crate::unit::Member;

/// Elements of a unit that a buffer holds, in a type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    /// The buffer.
    pub buffer: BufferId,
    /// Which elements of the rank's unit.
    pub elements: Range<usize>,
    /// Where in the buffer the first of them lies, in elements.
    pub at: usize,
    /// Their type.
    pub dtype: DType,
}

impl Held {
    /// The part of a member that the buffer holds: which of the member's elements, and where they
    /// lie in the buffer.
    pub fn part(&self, member: &Member) -> (Range<usize>, usize) {
        let start = member.offset.clamp(self.elements.start, self.elements.end);
        let end = member.offset + member.elements;
        let end = end.clamp(self.elements.start, self.elements.end);
        (start - member.offset.min(start)..end.max(start) - member.offset.min(start), {
            start - self.elements.start + self.at
        })
    }
}

/// The buffers of one unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnitBuffers {
    /// What programs read, or its shard.
    pub weights: Held,
    /// The gradient as the update reads it.
    pub gradient: Held,
    /// The wide copy that is updated, if weights are narrow.
    pub master: Option<Held>,
    /// Moments or momentum.
    pub states: Vec<Held>,
}

/// The part of a unit that a rank keeps where the unit is in shards.
pub(super) fn own(unit: &Unit, ranks: Ranks<'_>) -> Range<usize> {
    let axes = ranks.sharing.axes();
    let size = unit.elements / ranks.mesh.count(axes);
    let shard = ranks.mesh.shard(ranks.rank, axes);
    shard * size..(shard + 1) * size
}

pub(super) fn buffers(
    script: &mut Script,
    units: &[Unit],
    precision: Precision,
    optimizer: Optimizer,
    ranks: Ranks<'_>,
) -> Vec<UnitBuffers> {
    let sharded = ranks.sharing.sharded();
    let weights = weights(script, units, precision.weights, ranks);
    (units.iter().zip(weights))
        .map(|(unit, weights)| {
            let all = 0..unit.elements;
            let own = own(unit, ranks);
            let part = |from: Sharded| if sharded >= from { own.clone() } else { all.clone() };
            let gradients = part(Sharded::Gradients);
            let mut gradient =
                keep(script, unit, "gradient", Category::Gradients, precision.grads, gradients);
            // Reduced in place, a whole gradient is complete in the part that this rank updates.
            if sharded == Sharded::State {
                (gradient.at, gradient.elements) = (own.start, own.clone());
            }
            let mut state = |what: &str| {
                let part = part(Sharded::State);
                keep(script, unit, what, Category::Optimizer, precision.state, part)
            };
            UnitBuffers {
                weights,
                gradient,
                master: precision.has_masters().then(|| state("master")),
                states: (0..optimizer.states()).map(|i| state(&format!("state{i}"))).collect(),
            }
        })
        .collect()
}

/// The weights of each unit.
pub(super) fn weights(
    script: &mut Script,
    units: &[Unit],
    dtype: DType,
    ranks: Ranks<'_>,
) -> Vec<Held> {
    (units.iter())
        .map(|unit| {
            let part = match ranks.sharing.sharded() {
                Sharded::Weights => own(unit, ranks),
                _ => 0..unit.elements,
            };
            keep(script, unit, "weights", Category::Weights, dtype, part)
        })
        .collect()
}

/// A buffer with a place for some elements of a unit, which outlives the script.
fn keep(
    script: &mut Script,
    unit: &Unit,
    what: &str,
    category: Category,
    dtype: DType,
    elements: Range<usize>,
) -> Held {
    let bytes = |n: usize| n * dtype.size();
    let (start, end) = (bytes(elements.start), bytes(elements.end));
    let unwritten = match category {
        Category::Gradients => unit.without_gradient(dtype),
        _ => unit.padding(dtype),
    };
    let padding = (unwritten.into_iter())
        .map(|gap| gap.start.clamp(start, end) - start..gap.end.clamp(start, end) - start)
        .filter(|gap| !gap.is_empty());
    let buffer = script.buffer(Buffer {
        name: format!("{}/{what}", unit.name),
        category,
        bytes: bytes(elements.len()),
        source: Source::State,
        tier: Default::default(),
        padding: padding.collect(),
    });
    Held { buffer, elements, at: 0, dtype }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_holds_parts_of_members() {
        let held = |elements, at| Held { buffer: BufferId(0), elements, at, dtype: DType::F32 };
        let member = Member { param: 0, offset: 10, elements: 20, trained: true };
        assert_eq!(held(0..40, 0).part(&member), (0..20, 10));
        assert_eq!(held(16..32, 0).part(&member), (6..20, 0));
        assert_eq!(held(16..32, 16).part(&member), (6..20, 16));
        assert_eq!(held(0..16, 0).part(&member), (0..6, 10));
        assert!(held(32..48, 0).part(&member).0.is_empty());
        assert!(held(0..8, 0).part(&member).0.is_empty());
    }
}
