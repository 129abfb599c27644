//! A call as what one rank sends and receives: pure data, from which the bytes of a call follow.
//!
//! NCCL only moves bytes here. Its own sums have another order than the ranks', so elements that are summed
//! come to the rank that needs the result as they are, and a kernel of ours combines them in the order of the
//! group. Rank `i` sums part `i` of an `all_reduce` and sends it to all: the volumes are those of a ring.

use std::ops::Range;

use phalanx_comm::{Blocks, Call, CollectiveOp, Strides};

/// Which buffer of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    Given,
    Wanted,
}

/// Rows of bytes in a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) side: Side,
    /// The first byte.
    pub(super) start: usize,
    /// Groups of rows, rows, bytes of a row.
    pub(super) shape: [usize; 3],
    /// Bytes from one group to the next, and from one row to the next.
    pub(super) strides: [usize; 2],
}

impl Piece {
    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it is one run of bytes.
    pub(super) fn is_dense(&self) -> bool {
        let [outer, rows, len] = self.shape;
        (rows <= 1 || self.strides[1] == len) && (outer <= 1 || self.strides[0] == rows * len)
    }
}

/// What goes to other places of the group, and what comes from them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Exchange {
    pub(super) sends: Vec<(usize, Piece)>,
    pub(super) receives: Vec<(usize, Piece)>,
}

/// What one rank does in a call.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Steps {
    pub(super) first: Exchange,
    /// This rank's own block, or the parts of it that stay: from, to.
    pub(super) own: Vec<[Piece; 2]>,
    /// The pieces of all places, this one's own among them, are combined: own, to. Those of the others
    /// have the own one's shape, and come with the first exchange.
    pub(super) combined: Option<[Piece; 2]>,
    /// After that.
    pub(super) second: Exchange,
}

impl Steps {
    /// Those of the place `me` in a group of `n`; nothing for calls that NCCL does not do.
    pub(super) fn of(call: &Call<'_>, n: usize, me: usize) -> Option<Self> {
        let blocks = call.blocks;
        let size = call.dtype.size();
        let block = |side: Side, index: usize| {
            let strides = if side == Side::Given { blocks.source } else { blocks.target };
            boxed(side, &blocks, strides, index, size)
        };
        let given = |index| block(Side::Given, index);
        let wanted = |index| block(Side::Wanted, index);
        let others = || (0..n).filter(move |&place| place != me);
        let mut steps = Self::default();
        let Self { first, own, combined, second } = &mut steps;
        match call.op {
            CollectiveOp::AllReduce(_) => {
                let part = |side, place| run(side, part(blocks.count(), n, place), size);
                first.sends.extend(others().map(|j| (j, part(Side::Given, j))));
                *combined = Some([part(Side::Given, me), part(Side::Wanted, me)]);
                second.sends.extend(others().map(|j| (j, part(Side::Wanted, me))));
                second.receives.extend(others().map(|j| (j, part(Side::Wanted, j))));
            }
            CollectiveOp::ReduceScatter(_) => {
                first.sends.extend(others().map(|j| (j, given(j))));
                *combined = Some([given(me), wanted(0)]);
            }
            CollectiveOp::Reduce { root, .. } if root == me => {
                *combined = Some([given(0), wanted(0)]);
            }
            CollectiveOp::Reduce { root, .. } => first.sends.push((root, given(0))),
            CollectiveOp::AllGather => {
                first.sends.extend(others().map(|j| (j, given(0))));
                first.receives.extend(others().map(|j| (j, wanted(j))));
                own.push([given(0), wanted(me)]);
            }
            CollectiveOp::AllToAll => {
                first.sends.extend(others().map(|j| (j, given(j))));
                first.receives.extend(others().map(|j| (j, wanted(j))));
                own.push([given(me), wanted(me)]);
            }
            // Both sides list the cells of a block in the same order.
            CollectiveOp::AllToAllRagged { cell, unit, send, receive } => {
                let (row, each) = (blocks.len / cell, send.len() / n);
                let filled = |side: Side, counts: &[usize], place: usize| -> Vec<Piece> {
                    let whole = block(side, place);
                    let piece = |(at, count): (usize, &usize)| {
                        let (outer, at_row) = (at / row / blocks.rows, at / row % blocks.rows);
                        let steps = outer * whole.strides[0] + at_row * whole.strides[1];
                        let start = whole.start + steps + at % row * cell * size;
                        let bytes = count * unit * size;
                        Piece { start, shape: [1, 1, bytes], strides: [bytes; 2], ..whole }
                    };
                    let own = &counts[place * each..(place + 1) * each];
                    own.iter().enumerate().map(piece).collect()
                };
                let to = |j: usize, pieces: Vec<Piece>| pieces.into_iter().map(move |p| (j, p));
                first.sends.extend(others().flat_map(|j| to(j, filled(Side::Given, send, j))));
                first
                    .receives
                    .extend(others().flat_map(|j| to(j, filled(Side::Wanted, receive, j))));
                let stays = filled(Side::Given, send, me).into_iter();
                *own = stays.zip(filled(Side::Wanted, receive, me)).map(|(a, b)| [a, b]).collect();
            }
            CollectiveOp::Broadcast { root } if root == me => {
                first.sends.extend(others().map(|j| (j, given(0))));
                own.push([given(0), wanted(0)]);
            }
            CollectiveOp::Scatter { root } if root == me => {
                first.sends.extend(others().map(|j| (j, given(j))));
                own.push([given(me), wanted(0)]);
            }
            CollectiveOp::Broadcast { root } | CollectiveOp::Scatter { root } => {
                first.receives.push((root, wanted(0)));
            }
            CollectiveOp::Gather { root } if root == me => {
                first.receives.extend(others().map(|j| (j, wanted(j))));
                own.push([given(0), wanted(me)]);
            }
            CollectiveOp::Gather { root } => first.sends.push((root, given(0))),
            CollectiveOp::Permute { to, from } => {
                first.sends.extend(to.filter(|&to| to != me).map(|to| (to, given(0))));
                first.receives.extend(from.filter(|&from| from != me).map(|f| (f, wanted(0))));
                own.extend((from == Some(me)).then(|| [given(0), wanted(0)]));
            }
            CollectiveOp::Send { .. } | CollectiveOp::Receive { .. } | CollectiveOp::Barrier => {
                return None;
            }
        }
        for exchange in [&mut steps.first, &mut steps.second] {
            exchange.sends.retain(|(_, piece)| piece.bytes() > 0);
            exchange.receives.retain(|(_, piece)| piece.bytes() > 0);
        }
        steps.own.retain(|[piece, _]| piece.bytes() > 0);
        Some(steps)
    }

    /// The places whose pieces are combined here with the own one.
    pub(super) fn summands(&self, n: usize, me: usize) -> impl Iterator<Item = usize> + use<> {
        let any = self.combined.is_some_and(|[own, _]| own.bytes() > 0);
        (0..n).filter(move |&place| any && place != me)
    }

    /// Bytes that this rank gets from others, or sends them after it has combined them: each byte of a call
    /// is counted by one rank.
    pub(super) fn moved(&self, n: usize, me: usize) -> usize {
        let bytes = |pieces: &[(usize, Piece)]| -> usize {
            pieces.iter().map(|(_, piece)| piece.bytes()).sum()
        };
        let each = self.combined.map_or(0, |[own, _]| own.bytes());
        bytes(&self.first.receives)
            + self.summands(n, me).count() * each
            + bytes(&self.second.sends)
    }
}

/// A block of a call.
fn boxed(side: Side, blocks: &Blocks, at: Strides, index: usize, size: usize) -> Piece {
    Piece {
        side,
        start: index * at.block * size,
        shape: [blocks.outer, blocks.rows, blocks.len * size],
        strides: [at.outer * size, at.row * size],
    }
}

/// Elements one after the other.
fn run(side: Side, elements: Range<usize>, size: usize) -> Piece {
    let bytes = elements.len() * size;
    Piece { side, start: elements.start * size, shape: [1, 1, bytes], strides: [bytes; 2] }
}

/// The elements of part `index` if `count` elements are divided as evenly as possible among `n`.
fn part(count: usize, n: usize, index: usize) -> Range<usize> {
    let bound = |i: usize| count / n * i + count % n * i / n;
    bound(index)..bound(index + 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use phalanx_comm::{Algorithm, GroupId, ReduceOp, volume};
    use phalanx_ir::DType;

    use super::*;

    /// The buffers of one rank, in elements of four bytes.
    struct Rank {
        given: Vec<i32>,
        wanted: Vec<i32>,
    }

    fn places(piece: &Piece) -> Vec<usize> {
        let [outer, rows, len] = piece.shape;
        let starts = (0..outer).flat_map(|o| (0..rows).map(move |r| (o, r)));
        let row =
            |(o, r): (usize, usize)| piece.start + o * piece.strides[0] + r * piece.strides[1];
        starts.flat_map(|at| (row(at)..row(at) + len).step_by(4)).map(|byte| byte / 4).collect()
    }

    fn read(rank: &Rank, piece: &Piece) -> Vec<i32> {
        let from = if piece.side == Side::Given { &rank.given } else { &rank.wanted };
        places(piece).into_iter().map(|at| from[at]).collect()
    }

    fn write(rank: &mut Rank, piece: &Piece, values: &[i32]) {
        let places = places(piece);
        assert_eq!((places.len(), piece.side), (values.len(), Side::Wanted));
        places.into_iter().zip(values).for_each(|(at, value)| rank.wanted[at] = *value);
    }

    /// Delivers what all ranks send in one exchange.
    fn deliver(ranks: &mut [Rank], exchanges: &[Exchange]) {
        for (me, exchange) in exchanges.iter().enumerate() {
            // What one rank sends to another comes in its order.
            let of = |(from, piece): &(usize, Piece)| (*from, *piece);
            let mut received: Vec<(usize, Piece)> = exchange.receives.iter().map(of).collect();
            received.sort_by_key(|(from, _)| *from);
            let sent = |from: usize| {
                let own = exchanges[from].sends.iter().filter(move |(to, _)| *to == me);
                own.map(move |(_, piece)| (from, *piece))
            };
            // What is combined is not received: the kernel that sums it reads it.
            let senders = (0..exchanges.len())
                .filter(|sender| received.iter().any(|(from, _)| from == sender));
            let sent: Vec<(usize, Piece)> = senders.flat_map(sent).collect();
            assert_eq!(sent.len(), received.len(), "to {me}");
            for ((from, source), (other, piece)) in sent.iter().zip(&received) {
                assert_eq!(from, other);
                let values = read(&ranks[*from], source);
                write(&mut ranks[me], piece, &values);
            }
        }
    }

    /// Runs a call on ranks whose buffers lie here; returns what they received.
    fn ran(n: usize, call: impl Fn(usize) -> Call<'static>) -> Vec<Vec<i32>> {
        let steps: Vec<Steps> = (0..n).map(|me| Steps::of(&call(me), n, me).unwrap()).collect();
        let mut ranks: Vec<Rank> = (0..n)
            .map(|me| {
                let (given, wanted) = call(me).elements(n, me).unwrap();
                let value = |at: usize| (1000 * me + at) as i32;
                Rank { given: (0..given).map(value).collect(), wanted: vec![-1; wanted] }
            })
            .collect();
        let firsts: Vec<Exchange> = steps.iter().map(|steps| steps.first.clone()).collect();
        // Before results are written: pieces that are combined.
        let summed: Vec<Option<Vec<i32>>> = (0..n)
            .map(|me| {
                let [own, _] = steps[me].combined?;
                let mut sum = read(&ranks[me], &own);
                for from in steps[me].summands(n, me) {
                    let sent = firsts[from].sends.iter().find(|(to, _)| *to == me).unwrap();
                    let values = read(&ranks[from], &sent.1);
                    sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
                Some(sum)
            })
            .collect();
        deliver(&mut ranks, &firsts);
        for (me, summed) in summed.into_iter().enumerate() {
            for [from, to] in &steps[me].own {
                let values = read(&ranks[me], from);
                write(&mut ranks[me], to, &values);
            }
            if let (Some([_, to]), Some(sum)) = (steps[me].combined, summed) {
                write(&mut ranks[me], &to, &sum);
            }
        }
        let seconds: Vec<Exchange> = steps.iter().map(|steps| steps.second.clone()).collect();
        deliver(&mut ranks, &seconds);
        for (me, steps) in steps.iter().enumerate() {
            let predicted = volume(&call(me), n, me, Algorithm::Ring);
            assert_eq!(steps.moved(n, me) as u64, predicted, "{:?} of rank {me}", call(me).op);
        }
        ranks.into_iter().map(|rank| rank.wanted).collect()
    }

    fn call(op: CollectiveOp<'static>, blocks: Blocks) -> Call<'static> {
        Call::new(GroupId::WORLD, op, DType::I32, blocks)
    }

    #[test]
    fn reductions_sum_every_ranks_elements() {
        for (n, count) in [(1, 5), (2, 7), (3, 2), (4, 16)] {
            let sum = |at: usize| (0..n).map(|rank| (1000 * rank + at) as i32).sum::<i32>();
            let all: Vec<i32> = (0..count).map(sum).collect();
            let op = CollectiveOp::AllReduce(ReduceOp::Sum);
            let found = ran(n, |_| call(op, Blocks::contiguous(count)));
            assert_eq!(found, vec![all.clone(); n]);
            let op = CollectiveOp::Reduce { root: n - 1, reduction: ReduceOp::Sum };
            let found = ran(n, |_| call(op, Blocks::contiguous(count)));
            assert_eq!(found[n - 1], all);
            // Two rows, of which every rank gets its columns.
            let op = CollectiveOp::ReduceScatter(ReduceOp::Sum);
            let found = ran(n, |_| call(op, Blocks::scatter(n, 2, count, 1)));
            for (me, found) in found.into_iter().enumerate() {
                let row = |r: usize| (0..count).map(move |c| sum(r * n * count + me * count + c));
                assert_eq!(found, (0..2).flat_map(row).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn blocks_arrive_where_they_belong() {
        let value = |rank: usize, at: usize| (1000 * rank + at) as i32;
        let (n, mid) = (3, 2);
        let found = ran(n, |_| call(CollectiveOp::AllGather, Blocks::gather(n, 2, mid, 1)));
        let row = |r: usize| (0..n).flat_map(move |j| (0..mid).map(move |c| value(j, r * mid + c)));
        let whole: Vec<i32> = (0..2).flat_map(row).collect();
        assert_eq!(found, vec![whole; n]);
        let found = ran(n, |_| call(CollectiveOp::AllToAll, Blocks::contiguous(mid)));
        for (me, found) in found.into_iter().enumerate() {
            let from = |j: usize| (0..mid).map(move |c| value(j, me * mid + c));
            assert_eq!(found, (0..n).flat_map(from).collect::<Vec<_>>());
        }
        let turned = |me: usize| {
            let (to, from) = (Some((me + 1) % n), Some((me + n - 1) % n));
            call(CollectiveOp::Permute { to, from }, Blocks::contiguous(mid))
        };
        for (me, found) in ran(n, turned).into_iter().enumerate() {
            assert_eq!(found[0], value((me + n - 1) % n, 0));
        }
        let rooted = [
            CollectiveOp::Broadcast { root: 1 },
            CollectiveOp::Scatter { root: 1 },
            CollectiveOp::Gather { root: 1 },
        ];
        let [sent, scattered, gathered] =
            rooted.map(|op| ran(n, |_| call(op, Blocks::contiguous(mid))));
        assert!(sent.iter().all(|found| found[..] == [value(1, 0), value(1, 1)]));
        assert_eq!(scattered[2], [value(1, 4), value(1, 5)]);
        assert_eq!(gathered[1][2 * mid..], [value(2, 0), value(2, 1)]);
        // Of two regions of three rows of two, rank i gives i + j rows to rank j, and one row.
        let counts = |me: usize| -> (&'static [usize], &'static [usize]) {
            ([&[0, 1, 1, 1], &[1, 1, 2, 1]][me], [&[0, 1, 1, 1], &[1, 1, 2, 1]][me])
        };
        let ragged = |me: usize| {
            let (send, receive) = counts(me);
            let op = CollectiveOp::AllToAllRagged { cell: 6, unit: 2, send, receive };
            call(op, Blocks::contiguous(12))
        };
        let found = ran(2, ragged);
        let filled = |from: usize, first: usize, rows: usize| {
            let rest = vec![-1; 6 - 2 * rows];
            (first..first + 2 * rows).map(|at| value(from, at)).chain(rest).collect::<Vec<_>>()
        };
        let first = [filled(0, 0, 0), filled(0, 6, 1), filled(1, 0, 1), filled(1, 6, 1)].concat();
        let second =
            [filled(0, 12, 1), filled(0, 18, 1), filled(1, 12, 2), filled(1, 18, 1)].concat();
        assert_eq!(found, [first, second]);
    }
}
