//! Finds the cheapest sequence of collectives from one layout to another.
//!
//! Layouts are nodes of a graph, collectives its edges; the sequence is a shortest path, found once
//! for each pair and cached. Only useful moves are tried: axes that are replicated at both ends are
//! not used (else a value would be sliced by an unrelated axis and gathered back), and sums are
//! scattered only in the order that the target has.

use std::collections::{BinaryHeap, HashMap};

use phalanx_ir::ops::CollectiveKind;

use crate::cost::Costs;
use crate::mask::{Axes, Grid, MaskLayout, bits};

/// A collective, and the layout it leads to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Move {
    pub(crate) kind: CollectiveKind,
    pub(crate) axes: Axes,
    pub(crate) to: MaskLayout,
}

/// A sequence of moves and its cost in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) cost: f64,
    pub(crate) moves: Vec<Move>,
}

type Key = (MaskLayout, MaskLayout, Vec<usize>, usize);

/// The layouts reached so far: at what cost, and by which move from where.
type Found = HashMap<MaskLayout, (f64, Option<(MaskLayout, Move)>)>;

/// Finds sequences of collectives, each once.
#[derive(Debug)]
pub(crate) struct Resharder<'a> {
    grid: &'a Grid,
    costs: &'a Costs,
    known: HashMap<Key, Option<Way>>,
}

impl<'a> Resharder<'a> {
    pub(crate) fn new(grid: &'a Grid, costs: &'a Costs) -> Self {
        Self { grid, costs, known: HashMap::new() }
    }

    /// The cheapest sequence from one layout of a value to another, if there is one.
    pub(crate) fn way(
        &mut self,
        from: &MaskLayout,
        to: &MaskLayout,
        padded: &[usize],
        width: usize,
    ) -> Option<&Way> {
        let key = (from.clone(), to.clone(), padded.to_vec(), width);
        let (grid, costs) = (self.grid, self.costs);
        let search = |key: &Key| Search { grid, costs, to: &key.1, padded, width }.run(&key.0);
        if !self.known.contains_key(&key) {
            let way = search(&key);
            self.known.insert(key.clone(), way);
        }
        self.known.get(&key).and_then(Option::as_ref)
    }

    /// Only its cost; infinite for an unreachable layout.
    pub(crate) fn cost(
        &mut self,
        from: &MaskLayout,
        to: &MaskLayout,
        padded: &[usize],
        width: usize,
    ) -> f64 {
        if from == to {
            0.0
        } else {
            self.way(from, to, padded, width).map_or(f64::INFINITY, |w| w.cost)
        }
    }
}

struct Search<'a> {
    grid: &'a Grid,
    costs: &'a Costs,
    to: &'a MaskLayout,
    padded: &'a [usize],
    width: usize,
}

/// A layout to look at next; the cheapest comes first out of the heap.
struct Next {
    cost: f64,
    order: usize,
    lay: MaskLayout,
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Next {}
impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Next {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // The heap returns the greatest; ties go to the earlier find, so that results are
        // reproducible.
        other.cost.total_cmp(&self.cost).then(other.order.cmp(&self.order))
    }
}

impl Search<'_> {
    fn run(&self, from: &MaskLayout) -> Option<Way> {
        let mut found: Found = HashMap::new();
        let mut heap = BinaryHeap::new();
        found.insert(from.clone(), (0.0, None));
        heap.push(Next { cost: 0.0, order: 0, lay: from.clone() });
        let mut order = 0;
        while let Some(Next { cost, lay, .. }) = heap.pop() {
            if lay == *self.to {
                return Some(Way { cost, moves: path(&found, &lay) });
            }
            if cost > found[&lay].0 {
                continue;
            }
            for step in self.moves(from, &lay) {
                if !step.to.divides(self.grid, self.padded) || !self.possible(&lay, &step) {
                    continue;
                }
                let total = cost + self.price(&lay, &step);
                if found.get(&step.to).is_none_or(|(known, _)| total < known - 1e-15) {
                    order += 1;
                    heap.push(Next { cost: total, order, lay: step.to.clone() });
                    found.insert(step.to.clone(), (total, Some((lay.clone(), step))));
                }
            }
        }
        None
    }

    /// Whether orders allow a move. Axes don't move from dim to dim where one of them has an order.
    fn possible(&self, lay: &MaskLayout, step: &Move) -> bool {
        let changes = || lay.dims.iter().zip(&step.to.dims).filter(|(from, to)| from != to);
        let dealt = |axes: Axes| self.grid.order(axes) != phalanx_ir::Order::Block;
        let moves = matches!(step.kind, CollectiveKind::AllToAll { .. });
        let gathers = matches!(step.kind, CollectiveKind::AllGather { .. });
        if gathers && self.grid.travels(step.axes, self.to.sharded()) {
            return false;
        }
        changes()
            .all(|(&from, &to)| self.grid.goes(from, to) && !(moves && (dealt(from) || dealt(to))))
    }

    fn price(&self, lay: &MaskLayout, step: &Move) -> f64 {
        let elements: usize = self.padded.iter().product();
        let bytes = (elements / lay.shards(self.grid) * self.width) as f64;
        self.costs.collective(&step.kind, self.grid.count(step.axes), bytes)
    }

    fn moves(&self, from: &MaskLayout, lay: &MaskLayout) -> Vec<Move> {
        let mut all = Vec::new();
        let (used, wanted) = (lay.sharded() | lay.partial, self.to.sharded() | self.to.partial);
        let ends = wanted | from.sharded() | from.partial;
        let free = ends & !used;
        self.unshard(lay, &mut all);
        self.sum(lay, &mut all);
        for axis in bits(free) {
            let axes = Axes::of([axis]);
            for dim in 0..lay.dims.len() {
                let to = with_dim(lay, dim, lay.dims[dim].with(axis));
                all.push(Move { kind: CollectiveKind::Shard { dim }, axes, to });
            }
            if self.to.partial >> axis & 1 == 1 {
                let to = MaskLayout { partial: lay.partial | 1 << axis, ..lay.clone() };
                all.push(Move { kind: CollectiveKind::ToPartial, axes, to });
            }
        }
        // Several axes at the minor end of a dim in the target become one slice.
        for (dim, &target) in self.to.dims.iter().enumerate() {
            for n in 2..=target.len() {
                let axes = target.suffix(n);
                if axes.set() & !free == 0 {
                    let to = with_dim(lay, dim, lay.dims[dim].join(axes));
                    all.push(Move { kind: CollectiveKind::Shard { dim }, axes, to });
                }
            }
        }
        all
    }

    /// Gathers, all-to-alls between dims, and permutations of a dim's axes.
    fn unshard(&self, lay: &MaskLayout, all: &mut Vec<Move>) {
        for (dim, &axes) in lay.dims.iter().enumerate() {
            for n in 1..=axes.len() {
                let (rest, moved) = (axes.without_suffix(n), axes.suffix(n));
                let without = with_dim(lay, dim, rest);
                for to in (0..lay.dims.len()).filter(|&to| to != dim) {
                    let there = with_dim(&without, to, without.dims[to].join(moved));
                    let kind = CollectiveKind::AllToAll { from: dim, to };
                    all.push(Move { kind, axes: moved, to: there });
                }
                all.push(Move {
                    kind: CollectiveKind::AllGather { dim },
                    axes: moved,
                    to: without,
                });
            }
            let target = self.to.dims[dim];
            let elsewhere = (lay.sharded() & !axes.set()) | lay.partial;
            let relabels = target != axes
                && self.grid.count(target) == self.grid.count(axes)
                && target.set() & elsewhere == 0;
            if relabels {
                let to = with_dim(lay, dim, target);
                all.push(Move { kind: CollectiveKind::Permute { dim }, axes: target, to });
            }
            if axes.len() > 1 && axes.set() != target.set() {
                self.reorders(lay, dim, all);
            }
        }
    }

    /// Orders of a dim's axes in which one other axis is minor, where it can be gathered or moved.
    fn reorders(&self, lay: &MaskLayout, dim: usize, all: &mut Vec<Move>) {
        let axes = lay.dims[dim];
        for axis in axes.iter().rev().skip(1) {
            let order = axes.only(axes.set() & !(1 << axis)).with(axis);
            let to = with_dim(lay, dim, order);
            all.push(Move { kind: CollectiveKind::Permute { dim }, axes: order, to });
        }
    }

    /// Sums: over one axis, over all axes that must go, or scattered over consecutive axes of the
    /// target.
    fn sum(&self, lay: &MaskLayout, all: &mut Vec<Move>) {
        let going = lay.partial & !self.to.partial;
        let summed = going & !self.to.sharded();
        let mut sets: Vec<u16> = bits(going).map(|a| 1 << a).collect();
        sets.extend([summed, going].into_iter().filter(|s| s.count_ones() > 1));
        for set in sets {
            let to = MaskLayout { partial: lay.partial & !set, ..lay.clone() };
            all.push(Move { kind: CollectiveKind::AllReduce, axes: Axes::of(bits(set)), to });
        }
        for (dim, &target) in self.to.dims.iter().enumerate() {
            for end in 0..target.len() {
                for n in 1..=target.len() - end {
                    let run = target.without_suffix(end).suffix(n);
                    if run.set() & !going == 0 {
                        let rest = MaskLayout { partial: lay.partial & !run.set(), ..lay.clone() };
                        let to = with_dim(&rest, dim, lay.dims[dim].join(run));
                        let kind = CollectiveKind::ReduceScatter { dim };
                        all.push(Move { kind, axes: run, to });
                    }
                }
            }
        }
    }
}

fn with_dim(lay: &MaskLayout, dim: usize, axes: Axes) -> MaskLayout {
    let mut lay = lay.clone();
    lay.dims[dim] = axes;
    lay
}

fn path(found: &Found, end: &MaskLayout) -> Vec<Move> {
    let mut moves = Vec::new();
    let mut at = end;
    while let (_, Some((before, step))) = &found[at] {
        moves.push(step.clone());
        at = before;
    }
    moves.reverse();
    moves
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_ir::Mesh;

    /// The collectives of the cheapest way, by name and axes.
    fn way(mesh: &str, from: &str, to: &str) -> String {
        let mesh: Mesh = mesh.parse().unwrap();
        let grid = Grid::new(&mesh).unwrap();
        let lay = |text: &str| {
            let layout = phalanx_ir::Layout::parse(text, 3, &mesh).unwrap();
            let axes = |d: &phalanx_ir::layout::Sharding| {
                Axes::of(d.axes.iter().filter_map(|&a| grid.index(a)))
            };
            let partial = layout.partial().iter().filter_map(|&a| grid.index(a));
            MaskLayout {
                dims: layout.dims().iter().map(axes).collect(),
                partial: partial.fold(0, |set, a| set | 1 << a),
            }
        };
        let costs = Costs::default();
        let mut resharder = Resharder::new(&grid, &costs);
        let found = resharder.way(&lay(from), &lay(to), &[4096, 4096, 4096], 4).unwrap();
        let name = |m: &Move| {
            let axes: Vec<String> = m.axes.iter().map(|a| grid.name(a).to_string()).collect();
            let kind = format!("{:?}", m.kind);
            format!("{}<{}>", kind.split(' ').next().unwrap_or(""), axes.join(","))
        };
        found.moves.iter().map(name).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_cheapest_collective_is_taken() {
        for (from, to, expected) in [
            ("0:a", "0:a", ""),
            ("", "1:a", "Shard<a>"),
            ("", "1:a,b", "Shard<a,b>"),
            ("0:a", "", "AllGather<a>"),
            ("0:a,b", "", "AllGather<a,b>"),
            ("0:a", "1:a", "AllToAll<a>"),
            ("0:a,b", "2:a,b", "AllToAll<a,b>"),
            ("P:a", "", "AllReduce<a>"),
            ("P:a,b", "", "AllReduce<a,b>"),
            ("P:a", "1:a", "ReduceScatter<a>"),
            ("P:a,b", "1:b,a", "ReduceScatter<b,a>"),
            ("P:a,b", "1:a P:b", "ReduceScatter<a>"),
            ("0:a,b", "0:b,a", "Permute<b,a>"),
            ("0:a", "0:b", "Permute<b>"),
            ("0:a,b", "0:b", "Permute<b,a> AllGather<a>"),
        ] {
            assert_eq!(way("a=2 b=2", from, to), expected, "{from} to {to}");
        }
    }

    #[test]
    fn axes_that_neither_end_has_are_left_alone() {
        for (from, to) in [("0:a", "1:a"), ("P:a", ""), ("0:a", "")] {
            let moves = way("a=2 b=8", from, to);
            assert!(!moves.contains('b'), "{from} to {to}: {moves}");
        }
    }
}
