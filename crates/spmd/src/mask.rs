//! Layouts in a compact form, for the inner loops of the partitioner.
//!
//! The axes of a mesh that have more than one rank are numbered; the ordered axes of a dim are then
//! the digits of one number, and a layout is a few machine words that are fast to hash and compare.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::layout::{Layout, Order, Sharding};
use phalanx_ir::{Axis, Mesh};

use crate::error::SpmdError;

/// The most axes that a mesh may have, those of one rank not counted.
const MOST: usize = 15;

/// The axes of a mesh that have more than one rank: the others have no effect.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    axes: Vec<(Axis, usize)>,
    /// For each of them, how it deals the elements of dims that it shards.
    orders: Vec<Order>,
    /// Those that are not gathered on the way from dim to dim.
    travel: u16,
    /// The others.
    single: Vec<Axis>,
}

impl Grid {
    pub(crate) fn new(mesh: &Mesh) -> Result<Self, SpmdError> {
        let axes: Vec<(Axis, usize)> = mesh.axes().filter(|&(_, n)| n > 1).collect();
        if axes.len() > MOST {
            return Err(SpmdError::TooManyAxes { mesh: mesh.to_string(), most: MOST });
        }
        let single = mesh.axes().filter(|&(_, n)| n == 1).map(|(axis, _)| axis).collect();
        let orders = vec![Order::Block; axes.len()];
        Ok(Self { axes, orders, travel: 0, single })
    }

    /// The same axes with other orders than blocks.
    pub(crate) fn ordered(mut self, orders: &BTreeMap<Axis, Order>) -> Self {
        for ((axis, _), order) in self.axes.iter().zip(&mut self.orders) {
            *order = orders.get(axis).copied().unwrap_or(Order::Block);
        }
        self
    }

    /// The same axes, of which these are not gathered on the way from dim to dim.
    pub(crate) fn travelling(mut self, travel: &BTreeSet<Axis>) -> Self {
        let own = travel.iter().filter_map(|&axis| self.index(axis));
        self.travel = own.fold(0, |set, axis| set | 1 << axis);
        self
    }

    /// Whether one of these axes, which the target of a move has too, may not be gathered.
    pub(crate) fn travels(&self, axes: Axes, wanted: u16) -> bool {
        axes.set() & wanted & self.travel != 0
    }

    /// The order of a dim that is sharded by these axes: that of the major one.
    pub(crate) fn order(&self, axes: Axes) -> Order {
        axes.iter().next().map_or(Order::Block, |major| self.orders[major])
    }

    /// Whether one of these axes has an order of its own.
    pub(crate) fn deals(&self, axes: Axes) -> bool {
        axes.iter().any(|axis| self.orders[axis] != Order::Block)
    }

    /// These axes with one that has an order of its own in front: there it must be.
    pub(crate) fn led(&self, axes: Axes) -> Axes {
        let dealt = |a: &usize| self.orders[*a] != Order::Block;
        Axes::of(axes.iter().filter(dealt).chain(axes.iter().filter(|a| !dealt(a))))
    }

    /// Into how many parts of equal size these axes cut a dim: in zigzag order a shard has two.
    pub(crate) fn parts(&self, axes: Axes) -> usize {
        let count = self.count(axes);
        if self.order(axes) == Order::Zigzag { 2 * count } else { count }
    }

    /// Whether a dim can go from one list of axes to another in one move. In other orders than by
    /// blocks axes are only added to the list or taken off it, and in striped order all at once.
    pub(crate) fn goes(&self, from: Axes, to: Axes) -> bool {
        let orders = |axes: Axes| axes.iter().map(|a| self.orders[a]).collect::<Vec<_>>();
        let dealt = |axes: Axes| orders(axes).into_iter().any(|order| order != Order::Block);
        if from == to || !(dealt(from) || dealt(to)) {
            return true;
        }
        // Only the major axis may have an order of its own.
        let legal = |axes: Axes| orders(axes).into_iter().skip(1).all(|o| o == Order::Block);
        let (short, long) = if from.len() < to.len() { (from, to) } else { (to, from) };
        let prefix = long.without_suffix(long.len() - short.len()) == short;
        let partly = short.is_empty() || self.order(long) == Order::Zigzag;
        legal(from) && legal(to) && prefix && partly
    }

    pub(crate) fn len(&self) -> usize {
        self.axes.len()
    }

    pub(crate) fn size(&self, axis: usize) -> usize {
        self.axes[axis].1
    }

    pub(crate) fn name(&self, axis: usize) -> Axis {
        self.axes[axis].0
    }

    /// The index of an axis; none if it has one rank.
    pub(crate) fn index(&self, axis: Axis) -> Option<usize> {
        let found = self.axes.iter().position(|&(a, _)| a == axis);
        assert!(found.is_some() || self.single.contains(&axis), "no axis `{axis}` in {self:?}");
        found
    }

    /// How many blocks a dim sharded by these axes has.
    pub(crate) fn count(&self, axes: Axes) -> usize {
        axes.iter().map(|a| self.size(a)).product()
    }

    /// Every axis, as a set.
    pub(crate) fn all(&self) -> u16 {
        (1u16 << self.axes.len()) - 1
    }

    /// The layout in the form that programs have.
    pub(crate) fn layout(&self, lay: &MaskLayout) -> Layout {
        let sharding = |axes: &Axes| Sharding {
            axes: axes.iter().map(|a| self.name(a)).collect(),
            order: self.order(*axes),
            turn: 0,
        };
        let dims = lay.dims.iter().map(sharding).collect();
        let partial: BTreeSet<Axis> = bits(lay.partial).map(|a| self.name(a)).collect();
        Layout::new(dims, partial).expect("with one choice per axis, an axis occurs only once")
    }
}

/// The members of a set of axes.
pub(crate) fn bits(set: u16) -> impl Iterator<Item = usize> {
    (0..16).filter(move |a| set >> a & 1 == 1)
}

/// An ordered list of axes, major to minor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Axes(u64);

impl Axes {
    pub(crate) fn of(axes: impl IntoIterator<Item = usize>) -> Self {
        axes.into_iter().fold(Self::default(), Self::with)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        (64 - self.0.leading_zeros() as usize).div_ceil(4)
    }

    /// The list with one more axis at the minor end.
    pub(crate) fn with(self, axis: usize) -> Self {
        Self(self.0 << 4 | (axis as u64 + 1))
    }

    pub(crate) fn join(self, minor: Self) -> Self {
        Self(self.0 << (4 * minor.len()) | minor.0)
    }

    pub(crate) fn iter(self) -> impl DoubleEndedIterator<Item = usize> {
        (0..self.len()).rev().map(move |i| (self.0 >> (4 * i) & 15) as usize - 1)
    }

    pub(crate) fn contains(self, axis: usize) -> bool {
        self.iter().any(|a| a == axis)
    }

    pub(crate) fn set(self) -> u16 {
        self.iter().fold(0, |set, a| set | 1 << a)
    }

    /// The `n` minor axes.
    pub(crate) fn suffix(self, n: usize) -> Self {
        if n >= 16 { self } else { Self(self.0 & ((1 << (4 * n)) - 1)) }
    }

    /// All but the `n` minor axes.
    pub(crate) fn without_suffix(self, n: usize) -> Self {
        Self(self.0 >> (4 * n))
    }

    /// The axes of a set, in their order here.
    pub(crate) fn only(self, set: u16) -> Self {
        Self::of(self.iter().filter(|a| set >> a & 1 == 1))
    }

    /// The axes major to this one.
    pub(crate) fn before(self, axis: usize) -> Self {
        Self::of(self.iter().take_while(|&a| a != axis))
    }
}

impl std::fmt::Debug for Axes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// For every dim its axes, and the set of axes over which the value is a partial sum.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub(crate) struct MaskLayout {
    pub(crate) dims: Vec<Axes>,
    pub(crate) partial: u16,
}

impl MaskLayout {
    /// The axes that shard a dim.
    pub(crate) fn sharded(&self) -> u16 {
        self.dims.iter().fold(0, |set, d| set | d.set())
    }

    /// How many ranks share the elements.
    pub(crate) fn shards(&self, grid: &Grid) -> usize {
        self.dims.iter().map(|&d| grid.count(d)).product()
    }

    /// Whether the shards divide a shape.
    pub(crate) fn divides(&self, grid: &Grid, padded: &[usize]) -> bool {
        self.dims.iter().zip(padded).all(|(&d, n)| n.is_multiple_of(grid.parts(d)))
    }
}

/// What one axis does to a value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum State {
    Replicated,
    Partial,
    Sharded(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_lists() {
        let axes = Axes::of([3, 0, 2]);
        assert_eq!((axes.len(), axes.iter().collect::<Vec<_>>()), (3, vec![3, 0, 2]));
        assert_eq!(axes.suffix(2), Axes::of([0, 2]));
        assert_eq!(axes.without_suffix(2), Axes::of([3]));
        assert_eq!(axes.without_suffix(1).join(axes.suffix(1)), axes);
        assert_eq!(axes.only(0b1100), Axes::of([3, 2]));
        assert_eq!(axes.before(2), Axes::of([3, 0]));
        assert!(Axes::default().is_empty() && axes.contains(0) && !axes.contains(1));
        let full = Axes::of(0..15);
        assert_eq!((full.len(), full.suffix(15)), (15, full));
    }
}
