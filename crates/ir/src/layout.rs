//! Layouts: how a tensor is distributed over the mesh.

use std::collections::BTreeSet;
use std::fmt;

use crate::error::IrError;
use crate::mesh::{Axis, Mesh};

/// How the elements of a sharded dim are distributed to the shards. It is part of the type: masks,
/// positions and random keys use its local-to-global index map.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Order {
    /// Shard `i` holds the `i`-th contiguous block.
    #[default]
    Block,
    /// Element `j` lies on shard `j mod n`.
    Striped,
    /// Of `2n` blocks, shard `i` holds blocks `i` and `2n−1−i`: equal work under a causal mask.
    Zigzag,
}

impl std::str::FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let orders = [Order::Block, Order::Striped, Order::Zigzag];
        let found = orders.into_iter().find(|order| order.name() == text);
        found.ok_or_else(|| format!("`{text}` is not block, striped or zigzag"))
    }
}

impl Order {
    /// The name used in layouts; block order is not written.
    pub const fn name(self) -> &'static str {
        match self {
            Order::Block => "block",
            Order::Striped => "striped",
            Order::Zigzag => "zigzag",
        }
    }

    /// The global index of element `local` on shard `shard` of `shards`, for a dim of `size`
    /// (padded) elements.
    pub fn global(self, local: usize, shard: usize, shards: usize, size: usize) -> usize {
        let block = size / shards;
        match self {
            Order::Block => shard * block + local,
            Order::Striped => local * shards + shard,
            Order::Zigzag => {
                let half = block / 2;
                if local < half {
                    shard * half + local
                } else {
                    (2 * shards - 1 - shard) * half + (local - half)
                }
            }
        }
    }
}

/// The part of a dim that one rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalPart {
    /// How elements are distributed.
    pub order: Order,
    /// Which shard the rank holds.
    pub shard: usize,
    /// Of how many.
    pub shards: usize,
    /// The extent of the whole dim, with its padding.
    pub extent: usize,
}

impl LocalPart {
    /// All of a dim.
    pub const fn whole(extent: usize) -> Self {
        Self { order: Order::Block, shard: 0, shards: 1, extent }
    }

    /// The global index of a local one. It increases with the local one, in every order.
    #[inline]
    pub fn global(self, local: usize) -> usize {
        match self.shards {
            1 => local,
            _ => self.order.global(local, self.shard, self.shards, self.extent),
        }
    }

    /// How many elements it has, including padding.
    pub fn len(self) -> usize {
        self.extent / self.shards
    }

    /// Whether it has no element at all.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// How many of its elements belong to a dim of this size; they are its first ones.
    pub fn valid(self, size: usize) -> usize {
        // The local-to-global map is increasing, so validity changes once.
        let (mut valid, mut end) = (0, self.len());
        while valid < end {
            let middle = valid.midpoint(end);
            if self.global(middle) < size { valid = middle + 1 } else { end = middle }
        }
        valid
    }

    /// The global index of its first element, if it is one block of the dim.
    pub fn start(self) -> Option<usize> {
        (self.shards == 1 || self.order == Order::Block).then(|| self.shard * self.len())
    }

    /// How many elements from a local one on have consecutive global indices.
    pub fn run(self, local: usize) -> usize {
        let len = self.len();
        match self.order {
            _ if self.shards == 1 => len - local,
            Order::Block => len - local,
            Order::Striped => 1,
            Order::Zigzag if local < len / 2 => len / 2 - local,
            Order::Zigzag => len - local,
        }
    }
}

/// The axes that shard one dim, major to minor, and the order of its elements.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Sharding {
    /// Major to minor.
    pub axes: Vec<Axis>,
    /// How elements are distributed; only meaningful if `axes` is not empty.
    pub order: Order,
    /// How often ranks have passed their blocks on: rank `i` of `n` holds block `i + turn` modulo
    /// `n`. Less than `n`, and zero everywhere but inside a ring.
    pub turn: usize,
}

impl Sharding {
    /// What is written after the axes.
    fn suffix(&self) -> String {
        let order = match self.order {
            Order::Block => String::new(),
            other => format!("@{}", other.name()),
        };
        match self.turn {
            0 => order,
            turn => format!("{order}+{turn}"),
        }
    }
}

/// For every dim the ordered axes that shard it, plus the axes over which the value is a partial
/// sum. An axis in neither is replicated.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Layout {
    dims: Vec<Sharding>,
    partial: BTreeSet<Axis>,
}

impl Layout {
    /// Replicated over every axis.
    pub fn replicated(rank: usize) -> Self {
        Self { dims: vec![Sharding::default(); rank], partial: BTreeSet::new() }
    }

    /// A layout of these shardings and partial axes; no axis may appear twice.
    pub fn new(dims: Vec<Sharding>, partial: BTreeSet<Axis>) -> Result<Self, IrError> {
        let layout = Self { dims, partial };
        let mut seen = layout.partial.clone();
        for axis in layout.dims.iter().flat_map(|d| &d.axes) {
            if !seen.insert(*axis) {
                return Err(IrError::Layout {
                    layout: layout.to_string(),
                    what: format!("axis `{axis}` appears twice"),
                });
            }
        }
        Ok(layout)
    }

    /// Reads the inside of the braces: `0:dp 1:cp,tp@zigzag P:ep`, and `1:cp+2` for blocks that
    /// were passed on twice. Names of split axes expand.
    pub fn parse(text: &str, rank: usize, mesh: &Mesh) -> Result<Self, IrError> {
        let bad = |what: String| IrError::Layout { layout: format!("{{{text}}}"), what };
        let mut dims = vec![Sharding::default(); rank];
        let mut partial = BTreeSet::new();
        for part in text.split_whitespace() {
            let (key, names) = part
                .split_once(':')
                .ok_or_else(|| bad(format!("`{part}` is not `dim:axes` or `P:axes`")))?;
            let (names, turn) = match names.split_once('+') {
                None => (names, 0),
                Some((names, turn)) => {
                    let turn =
                        turn.parse().map_err(|_| bad(format!("`{turn}` is not a number")))?;
                    (names, turn)
                }
            };
            let (names, order) = match names.split_once('@') {
                None => (names, Order::Block),
                Some((names, "striped")) => (names, Order::Striped),
                Some((names, "zigzag")) => (names, Order::Zigzag),
                Some((_, other)) => {
                    return Err(bad(format!("unknown order `{other}` (striped, zigzag)")));
                }
            };
            let mut axes = Vec::new();
            for name in names.split(',') {
                axes.extend(mesh.expand(name)?);
            }
            let dim = match (key, key.parse::<usize>()) {
                ("P", _) if order != Order::Block || turn > 0 => {
                    return Err(bad(format!("a partial sum has no order (`{part}`)")));
                }
                ("P", _) if partial.is_empty() => {
                    partial = axes.into_iter().collect();
                    continue;
                }
                ("P", _) => return Err(bad("`P` is given twice".to_owned())),
                // A unit is one flat dim, written `*`.
                ("*", _) if rank == 1 => 0,
                (_, Ok(dim)) if dim < rank => dim,
                _ => return Err(bad(format!("no dim `{key}` in a tensor of {rank} dims"))),
            };
            if !dims[dim].axes.is_empty() {
                return Err(bad(format!("dim {dim} is given twice")));
            }
            if turn > 0 && turn >= mesh.count(&axes) {
                return Err(bad(format!(
                    "after {} turns blocks are home again",
                    mesh.count(&axes)
                )));
            }
            dims[dim] = Sharding { axes, order, turn };
        }
        Self::new(dims, partial)
    }

    /// The shardings, one per dim.
    pub fn dims(&self) -> &[Sharding] {
        &self.dims
    }

    /// The axes that shard a dim, major to minor.
    pub fn axes(&self, dim: usize) -> &[Axis] {
        &self.dims[dim].axes
    }

    /// The axes over which the value is a partial sum.
    pub fn partial(&self) -> &BTreeSet<Axis> {
        &self.partial
    }

    /// Whether every rank holds the whole value.
    pub fn is_replicated(&self) -> bool {
        self.partial.is_empty() && self.dims.iter().all(|d| d.axes.is_empty())
    }

    /// The same layout with the axes of one dim replaced.
    pub fn with_axes(&self, dim: usize, axes: Vec<Axis>) -> Result<Self, IrError> {
        let mut dims = self.dims.clone();
        let order = if axes.is_empty() { Order::Block } else { dims[dim].order };
        dims[dim] = Sharding { axes, order, turn: 0 };
        Self::new(dims, self.partial.clone())
    }

    /// The same layout with the order of one dim replaced.
    pub fn with_order(&self, dim: usize, order: Order) -> Self {
        let mut layout = self.clone();
        layout.dims[dim].order = order;
        layout
    }

    /// The same layout after ranks have passed the blocks of a dim on once more.
    pub fn turned(&self, dim: usize, mesh: &Mesh) -> Self {
        let mut layout = self.clone();
        let sharding = &mut layout.dims[dim];
        sharding.turn = (sharding.turn + 1) % mesh.count(&sharding.axes);
        layout
    }

    /// The same layout with another partial set.
    pub fn with_partial(&self, partial: BTreeSet<Axis>) -> Result<Self, IrError> {
        Self::new(self.dims.clone(), partial)
    }

    /// The axes that differ between both layouts; if only the order of axes or elements differs,
    /// all axes of the layouts.
    pub fn differing_axes(&self, other: &Self) -> Vec<Axis> {
        let all: BTreeSet<Axis> = (self.all_axes().chain(other.all_axes())).collect();
        let differing: Vec<Axis> =
            all.iter().copied().filter(|&a| self.role(a) != other.role(a)).collect();
        if differing.is_empty() { all.into_iter().collect() } else { differing }
    }

    /// Every axis that shards a dim or that the value is partial over.
    pub fn all_axes(&self) -> impl Iterator<Item = Axis> + '_ {
        self.dims.iter().flat_map(|d| &d.axes).chain(&self.partial).copied()
    }

    /// What one axis does to this value: shards a dim, makes it partial, or nothing.
    pub fn role(&self, axis: Axis) -> AxisRole {
        if self.partial.contains(&axis) {
            return AxisRole::Partial;
        }
        match self.dims.iter().position(|d| d.axes.contains(&axis)) {
            Some(dim) => AxisRole::Sharded(dim),
            None => AxisRole::Replicated,
        }
    }
}

/// What one mesh axis does to a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AxisRole {
    /// Every rank along the axis holds the same.
    Replicated,
    /// The axis shards this dim.
    Sharded(usize),
    /// The value is the sum over the axis of what its ranks hold.
    Partial,
}

impl fmt::Display for AxisRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AxisRole::Replicated => f.write_str("replicated"),
            AxisRole::Sharded(dim) => write!(f, "sharded on dim {dim}"),
            AxisRole::Partial => f.write_str("a partial sum"),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |axes: &mut dyn Iterator<Item = &Axis>| {
            axes.map(Axis::to_string).collect::<Vec<_>>().join(",")
        };
        let mut parts = Vec::new();
        for (dim, sharding) in self.dims.iter().enumerate() {
            if sharding.axes.is_empty() {
                continue;
            }
            let suffix = sharding.suffix();
            parts.push(format!("{dim}:{}{suffix}", join(&mut sharding.axes.iter())));
        }
        if !self.partial.is_empty() {
            parts.push(format!("P:{}", join(&mut self.partial.iter())));
        }
        write!(f, "{{{}}}", parts.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_print_and_parse_back() {
        let mesh: Mesh = "dp=2 cp=2 tp=4 ep=2".parse().unwrap();
        for text in [
            "{}",
            "{0:dp}",
            "{0:dp 1:cp,tp P:ep}",
            "{1:cp@zigzag}",
            "{1:cp@striped}",
            "{1:cp+1}",
            "{0:dp 1:cp,tp@zigzag+5}",
        ] {
            let inner = &text[1..text.len() - 1];
            assert_eq!(Layout::parse(inner, 3, &mesh).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_layout_with_an_axis_twice_is_refused() {
        let mesh: Mesh = "dp=2".parse().unwrap();
        let error = Layout::parse("0:dp 1:dp", 2, &mesh).unwrap_err().to_string();
        assert!(error.contains("axis `dp` appears twice"), "{error}");
        assert!(Layout::parse("0:dp P:dp", 2, &mesh).is_err());
        assert!(Layout::parse("2:dp", 2, &mesh).is_err());
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        for (text, what) in [
            ("0:a 0:b", "dim 0 is given twice"),
            ("P:a P:b", "`P` is given twice"),
            ("P:a@zigzag", "a partial sum has no order"),
            ("0:a+2", "after 2 turns blocks are home again"),
        ] {
            let error = Layout::parse(text, 2, &mesh).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn every_order_is_a_bijection() {
        for order in [Order::Block, Order::Striped, Order::Zigzag] {
            let mut seen: Vec<usize> = (0..4)
                .flat_map(|shard| (0..4).map(move |local| order.global(local, shard, 4, 16)))
                .collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..16).collect::<Vec<_>>(), "{order:?}");
        }
    }

    #[test]
    fn parts_are_walked_in_runs() {
        for order in [Order::Block, Order::Striped, Order::Zigzag] {
            for shard in 0..4 {
                let part = LocalPart { order, shard, shards: 4, extent: 16 };
                for local in 0..part.len() {
                    let run = part.run(local);
                    assert!(run > 0 && local + run <= part.len());
                    let next = (0..run).map(|i| part.global(local + i));
                    assert!(next.eq(part.global(local)..part.global(local) + run), "{part:?}");
                }
                let held = (0..part.len()).filter(|&i| part.global(i) < 6).count();
                assert_eq!(part.valid(6), held);
            }
        }
    }
}
