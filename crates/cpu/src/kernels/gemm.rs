//! Matrix products: `C = A·B` or `C += A·B`, any strides, any mix of stored and result types.
//!
//! [`Gemm`] is the interface to a library that multiplies matrices of floats on one thread.
//! [`matmul`] adds storage types: operands that are not floats, or have bad strides, are copied
//! block by block into scratch, sums run over the whole inner dimension in floats, and the result
//! is rounded once.

mod turns;

use std::any::TypeId;
use std::ops::Range;

use super::matrix::{Mat, MatMut, by_columns};
use super::transpose::transpose;
use crate::element::{CpuElement, CpuFloat, vectorized};

pub use turns::{ProductPart, matmul_turns};

/// A library that multiplies matrices of floats, on the calling thread alone.
pub trait Gemm: Sync {
    /// `c = a·b`, or `c += a·b` if `accumulate`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    fn multiply<F: CpuFloat>(&self, c: MatMut<F>, a: Mat<F>, b: Mat<F>, accumulate: bool);
}

/// The `gemm` crate: packs operands itself, in buffers that it allocates.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packing;

impl Gemm for Packing {
    fn multiply<F: CpuFloat>(&self, mut c: MatMut<F>, a: Mat<F>, b: Mat<F>, accumulate: bool) {
        let [m, k, n] = inner_shape(c.shape(), a.shape(), b.shape());
        let ([c_rs, c_cs], [a_rs, a_cs], [b_rs, b_cs]) = (c.strides(), a.strides(), b.strides());
        // The library allocates its packing buffers, which a step's own bookkeeping must not count.
        let _exempt = phalanx_sys::count_alloc::Exemption::enter();
        // SAFETY: the shapes agree, so the library stays within the three matrices; `c` is borrowed
        // uniquely, so it overlaps neither operand. `F` is `f32` or `f64`, which it knows.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                c_cs,
                c_rs,
                accumulate,
                a.as_ptr(),
                a_cs,
                a_rs,
                b.as_ptr(),
                b_cs,
                b_rs,
                F::ONE,
                F::ONE,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// Elements of scratch that [`matmul`] needs for operands of types `A` and `B` and a result of `C`.
pub fn matmul_scratch<A, B, C>(m: usize, k: usize, n: usize) -> usize
where
    A: CpuElement,
    B: CpuElement,
    C: CpuElement,
{
    let [m, k, n] = [m, k, n].map(|size| size.min(BLOCK));
    let room = |float: bool, len: usize| if float { 0 } else { len };
    let sums = room(is_float::<C>(), m * n);
    // It is not known here whether the result is row-major or column-major, and so which operand
    // may be copied.
    let [left, right] = [(is_float::<A>(), m * k), (is_float::<B>(), k * n)];
    sums + match (left.0, right.0) {
        (true, true) => left.1.max(right.1),
        _ => left.1 + right.1,
    }
}

/// `c = a·b`, or `c += a·b` if `accumulate`; one thread's share is a block of rows or columns of `c`.
///
/// # Panics
/// If the shapes do not fit or `scratch` is shorter than [`matmul_scratch`] says.
pub fn matmul<A, B, C, G>(
    gemm: &G,
    c: MatMut<C>,
    a: Mat<A>,
    b: Mat<B>,
    accumulate: bool,
    scratch: &mut [A::Acc],
) where
    A: CpuElement,
    B: CpuElement<Acc = A::Acc>,
    C: CpuElement<Acc = A::Acc>,
    G: Gemm,
{
    let [m, k, n] = inner_shape(c.shape(), a.shape(), b.shape());
    let needed = matmul_scratch::<A, B, C>(m, k, n);
    assert!(
        scratch.len() >= needed,
        "a product of {m}×{k} and {k}×{n} needs {needed} elements of scratch, not {}",
        scratch.len()
    );
    if by_columns(c.strides()) {
        by_rows(gemm, c.t(), b.t(), a.t(), accumulate, scratch);
    } else {
        by_rows(gemm, c, a, b, accumulate, scratch);
    }
}

/// Largest side of the blocks that copies are made in: three of them, in single precision, are 3
/// MiB. The `gemm` crate cuts the inner dimension at the same places, so that neither copies nor
/// interleaved products change the order of a sum.
const BLOCK: usize = 512;

/// Rows from which a transposed right operand is copied. The library packs it in any case, but must
/// read it across rows, which costs a tenth of the whole product if the row length is a power of
/// two.
const ROWS_WORTH_A_COPY: usize = 64;

/// Elements of a result up to which the library takes dot products of rows, whose sums have another order, if the
/// right operand is transposed. The bits of a product must not depend on how its operands lie, so that one is
/// copied.
const MOST_BY_DOT_PRODUCTS: usize = 256;

/// The product for a row-major result: the library wants the right operand row-major too.
fn by_rows<A, B, C, G>(
    gemm: &G,
    mut c: MatMut<C>,
    a: Mat<A>,
    b: Mat<B>,
    accumulate: bool,
    scratch: &mut [A::Acc],
) where
    A: CpuElement,
    B: CpuElement<Acc = A::Acc>,
    C: CpuElement<Acc = A::Acc>,
    G: Gemm,
{
    let [m, k, n] = inner_shape(c.shape(), a.shape(), b.shape());
    let copy_a = !is_float::<A>();
    let copied_rows = m >= ROWS_WORTH_A_COPY || m * n <= MOST_BY_DOT_PRODUCTS;
    let copy_b = !is_float::<B>() || (by_columns(b.strides()) && copied_rows);
    let round = !is_float::<C>();
    for cols in blocks(n, copy_b || round) {
        for rows in blocks(m, copy_a || round) {
            let c = c.reborrow().block(rows.clone(), cols.clone());
            let [m, n] = c.shape();
            let (sums, scratch) = scratch.split_at_mut(if round { m * n } else { 0 });
            let mut product = Sum {
                gemm,
                a: a.block(rows, 0..k),
                b: b.block(0..k, cols.clone()),
                copies: [copy_a, copy_b],
                scratch,
            };
            if round {
                let mut sums = MatMut::rows_of(sums, m, n);
                product.store(sums.reborrow(), false);
                store(c, sums.as_ref(), accumulate);
            } else {
                product.store(floats_mut(c), accumulate);
            }
        }
    }
}

/// One block of a product, in floats.
struct Sum<'a, A: CpuElement, B, G> {
    gemm: &'a G,
    a: Mat<'a, A>,
    b: Mat<'a, B>,
    copies: [bool; 2],
    scratch: &'a mut [A::Acc],
}

impl<A, B, G> Sum<'_, A, B, G>
where
    A: CpuElement,
    B: CpuElement<Acc = A::Acc>,
    G: Gemm,
{
    /// Sums over the whole inner dimension.
    fn store(&mut self, mut c: MatMut<A::Acc>, accumulate: bool) {
        let [m, k, n] = inner_shape(c.shape(), self.a.shape(), self.b.shape());
        let [copy_a, copy_b] = self.copies;
        for inner in blocks(k, copy_a || copy_b) {
            let len = if copy_a { m * inner.len() } else { 0 };
            let (for_a, for_b) = self.scratch.split_at_mut(len);
            let a = self.a.block(0..m, inner.clone());
            let a = match copy_a {
                true => load(a, for_a),
                false => floats(a),
            };
            let b = self.b.block(inner.clone(), 0..n);
            let b = match copy_b {
                true => load_by_rows(b, for_b),
                false => floats(b),
            };
            let accumulate = accumulate || inner.start > 0;
            self.gemm.multiply(c.reborrow(), a, b, accumulate);
        }
    }
}

/// The matrix in floats, lying in `scratch` as it lay before.
fn load<'a, T: CpuElement>(mat: Mat<T>, scratch: &'a mut [T::Acc]) -> Mat<'a, T::Acc> {
    vectorized(
        #[inline(always)]
        || mat.load_into(scratch),
    )
}

/// The matrix in floats, lying in `scratch` by rows.
fn load_by_rows<'a, T: CpuElement>(mat: Mat<T>, scratch: &'a mut [T::Acc]) -> Mat<'a, T::Acc> {
    if !by_columns(mat.strides()) {
        return load(mat, scratch);
    }
    let [rows, cols] = mat.shape();
    transpose(mat.t(), MatMut::rows_of(scratch, rows, cols));
    Mat::rows_of(scratch, rows, cols)
}

fn store<C: CpuElement>(c: MatMut<C>, sums: Mat<C::Acc>, accumulate: bool) {
    vectorized(
        #[inline(always)]
        || c.store_from(sums, accumulate),
    );
}

/// The ranges that make up `0..size`: of at most [`BLOCK`] and about equal if `bounded`, else a
/// single one. If there is nothing, one empty range, so that an empty sum still stores zeros.
fn blocks(size: usize, bounded: bool) -> impl Iterator<Item = Range<usize>> {
    let count = if bounded { size.div_ceil(BLOCK) } else { 1 };
    let step = size.div_ceil(count.max(1)).max(1);
    (0..size.max(1)).step_by(step).map(move |start| start..size.min(start + step))
}

fn is_float<T: CpuElement>() -> bool {
    TypeId::of::<T>() == TypeId::of::<T::Acc>()
}

/// The same matrix, for code that knows that `T` is its own accumulator.
fn floats<T: CpuElement>(mat: Mat<T>) -> Mat<T::Acc> {
    assert!(is_float::<T>());
    // SAFETY: the two types are one.
    unsafe { Mat::from_raw(mat.as_ptr().cast(), mat.shape(), mat.strides()) }
}

/// The same matrix, for code that knows that `T` is its own accumulator.
fn floats_mut<T: CpuElement>(mut mat: MatMut<T>) -> MatMut<T::Acc> {
    assert!(is_float::<T>());
    // SAFETY: the two types are one; the borrow passes on.
    unsafe { MatMut::from_raw(mat.as_mut_ptr().cast(), mat.shape(), mat.strides()) }
}

/// Rows of `a`, inner dimension and columns of `b`, after checking that all three matrices agree.
fn inner_shape(c: [usize; 2], a: [usize; 2], b: [usize; 2]) -> [usize; 3] {
    assert!(a[1] == b[0] && c == [a[0], b[1]], "a product of {a:?} and {b:?} does not give {c:?}");
    [a[0], a[1], b[1]]
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::kernels::testing::random;

    fn at<T: CpuElement>(data: &[T], strides: [usize; 2], i: usize, j: usize) -> f64 {
        data[i * strides[0] + j * strides[1]].load().to_f64()
    }

    /// Checks one product against sums in double precision, with every combination of strides.
    fn check<T, U, C>(m: usize, k: usize, n: usize, tolerance: f64)
    where
        T: CpuElement,
        U: CpuElement<Acc = T::Acc>,
        C: CpuElement<Acc = T::Acc>,
    {
        let (a, b): (Vec<T>, Vec<U>) = (random("a", m * k, 1.0), random("b", k * n, 1.0));
        let before: Vec<C> = random("c", m * n, 1.0);
        let mut scratch = vec![T::Acc::ZERO; matmul_scratch::<T, U, C>(m, k, n)];
        for case in 0..16 {
            let strides = |transposed: bool, rows: usize, cols: usize| match transposed {
                true => [1, rows],
                false => [cols, 1],
            };
            let (sa, sb) = (strides(case & 1 > 0, m, k), strides(case & 2 > 0, k, n));
            let (sc, accumulate) = (strides(case & 4 > 0, m, n), case & 8 > 0);
            let mut c = before.clone();
            matmul(
                &Packing,
                MatMut::new(&mut c, [m, n], sc),
                Mat::new(&a, [m, k], sa),
                Mat::new(&b, [k, n], sb),
                accumulate,
                &mut scratch,
            );
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..k).map(|l| at(&a, sa, i, l) * at(&b, sb, l, j)).sum();
                    let place = i * sc[0] + j * sc[1];
                    let start = if accumulate { before[place].load().to_f64() } else { 0.0 };
                    let (want, got) = (start + sum, c[place].load().to_f64());
                    let error = (got - want).abs() / (1.0 + want.abs());
                    assert!(error <= tolerance, "{m} {k} {n}, case {case}: {got} not {want}");
                }
            }
        }
    }

    #[test]
    fn products_of_every_type() {
        for [m, k, n] in [[1, 1, 1], [5, 7, 3], [33, 65, 17], [70, 0, 9], [1, 40, 50], [40, 3, 1]] {
            check::<f32, f32, f32>(m, k, n, 2e-5);
            check::<f64, f64, f64>(m, k, n, 1e-13);
            check::<bf16, bf16, f32>(m, k, n, 2e-5);
            check::<bf16, bf16, bf16>(m, k, n, 4.1e-3);
            check::<f32, f32, bf16>(m, k, n, 4.1e-3);
            check::<f32, bf16, f32>(m, k, n, 2e-5);
            check::<bf16, f32, bf16>(m, k, n, 4.1e-3);
        }
    }

    /// Sizes above a block: sums must continue, not restart or round, from block to block.
    #[test]
    fn products_of_many_blocks() {
        check::<bf16, bf16, f32>(20, BLOCK * 2 + 5, 30, 1e-4);
        check::<bf16, bf16, bf16>(BLOCK + 3, 20, 10, 4.1e-3);
        check::<bf16, bf16, bf16>(10, BLOCK + 1, BLOCK + 7, 4.1e-3);
        check::<f32, f32, f32>(ROWS_WORTH_A_COPY, BLOCK + 30, BLOCK + 9, 1e-4);
        check::<f32, f32, f32>(BLOCK + 9, 30, ROWS_WORTH_A_COPY, 1e-4);
        check::<f32, bf16, f32>(BLOCK + 9, BLOCK + 1, 65, 1e-4);
    }

    /// Programs that compute the same product store its operands differently: alone or fused, whole or in parts.
    #[test]
    fn bits_do_not_depend_on_how_operands_lie() {
        let shapes =
            [[16, 509, 16], [16, 32, 16], [3, 70, 5], [16, 33, 48], [64, 40, 64], [200, 65, 31]];
        for [m, k, n] in shapes {
            let (a, b): (Vec<f32>, Vec<f32>) = (random("a", m * k, 1.0), random("b", k * n, 1.0));
            let mut scratch = vec![0f32; matmul_scratch::<f32, f32, f32>(m, k, n)];
            let mut of = |a: Mat<f32>, b: Mat<f32>| {
                let mut c = vec![0f32; m * n];
                matmul(&Packing, MatMut::rows_of(&mut c, m, n), a, b, false, &mut scratch);
                c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let (mut ta, mut tb) = (vec![0f32; m * k], vec![0f32; k * n]);
            transpose(Mat::rows_of(&a, m, k), MatMut::rows_of(&mut ta, k, m));
            transpose(Mat::rows_of(&b, k, n), MatMut::rows_of(&mut tb, n, k));
            let lefts = [Mat::rows_of(&a, m, k), Mat::rows_of(&ta, k, m).t()];
            let rights = [Mat::rows_of(&b, k, n), Mat::rows_of(&tb, n, k).t()];
            let first = of(lefts[0], rights[0]);
            for (i, left) in lefts.into_iter().enumerate() {
                for (j, right) in rights.into_iter().enumerate() {
                    assert!(of(left, right) == first, "{m} {k} {n}: left {i}, right {j}");
                }
            }
        }
    }

    #[test]
    fn blocks_of_a_larger_matrix_leave_the_rest_alone() {
        let (a, b): (Vec<bf16>, Vec<bf16>) = (random("a", 6 * 4, 1.0), random("b", 4 * 10, 1.0));
        let mut c = vec![7f32; 60];
        let mut scratch = vec![0f32; matmul_scratch::<bf16, bf16, f32>(2, 4, 3)];
        let target = MatMut::rows_of(&mut c, 6, 10).block(1..3, 4..7);
        let (a, b) = (Mat::rows_of(&a, 6, 4), Mat::rows_of(&b, 4, 10));
        let (rows, cols) = (a.block(1..3, 0..4), b.block(0..4, 4..7));
        matmul(&Packing, target, rows, cols, false, &mut scratch);
        for (place, value) in c.iter().enumerate() {
            let inside = (1..3).contains(&(place / 10)) && (4..7).contains(&(place % 10));
            assert_eq!(*value != 7.0, inside, "element {place}");
        }
    }

    #[test]
    #[should_panic(expected = "does not give")]
    fn shapes_must_fit() {
        let (a, mut c) = ([0f32; 6], [0f32; 4]);
        let a = Mat::rows_of(&a, 2, 3);
        Packing.multiply(MatMut::rows_of(&mut c, 2, 2), a, a, false);
    }
}
