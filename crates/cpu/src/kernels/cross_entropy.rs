//! Cross-entropy of logits with targets, alone and fused with the product that makes the logits.
//!
//! The logits of a whole batch are the largest tensor of a small model. Fused, they exist for a
//! chunk of rows at a time: the threads split its rows for logits, loss, their gradient (written
//! over the logits) and `dx` ([`linear_loss_and_gradient`]); then, after a barrier, they split the
//! columns of the weight for its gradient ([`linear_weight_gradient`]).

use super::gemm::{Gemm, matmul, matmul_scratch};
use super::matrix::{Mat, MatMut};
use super::row;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// Loss of every row of logits: `nll = lse − logits[target]`, and the log-sum-exp itself.
///
/// A row with a negative target is ignored: its loss is zero.
///
/// # Panics
/// If the lengths disagree or a target is not below the number of columns.
pub fn loss<T: CpuElement>(
    logits: Mat<T>,
    targets: &[i32],
    nll: &mut [T::Acc],
    lse: &mut [T::Acc],
) {
    let [rows, _] = logits.shape();
    check_lengths(rows, [targets.len(), nll.len(), lse.len()]);
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                (nll[i], lse[i]) = loss_of_row(logits.row(i), targets[i]);
            }
        },
    );
}

/// Gradient of the logits, `(exp(logits − lse) − onehot(target))·d_nll`, into another buffer; zero
/// for ignored rows.
///
/// # Panics
/// If the shapes disagree or a target is not below the number of columns.
pub fn gradient<T: CpuElement>(
    logits: Mat<T>,
    targets: &[i32],
    lse: &[T::Acc],
    d_nll: &[T::Acc],
    mut out: MatMut<T>,
) {
    let [rows, _] = logits.shape();
    assert_eq!(logits.shape(), out.shape());
    check_lengths(rows, [targets.len(), lse.len(), d_nll.len()]);
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                out.row(i).copy_from_slice(logits.row(i));
                gradient_of_row(out.row(i), targets[i], lse[i], d_nll[i]);
            }
        },
    );
}

/// As [`gradient`], written over the logits.
///
/// # Panics
/// As there.
pub fn gradient_in_place<T: CpuElement>(
    mut logits: MatMut<T>,
    targets: &[i32],
    lse: &[T::Acc],
    d_nll: &[T::Acc],
) {
    let [rows, _] = logits.shape();
    check_lengths(rows, [targets.len(), lse.len(), d_nll.len()]);
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                gradient_of_row(logits.row(i), targets[i], lse[i], d_nll[i]);
            }
        },
    );
}

/// Loss of every row of logits, and their gradient, every loss counting `d_nll`. Of a row, `classes` are
/// logits. Its gradient, rounded to `E`, starts where it does, with zeros up to `padded` elements; the rest of
/// the row is any finite number.
///
/// # Panics
/// If the lengths disagree, a target is not below the number of classes, or rows are too short.
pub fn loss_and_rounded_gradient<E: CpuElement<Acc = f32>>(
    mut logits: MatMut<f32>,
    [classes, padded]: [usize; 2],
    targets: &[i32],
    d_nll: f32,
    nll: &mut [f32],
) {
    let [rows, _] = logits.shape();
    check_lengths(rows, [targets.len(), nll.len(), rows]);
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                let row = logits.row(i);
                row[classes..].fill(0.0);
                let lse;
                (nll[i], lse) = loss_of_row(&row[..classes], targets[i]);
                rounded_gradient_of_row::<E>(row, classes, targets[i], lse, d_nll);
                bytemuck::cast_slice_mut::<f32, E>(row)[classes..padded].fill(E::default());
            }
        },
    );
}

/// Replaces a row of logits by their gradient in a type that is not wider, piece by piece.
#[inline(always)]
fn rounded_gradient_of_row<E: CpuElement<Acc = f32>>(
    row: &mut [f32],
    classes: usize,
    target: i32,
    lse: f32,
    d_nll: f32,
) {
    let Ok(target) = usize::try_from(target) else {
        return bytemuck::cast_slice_mut::<f32, E>(row)[..classes].fill(E::default());
    };
    let at_target = (CpuFloat::exp(row[target] - lse) - 1.0) * d_nll;
    let mut piece = [0f32; 256];
    for start in (0..classes).step_by(piece.len()) {
        let own = start..classes.min(start + piece.len());
        let piece = &mut piece[..own.len()];
        for (p, x) in piece.iter_mut().zip(&row[own.clone()]) {
            *p = CpuFloat::exp(*x - lse) * d_nll;
        }
        let to = &mut bytemuck::cast_slice_mut::<f32, E>(row)[own];
        for (to, p) in to.iter_mut().zip(piece) {
            *to = E::store(*p);
        }
    }
    bytemuck::cast_slice_mut::<f32, E>(row)[target] = E::store(at_target);
}

/// Elements of scratch that the fused functions need for `rows` rows of `x`, `dim` wide.
pub fn linear_scratch<T: CpuElement>(rows: usize, dim: usize, classes: usize) -> usize {
    let forward = matmul_scratch::<T, T, T::Acc>(rows, dim, classes);
    forward.max(matmul_scratch::<T::Acc, T, T>(rows, classes, dim))
}

/// Loss of rows `x` under the logits `x·weight`; `weight` is `[dim, classes]` with any strides.
/// Leaves in `logits` their gradient, every loss counting `d_nll`, and stores the gradient of `x`.
///
/// `transposed` is the weight as `[classes, dim]`: `weight.t()`, or better a transposed copy of one
/// of the two, since each product is slow if it reads its operand across rows.
///
/// # Panics
/// If the shapes disagree, a target is not below the number of classes, or `scratch` is shorter
/// than [`linear_scratch`] says.
#[expect(clippy::too_many_arguments, reason = "three results and their operands")]
pub fn linear_loss_and_gradient<T: CpuElement, G: Gemm>(
    gemm: &G,
    x: Mat<T>,
    weight: Mat<T>,
    transposed: Mat<T>,
    targets: &[i32],
    d_nll: T::Acc,
    mut logits: MatMut<T::Acc>,
    nll: &mut [T::Acc],
    dx: MatMut<T>,
    scratch: &mut [T::Acc],
) {
    matmul(gemm, logits.reborrow(), x, weight, false, scratch);
    let [rows, _] = logits.shape();
    check_lengths(rows, [targets.len(), nll.len(), rows]);
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                let lse;
                (nll[i], lse) = loss_of_row(logits.row(i), targets[i]);
                gradient_of_row(logits.row(i), targets[i], lse, d_nll);
            }
        },
    );
    matmul(gemm, dx, logits.as_ref(), transposed, false, scratch);
}

/// Elements of scratch for [`linear_weight_gradient`] with `columns` columns.
pub fn linear_weight_scratch<T: CpuElement, D: CpuElement>(
    rows: usize,
    dim: usize,
    columns: usize,
) -> usize {
    matmul_scratch::<T, T::Acc, D>(dim, rows, columns)
}

/// `dw (+)= xᵀ·d_logits` for a range of columns (classes) of both, over all rows of a chunk.
///
/// # Panics
/// If the shapes disagree or `scratch` is shorter than [`linear_weight_scratch`] says.
pub fn linear_weight_gradient<T, D, G>(
    gemm: &G,
    x: Mat<T>,
    d_logits: Mat<T::Acc>,
    dw: MatMut<D>,
    accumulate: bool,
    scratch: &mut [T::Acc],
) where
    T: CpuElement,
    D: CpuElement<Acc = T::Acc>,
    G: Gemm,
{
    matmul(gemm, dw, x.t(), d_logits, accumulate, scratch);
}

/// Loss and log-sum-exp of one row.
#[inline(always)]
fn loss_of_row<T: CpuElement>(logits: &[T], target: i32) -> (T::Acc, T::Acc) {
    let (max, sum) = row::maximum_and_sum_of_exp(logits);
    let lse = max + sum.ln();
    let nll = match usize::try_from(target) {
        Ok(target) => lse - logits[target].load(),
        Err(_) => T::Acc::ZERO,
    };
    (nll, lse)
}

/// Replaces one row of logits by their gradient.
#[inline(always)]
fn gradient_of_row<T: CpuElement>(row: &mut [T], target: i32, lse: T::Acc, d_nll: T::Acc) {
    let Ok(target) = usize::try_from(target) else {
        return row.fill(T::default());
    };
    // The target's probability minus one is computed before rounding: for a confident correct
    // prediction only this difference remains.
    let at_target = ((row[target].load() - lse).exp() - T::Acc::ONE) * d_nll;
    scaled_probabilities(row, lse, d_nll);
    row[target] = T::store(at_target);
}

/// As the gradient of a row of which this is a part, for a target that counts; `held` is its place
/// if it lies in this part.
pub fn gradient_of_part<T: CpuElement>(
    row: &mut [T],
    held: Option<usize>,
    lse: T::Acc,
    d_nll: T::Acc,
) {
    vectorized(
        #[inline(always)]
        || match held {
            Some(target) => gradient_of_row(row, target as i32, lse, d_nll),
            None => scaled_probabilities(row, lse, d_nll),
        },
    );
}

#[inline(always)]
fn scaled_probabilities<T: CpuElement>(row: &mut [T], lse: T::Acc, d_nll: T::Acc) {
    for x in row.iter_mut() {
        *x = T::store((x.load() - lse).exp() * d_nll);
    }
}

fn check_lengths(rows: usize, lengths: [usize; 3]) {
    assert_eq!(lengths, [rows; 3], "one entry is needed for each row");
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::kernels::gemm::Packing;
    use crate::kernels::row::PIECE;
    use crate::kernels::testing::{doubles, random};

    /// Loss, log-sum-exp and gradient of one row by the definition.
    fn naive(logits: &[f64], target: i32, d_nll: f64) -> (f64, f64, Vec<f64>) {
        let lse = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
        let counts = f64::from(u8::from(target >= 0));
        let at = |j: usize| f64::from(u8::from(j as i32 == target));
        let gradient = (logits.iter().enumerate())
            .map(|(j, x)| ((x - lse).exp() - at(j)) * d_nll * counts)
            .collect();
        let nll = counts * (lse - logits[target.max(0) as usize]);
        (nll, lse, gradient)
    }

    fn close(what: &str, got: f64, want: f64, tolerance: f64) {
        let near = (got - want).abs() <= tolerance * (1.0 + want.abs());
        assert!(near, "{what}: {got} not {want}");
    }

    fn check<T: CpuElement>(rows: usize, classes: usize, exact: f64, rounded: f64) {
        let logits: Vec<T> = random("logits", rows * classes, 3.0);
        let d_nll: Vec<T::Acc> = random("d_nll", rows, 1.0);
        let targets: Vec<i32> = (0..rows as i32)
            .map(|i| if i % 4 == 3 { -1 - i } else { i * 31 % classes as i32 })
            .collect();
        let (mut nll, mut lse) = (vec![T::Acc::ZERO; rows], vec![T::Acc::ZERO; rows]);
        let view = Mat::rows_of(&logits, rows, classes);
        loss(view, &targets, &mut nll, &mut lse);
        let mut apart = vec![T::default(); logits.len()];
        let out = MatMut::rows_of(&mut apart, rows, classes);
        gradient(view, &targets, &lse, &d_nll, out);
        let mut over = logits.clone();
        let out = MatMut::rows_of(&mut over, rows, classes);
        gradient_in_place(out, &targets, &lse, &d_nll);
        assert_eq!(apart, over);
        for i in 0..rows {
            let row = doubles(&logits[i * classes..][..classes]);
            let want = naive(&row, targets[i], d_nll[i].to_f64());
            close("nll", nll[i].to_f64(), want.0, exact);
            close("lse", lse[i].to_f64(), want.1, exact);
            for (got, want) in over[i * classes..].iter().zip(&want.2) {
                close("gradient", got.load().to_f64(), *want, rounded);
            }
        }
    }

    #[test]
    fn loss_and_gradient_of_every_type() {
        for (rows, classes) in [(1, 1), (7, 5), (5, 33), (4, PIECE * 2 + 17)] {
            check::<f64>(rows, classes, 1e-12, 1e-12);
            check::<f32>(rows, classes, 3e-6, 3e-6);
            check::<bf16>(rows, classes, 3e-6, 4e-3);
        }
    }

    #[test]
    fn large_and_masked_logits() {
        let logits = [1000f32, -1000.0, 999.0];
        let (mut nll, mut lse) = ([0.0], [0.0]);
        loss(Mat::rows_of(&logits, 1, 3), &[2], &mut nll, &mut lse);
        close("nll", f64::from(nll[0]), 1.0 + (-1f64).exp().ln_1p(), 1e-4);
        let mut masked = vec![f32::NEG_INFINITY; PIECE + 2];
        masked[PIECE] = 2.0;
        masked[PIECE + 1] = 2.0;
        let target = [PIECE as i32];
        loss(Mat::rows_of(&masked, 1, PIECE + 2), &target, &mut nll, &mut lse);
        close("nll", f64::from(nll[0]), 2f64.ln(), 1e-6);
    }

    /// The fused pieces, as two threads would call them, against the definition; both layouts of
    /// the weight.
    fn check_fused<T: CpuElement>(tied: bool, tolerance: f64) {
        let (rows, dim, classes, chunk) = (10, 7, 23, 4);
        let x: Vec<T> = random("x", rows * dim, 1.0);
        let w: Vec<T> = random("w", dim * classes, 0.5);
        let targets: Vec<i32> = (0..rows as i32).map(|i| i * 7 % 24 - 1).collect();
        let strides = if tied { [1, dim] } else { [classes, 1] };
        let weight = Mat::new(&w, [dim, classes], strides);
        let d_nll = T::Acc::from_f64(0.25);
        let (mut nll, mut dx) = (vec![T::Acc::ZERO; rows], vec![T::default(); rows * dim]);
        let mut dw = vec![T::Acc::from_f64(f64::NAN); dim * classes];
        let room = linear_scratch::<T>(chunk, dim, classes)
            .max(linear_weight_scratch::<T, T::Acc>(chunk, dim, classes));
        let mut scratch = vec![T::Acc::ZERO; room];
        for start in (0..rows).step_by(chunk) {
            let end = rows.min(start + chunk);
            let mut logits = vec![T::Acc::ZERO; (end - start) * classes];
            for part in [start..start + 1, start + 1..end] {
                let rows_here = part.len();
                let mine = &mut logits[(part.start - start) * classes..];
                linear_loss_and_gradient(
                    &Packing,
                    Mat::rows_of(&x, rows, dim).block(part.clone(), 0..dim),
                    weight,
                    weight.t(),
                    &targets[part.clone()],
                    d_nll,
                    MatMut::rows_of(mine, rows_here, classes),
                    &mut nll[part.clone()],
                    MatMut::rows_of(&mut dx, rows, dim).block(part, 0..dim),
                    &mut scratch,
                );
            }
            let x = Mat::rows_of(&x, rows, dim).block(start..end, 0..dim);
            let d_logits = Mat::rows_of(&logits, end - start, classes);
            for columns in [0..11, 11..classes] {
                let dw = MatMut::new(&mut dw, [dim, classes], strides);
                let dw = dw.block(0..dim, columns.clone());
                let d_logits = d_logits.block(0..end - start, columns);
                linear_weight_gradient(&Packing, x, d_logits, dw, start > 0, &mut scratch);
            }
        }
        let (x, w) = (doubles(&x), doubles(&w));
        let at = |i: usize, c: usize| i * strides[0] + c * strides[1];
        let mut want_dw = vec![0.0; dim * classes];
        for r in 0..rows {
            let logits: Vec<f64> = (0..classes)
                .map(|c| (0..dim).map(|i| x[r * dim + i] * w[at(i, c)]).sum())
                .collect();
            let (want, _, gradient) = naive(&logits, targets[r], 0.25);
            close("nll", nll[r].to_f64(), want, 1e-5);
            for i in 0..dim {
                let want: f64 = (0..classes).map(|c| gradient[c] * w[at(i, c)]).sum();
                close("dx", dx[r * dim + i].load().to_f64(), want, tolerance);
                for c in 0..classes {
                    want_dw[at(i, c)] += x[r * dim + i] * gradient[c];
                }
            }
        }
        for (got, want) in dw.iter().zip(&want_dw) {
            close("dw", got.to_f64(), *want, 1e-5);
        }
    }

    #[test]
    fn fused_with_the_linear_layer() {
        for tied in [false, true] {
            check_fused::<f64>(tied, 1e-12);
            check_fused::<f32>(tied, 1e-6);
            check_fused::<bf16>(tied, 4e-3);
        }
    }
}
