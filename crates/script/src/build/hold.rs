//! What a rank keeps of each unit between steps.

use std::ops::Range;

use phalanx_ir::DType;

use phalanx_spmd::{Reduction, Share};

use super::{Buffer, BufferId, Category, Optimizer, Precision, RankOnMesh, Script, Source, Unit};
use crate::factored::StateOf;
use crate::key::{BufferKey, StateKind};
use crate::unit::Member;

/// Elements of a unit that a buffer holds, and their type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldRange {
    /// The buffer.
    pub buffer: BufferId,
    /// Which elements of the rank's unit.
    pub elements: Range<usize>,
    /// Where in the buffer the first of them lies, in elements.
    pub at: usize,
    /// Their type.
    pub dtype: DType,
    /// What they belong to: where not to elements of the unit, they are all of its rows or columns.
    pub of: StateOf,
}

impl HeldRange {
    /// The part of a member that the buffer holds: which of the member's elements, and where they
    /// lie in the buffer.
    pub fn part(&self, member: &Member) -> (Range<usize>, usize) {
        let [first, count] = match self.of {
            StateOf::Elements => return self.part_of_elements(member),
            StateOf::Rows => member.rows,
            StateOf::Columns => member.columns,
        };
        (0..count, self.at + first)
    }

    fn part_of_elements(&self, member: &Member) -> (Range<usize>, usize) {
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
    pub weights: HeldRange,
    /// The same as it was one update ago, two updates ago, and so on, if runs still read it.
    pub older: Vec<HeldRange>,
    /// The weights that the next step probably reads, if it does not wait for the norm; between blocks of steps it
    /// holds nothing that counts.
    pub preview: Option<HeldRange>,
    /// The gradient as the update reads it, if the unit is trained.
    pub gradient: Option<HeldRange>,
    /// If weights are narrow: the wide copy that is updated; or, in u16, only its lower halves, because the weights are the
    /// upper halves.
    pub master: Option<HeldRange>,
    /// Moments or momentum; like the wide copy, only where this rank updates the unit.
    pub states: Vec<HeldRange>,
}

impl UnitBuffers {
    /// The kept part of one kind of state, if there is one.
    pub fn get(&self, kind: StateKind) -> Option<&HeldRange> {
        match kind {
            StateKind::Weights => Some(&self.weights),
            StateKind::Older(age) => self.older.get(age.checked_sub(1)?),
            StateKind::Preview => self.preview.as_ref(),
            StateKind::Gradient => self.gradient.as_ref(),
            StateKind::Master => self.master.as_ref(),
            StateKind::Optimizer(number) => self.states.get(number),
        }
    }

    /// Whether this rank has the gradient of a part of the unit, or of all: otherwise another one updates it.
    pub(crate) fn is_updated(&self) -> bool {
        self.gradient.as_ref().is_none_or(|gradient| !gradient.elements.is_empty())
    }

    /// Everything that is kept between blocks of steps.
    pub fn all(&self) -> impl Iterator<Item = (StateKind, &HeldRange)> {
        let optimizer = (0..self.states.len()).map(StateKind::Optimizer);
        let older = (1..=self.older.len()).map(StateKind::Older);
        let kinds = [StateKind::Weights, StateKind::Gradient, StateKind::Master];
        let kinds = kinds.into_iter().chain(older).chain(optimizer);
        kinds.filter_map(|kind| self.get(kind).map(|held| (kind, held)))
    }

    /// The buffer of the weights that are so many updates old.
    pub(super) fn aged(&self, age: usize) -> BufferId {
        let held = age.checked_sub(1).map_or(&self.weights, |index| &self.older[index]);
        held.buffer
    }

    /// The gradient of a unit that is trained.
    pub(super) fn trained(&self) -> &HeldRange {
        self.gradient.as_ref().expect("a unit that is trained has a gradient")
    }
}

/// The part of a unit that a rank keeps where the unit is in shards.
pub(super) fn own(unit: &Unit, ranks: RankOnMesh<'_>) -> Range<usize> {
    let axes = &unit.facts.axes;
    let size = unit.elements / ranks.mesh.count(axes);
    let shard = ranks.mesh.shard(ranks.rank, axes);
    shard * size..(shard + 1) * size
}

/// Buffers for what a rank keeps of each unit that is trained, of whose weights so many older versions are kept.
pub(super) fn buffers(
    script: &mut Script,
    (units, kept, previews): (&[Unit], &[usize], bool),
    precision: Precision,
    optimizer: Optimizer,
    ranks: RankOnMesh<'_>,
) -> Vec<UnitBuffers> {
    let mut found = Vec::with_capacity(units.len());
    for (number, unit) in units.iter().enumerate() {
        let mut keeper = Keeper { script, unit, number, ranks };
        let weights = keeper.keep(StateKind::Weights, precision.weights);
        let older = (1..=kept[number]).map(StateKind::Older);
        let older = older.map(|kind| keeper.keep(kind, precision.weights)).collect();
        let preview = previews.then(|| keeper.keep(StateKind::Preview, precision.weights));
        let mut gradient = keeper.keep(StateKind::Gradient, precision.grads);
        // Reduced in place, a whole gradient is complete in the part that this rank updates.
        if unit.facts.reduction == Reduction::OwnPart {
            let own = own(unit, ranks);
            (gradient.at, gradient.elements) = (own.start, own);
        }
        let updates = unit.updates(ranks);
        if !updates {
            // What lies there is not the unit's gradient, which another rank has.
            gradient.elements = 0..0;
        }
        let dtype = precision.state;
        let has_master = updates && precision.has_masters();
        let master = has_master.then(|| keeper.keep(StateKind::Master, precision.masters()));
        let states = (0..optimizer.states()).filter(|_| updates).map(|i| {
            let kind = StateKind::Optimizer(i);
            match optimizer.state_of(i) {
                StateOf::Elements => keeper.keep(kind, dtype),
                of => keeper.keep_all(kind, dtype, of),
            }
        });
        let states = states.collect();
        found.push(UnitBuffers {
            weights,
            older,
            preview,
            gradient: Some(gradient),
            master,
            states,
        });
    }
    found
}

/// Buffers for the weights of each unit, where nothing is trained.
pub(super) fn weights(
    script: &mut Script,
    units: &[Unit],
    dtype: DType,
    ranks: RankOnMesh<'_>,
) -> Vec<UnitBuffers> {
    let units = units.iter().enumerate();
    let keep = |(number, unit)| {
        let weights = Keeper { script, unit, number, ranks }.keep(StateKind::Weights, dtype);
        let (older, states) = (Vec::new(), Vec::new());
        UnitBuffers { weights, older, preview: None, gradient: None, master: None, states }
    };
    units.map(keep).collect()
}

/// Makes the buffers of one unit that outlive scripts.
struct Keeper<'a> {
    script: &'a mut Script,
    unit: &'a Unit,
    number: usize,
    ranks: RankOnMesh<'a>,
}

impl Keeper<'_> {
    /// A buffer for as much of the unit as its facts say.
    fn keep(&mut self, kind: StateKind, dtype: DType) -> HeldRange {
        let (unit, facts) = (self.unit, &self.unit.facts);
        let (kept, category, unwritten) = match kind {
            StateKind::Weights | StateKind::Older(_) | StateKind::Preview => {
                (facts.weights, Category::Weights, unit.padding(dtype))
            }
            StateKind::Gradient => {
                (facts.gradient, Category::Gradients, unit.without_gradient(dtype))
            }
            StateKind::Master | StateKind::Optimizer(_) => {
                (facts.state, Category::Optimizer, unit.padding(dtype))
            }
        };
        let elements = match kept.share {
            Share::Whole | Share::Root => 0..unit.elements,
            Share::Shard => own(unit, self.ranks),
        };
        let bytes = |n: usize| n * dtype.size();
        let (start, end) = (bytes(elements.start), bytes(elements.end));
        let padding = (unwritten.into_iter())
            .map(|gap| gap.start.clamp(start, end) - start..gap.end.clamp(start, end) - start)
            .filter(|gap| !gap.is_empty());
        let buffer = self.script.buffer(Buffer {
            key: BufferKey::state(self.number, kind),
            category,
            bytes: bytes(elements.len()),
            source: Source::State,
            tier: kept.tier,
            padding: padding.collect(),
        });
        HeldRange { buffer, elements, at: 0, dtype, of: StateOf::Elements }
    }

    /// A buffer for a number of each row, or of each column.
    fn keep_all(&mut self, kind: StateKind, dtype: DType, of: StateOf) -> HeldRange {
        let [rows, columns] = self.unit.factors.totals();
        let count = if of == StateOf::Rows { rows } else { columns };
        let buffer = self.script.buffer(Buffer {
            key: BufferKey::state(self.number, kind),
            category: Category::Optimizer,
            bytes: count * dtype.size(),
            source: Source::State,
            tier: self.unit.facts.state.tier,
            padding: vec![],
        });
        HeldRange { buffer, elements: 0..count, at: 0, dtype, of }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_holds_parts_of_members() {
        let held = |elements, at| HeldRange {
            buffer: BufferId(0),
            elements,
            at,
            dtype: DType::F32,
            of: StateOf::Elements,
        };
        let (rows, columns) = ([7, 4], [9, 5]);
        let member = Member { param: 0, offset: 10, elements: 20, trained: true, rows, columns };
        assert_eq!(held(0..40, 0).part(&member), (0..20, 10));
        assert_eq!(held(16..32, 0).part(&member), (6..20, 0));
        assert_eq!(held(16..32, 16).part(&member), (6..20, 16));
        assert_eq!(held(0..16, 0).part(&member), (0..6, 10));
        assert!(held(32..48, 0).part(&member).0.is_empty());
        assert!(held(0..8, 0).part(&member).0.is_empty());
        assert_eq!(HeldRange { of: StateOf::Rows, ..held(0..30, 0) }.part(&member), (0..4, 7));
        assert_eq!(HeldRange { of: StateOf::Columns, ..held(0..30, 0) }.part(&member), (0..5, 9));
    }
}
