//! Interleaved products: each computes a block of the inner dimension, then the next computes the
//! same block and finds the shared operand in the cache.

use super::{Gemm, blocks, is_float, matmul};
use crate::element::CpuElement;
use crate::kernels::matrix::{Mat, MatMut};

/// A result with its operands: `c = a·b`, or `c += a·b` if `accumulate`.
pub struct ProductPart<'a, T, C> {
    /// The left operand.
    pub a: Mat<'a, T>,
    /// The right operand.
    pub b: Mat<'a, T>,
    /// The result.
    pub c: MatMut<'a, C>,
    /// Whether the product is added.
    pub accumulate: bool,
}

/// Several products with the same inner dimension and something in common, such as `xᵀ·y` and
/// `xᵀ·z`, interleaved. Every result has the same bits as with [`matmul`]. `part` is called many
/// times for each of the `count` products, and may return `None`.
///
/// # Panics
/// As [`matmul`] does.
pub fn matmul_turns<'a, T, C, G>(
    gemm: &G,
    count: usize,
    part: impl Fn(usize) -> Option<ProductPart<'a, T, C>>,
    scratch: &mut [T::Acc],
) where
    T: CpuElement + 'a,
    C: CpuElement<Acc = T::Acc> + 'a,
    G: Gemm,
{
    let whole = (0..count).find_map(&part).map_or(0, |part| part.a.shape()[1]);
    for inner in blocks(whole, true) {
        for ProductPart { a, b, c, accumulate } in (0..count).filter_map(&part) {
            let ([m, _], [_, n]) = (a.shape(), b.shape());
            // A result that is rounded needs its whole sum first.
            let own = match is_float::<C>() && m.min(n) >= SIDE_WORTH_TURNS {
                true => inner.clone(),
                false if inner.start == 0 => 0..whole,
                false => continue,
            };
            let (a, b) = (a.block(0..m, own.clone()), b.block(own.clone(), 0..n));
            matmul(gemm, c, a, b, accumulate || own.start > 0, scratch);
        }
    }
}

/// The smallest size of both sides of a result from which products are interleaved. On a Zen 4 core
/// three gradients of 384×384 over 2048 rows go from 100 to 104 GFLOP/s by it, of 384×192 from 101
/// to 104, of 384×96 from 111.5 to 111.0: a narrow operand is read in place by the library, so
/// there is nothing to share. Smaller results it sums in another order, too.
const SIDE_WORTH_TURNS: usize = 128;
