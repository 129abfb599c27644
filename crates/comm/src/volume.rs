//! How many bytes a call moves between ranks: closed forms, for predictions.
//!
//! Nothing here is called by the transport that counts; a test compares the two.

use crate::call::{Call, CollectiveOp};
use crate::ragged::totals;

/// The algorithm of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every block is read once by the rank that needs it, and reductions are divided: rank `i`
    /// reduces part `i` of an `all_reduce` and sends it to all. The volumes are those of a ring.
    Ring,
}

/// Bytes that the place `index` of a group of `n` reads from the other members, or writes to them.
///
/// Of `X` bytes in a full tensor: `2X(n−1)/n` for `all_reduce`, `X(n−1)/n` for `all_gather`,
/// `reduce_scatter` and `all_to_all`, where `n` divides the elements; otherwise parts differ by one
/// element, but the sum over the members is still `2X(n−1)` and `X(n−1)`.
pub fn volume(call: &Call<'_>, n: usize, index: usize, algorithm: Algorithm) -> u64 {
    let Algorithm::Ring = algorithm;
    let (others, block) = (n as u64 - 1, call.blocks.count() as u64);
    let at = |root: usize, elements: u64| if root == index { elements } else { 0 };
    let elements = match call.op {
        CollectiveOp::AllReduce(_) => 2 * others * part(block, n, index),
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter(_) | CollectiveOp::AllToAll => {
            others * block
        }
        CollectiveOp::AllToAllRagged { unit, receive, .. } => {
            let total = totals(receive, n).enumerate();
            let units: usize =
                total.filter(|(from, _)| *from != index).map(|(_, units)| units).sum();
            (units * unit) as u64
        }
        CollectiveOp::Broadcast { root } | CollectiveOp::Scatter { root } => {
            block - at(root, block)
        }
        CollectiveOp::Reduce { root, .. } | CollectiveOp::Gather { root } => {
            at(root, others * block)
        }
        CollectiveOp::Receive { from, .. } => block - at(from, block),
        CollectiveOp::Permute { from, .. } => from.map_or(0, |from| block - at(from, block)),
        CollectiveOp::Send { .. } | CollectiveOp::Barrier => 0,
    };
    elements * call.dtype.size() as u64
}

/// Elements of part `index` if `count` elements are divided as evenly as possible.
fn part(count: u64, n: usize, index: usize) -> u64 {
    let bound = |i: usize| count * i as u64 / n as u64;
    bound(index + 1) - bound(index)
}

#[cfg(test)]
mod tests {
    use phalanx_ir::DType;

    use super::*;
    use crate::{Blocks, GroupId, ReduceOp};

    #[test]
    fn ring_volumes_of_the_literature() {
        let call = |op, count| Call::new(GroupId::WORLD, op, DType::F32, Blocks::contiguous(count));
        for n in 1..=8usize {
            let count = 24 * n;
            let (x, of_n) = (4 * count as u64, n as u64);
            for index in 0..n {
                let of = |op, count| volume(&call(op, count), n, index, Algorithm::Ring);
                assert_eq!(
                    of(CollectiveOp::AllReduce(ReduceOp::Sum), count),
                    2 * x * (of_n - 1) / of_n
                );
                for op in [
                    CollectiveOp::AllGather,
                    CollectiveOp::AllToAll,
                    CollectiveOp::ReduceScatter(ReduceOp::Max),
                ] {
                    assert_eq!(of(op, 24), x * (of_n - 1) / of_n);
                }
            }
            let uneven = call(CollectiveOp::AllReduce(ReduceOp::Sum), 13);
            let sum: u64 = (0..n).map(|i| volume(&uneven, n, i, Algorithm::Ring)).sum();
            assert_eq!(sum, 2 * 13 * 4 * (of_n - 1));
        }
    }
}
