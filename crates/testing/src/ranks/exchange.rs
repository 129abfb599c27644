//! Collectives between the blocks of all ranks, written after their definition.

use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{Axis, Mesh, Order, TensorType};

use super::blocks::Block;
use super::bugs::Bug;

/// A collective on the blocks of one value.
pub(super) struct Exchange<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) ty: &'a TensorType,
    /// The type of the result.
    pub(super) made: &'a TensorType,
    pub(super) blocks: &'a [Block],
    /// Of a second operand, in which a block is replaced.
    pub(super) rest: Option<&'a [Block]>,
    pub(super) bug: Option<Bug>,
}

impl Exchange<'_> {
    pub(super) fn run(&self, c: &Collective) -> Result<Vec<Block>, String> {
        (0..self.mesh.ranks()).map(|rank| self.on(rank, c)).collect()
    }

    /// What one rank holds afterwards.
    fn on(&self, rank: usize, c: &Collective) -> Result<Block, String> {
        let n = self.mesh.count(&c.axes);
        let own = &self.blocks[rank];
        Ok(match c.kind {
            CollectiveKind::AllGather { dim } => {
                let group = self.group(rank, c, Bug::GatherOrder);
                let all = Block::concat(group.into_iter().map(|q| &self.blocks[q]), dim);
                let (places, len) = (self.places(self.ty, dim, n), own.shape[dim]);
                all.picked(dim, |at| {
                    (0..n * len).find(|&i| places(i, len) == at).unwrap_or_default()
                })
            }
            CollectiveKind::AllReduce => self.sum(&self.members(rank, c)),
            CollectiveKind::ReduceScatter { dim } => {
                let place = self.place(rank, c, Bug::ScatterOrder);
                self.dealt(self.sum(&self.members(rank, c)), dim, n).cut(dim, n, place)?
            }
            CollectiveKind::AllToAll { from, to } => {
                let group = self.group(rank, c, Bug::ExchangeOrder);
                let (from, to) = match self.has(Bug::ExchangeSwapped) {
                    true => (to, from),
                    false => (from, to),
                };
                let place = self.mesh.shard(rank, &c.axes);
                let parts: Vec<Block> = (group.into_iter())
                    .map(|q| self.blocks[q].cut(to, n, place))
                    .collect::<Result<_, _>>()?;
                let whole = Block::concat(parts.iter(), from);
                match self.rest {
                    None => whole,
                    Some(counts) => filled(whole, counts[rank].cut(to, n, place)?),
                }
            }
            CollectiveKind::Shard { dim } => {
                let place = self.place(rank, c, Bug::ShardOrder);
                self.dealt(own.clone(), dim, n).cut(dim, n, place)?
            }
            CollectiveKind::ToPartial => {
                let keeps = self.mesh.shard(rank, &c.axes) == 0;
                match keeps || self.has(Bug::PartialEverywhere) {
                    true => own.clone(),
                    false => own.zeros(),
                }
            }
            CollectiveKind::Permute { .. } if self.has(Bug::NoPermute) => own.clone(),
            CollectiveKind::Permute { dim } => {
                self.blocks[self.holder(rank, dim, &c.axes)?].clone()
            }
            CollectiveKind::Turn { .. } => {
                let group = self.members(rank, c);
                let place = self.mesh.shard(rank, &c.axes);
                self.blocks[group[(place + 1) % group.len()]].clone()
            }
            CollectiveKind::BroadcastBlock { block, .. } => {
                let block = block - usize::from(self.has(Bug::BlockTwice)).min(block);
                self.blocks[self.members(rank, c)[block]].clone()
            }
            CollectiveKind::ReduceBlock { block, .. } => {
                let block = (block + usize::from(self.has(Bug::BlockElsewhere))) % n;
                match (self.mesh.shard(rank, &c.axes) == block, self.rest) {
                    (true, _) => self.sum(&self.members(rank, c)),
                    (false, Some(rest)) => rest[rank].clone(),
                    (false, None) => own.zeros(),
                }
            }
            CollectiveKind::TakeBlock { dim, block, of } => own.cut(dim, of, block)?,
            CollectiveKind::PutBlock { dim, block, of } => {
                let rest = self.rest.ok_or("there is nothing to put a block into")?;
                let block = if self.has(Bug::BlockMisplaced) { 0 } else { block };
                let part = |at: usize| match at == block {
                    true => Ok(own.clone()),
                    false => rest[rank].cut(dim, of, at),
                };
                let parts: Vec<Block> = (0..of).map(part).collect::<Result<_, String>>()?;
                Block::concat(parts.iter(), dim)
            }
            CollectiveKind::Done => own.clone(),
        })
    }

    /// For each element of a list of the shards of `len` elements each, where it lies in the whole.
    fn places(&self, ty: &TensorType, dim: usize, n: usize) -> impl Fn(usize, usize) -> usize {
        let order = match ty.layout.dims()[dim].order {
            Order::Zigzag if self.has(Bug::ZigzagAsBlocks) => Order::Block,
            order => order,
        };
        move |at, len| order.global(at % len, at / len, n, n * len)
    }

    /// A whole whose elements are picked so that consecutive blocks are the shards of the result.
    fn dealt(&self, whole: Block, dim: usize, n: usize) -> Block {
        let (places, len) = (self.places(self.made, dim, n), whole.shape[dim] / n);
        whole.picked(dim, |at| places(at, len.max(1)))
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The ranks of a group in the order of their blocks.
    fn members(&self, rank: usize, c: &Collective) -> Vec<usize> {
        match self.has(Bug::WrongGroup) {
            true => self.mesh.group(rank, &self.others(&c.axes)),
            false => self.mesh.group(rank, &c.axes),
        }
    }

    fn group(&self, rank: usize, c: &Collective, reversed_by: Bug) -> Vec<usize> {
        let mut group = self.members(rank, c);
        if self.has(reversed_by) {
            group.reverse();
        }
        group
    }

    /// Which block of its group a rank gets.
    fn place(&self, rank: usize, c: &Collective, reversed_by: Bug) -> usize {
        let n = self.mesh.count(&c.axes);
        let place = match self.has(Bug::WrongSlice) {
            true => self.mesh.shard(rank, &self.others(&c.axes)),
            false => self.mesh.shard(rank, &c.axes),
        };
        if self.has(reversed_by) { n - 1 - place } else { place }
    }

    /// Another axis of the same size, where the mesh has one: what a mistaken group is over.
    fn others(&self, axes: &[Axis]) -> Vec<Axis> {
        let [axis] = axes else { return axes.to_vec() };
        let alike =
            |&(other, n): &(Axis, usize)| other != *axis && Some(n) == self.mesh.size(*axis);
        self.mesh.axes().find(alike).map_or_else(|| axes.to_vec(), |(other, _)| vec![other])
    }

    fn sum(&self, group: &[usize]) -> Block {
        let mut sum = self.blocks[group[0]].clone();
        let end = group.len() - usize::from(self.has(Bug::ForgottenShare));
        let again = self.has(Bug::DoubledShare).then_some(&group[0]);
        for &rank in group[1..end].iter().chain(again) {
            for (a, b) in sum.data.iter_mut().zip(&self.blocks[rank].data) {
                *a += b;
            }
        }
        sum
    }

    /// A rank that holds the block which `rank` shall have when `axes` shard a dim.
    fn holder(&self, rank: usize, dim: usize, axes: &[Axis]) -> Result<usize, String> {
        let fits = |&other: &usize| {
            let layout = &self.ty.layout;
            let block = |r, d: usize| self.mesh.shard(r, layout.axes(d));
            (0..layout.dims().len()).all(|d| match d == dim {
                true => block(other, d) == self.mesh.shard(rank, axes),
                false => block(other, d) == block(rank, d),
            }) && (layout.partial().iter())
                .all(|&a| self.mesh.coordinate(other, a) == self.mesh.coordinate(rank, a))
        };
        (0..self.mesh.ranks()).find(fits).ok_or_else(|| format!("nobody holds it: {}", self.ty))
    }
}

/// Regions of which only the rows in front of the counts' end have come; counts are those of these regions.
fn filled(mut regions: Block, counts: Block) -> Block {
    let [.., rows, width] = regions.shape[..] else { return regions };
    let runs = counts.shape.last().copied().unwrap_or(1).max(1);
    let ends = counts.data.chunks(runs).map(|runs| runs.iter().sum::<f64>());
    for (region, end) in regions.data.chunks_mut((rows * width).max(1)).zip(ends) {
        region[(end.max(0.0) as usize).min(rows) * width..].fill(0.0);
    }
    regions
}
