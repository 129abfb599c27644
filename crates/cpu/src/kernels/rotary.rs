//! Rotary position embedding, rotate-half convention.
//!
//! In every head, elements `i` and `i + head_dim / 2` are the two coordinates of a point, which is
//! rotated by the angle `position · frequency(i)`. The gradient rotates by the opposite angle.

use super::inlined::inlined;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// The inverse frequencies `theta^(−2i / head_dim)` of plain rotary embedding, one for each of the
/// `head_dim / 2` elements of `out`.
///
/// Variants that rescale frequencies (for longer contexts) change this list and nothing else.
pub fn inverse_frequencies(theta: f64, out: &mut [f64]) {
    let half = out.len() as f64;
    for (i, frequency) in out.iter_mut().enumerate() {
        *frequency = theta.powf(-(i as f64) / half);
    }
}

/// Fills the tables `[positions, head_dim / 2]` with the cosines and sines of all angles.
///
/// The positions are given one by one because a shard of a sequence need not be a contiguous piece.
pub fn fill_tables<A: CpuFloat>(
    positions: impl IntoIterator<Item = usize>,
    inverse_frequencies: &[f64],
    cos: &mut [A],
    sin: &mut [A],
) {
    let half = inverse_frequencies.len();
    let rows = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
    for (position, (cos, sin)) in positions.into_iter().zip(rows) {
        for (frequency, (cos, sin)) in inverse_frequencies.iter().zip(cos.iter_mut().zip(sin)) {
            let angle = position as f64 * frequency;
            *cos = A::from_f64(angle.cos());
            *sin = A::from_f64(angle.sin());
        }
    }
}

/// The direction of rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// The embedding itself.
    Forward,
    /// Its gradient, which is also its inverse.
    Inverse,
}

/// The rows that are rotated: `[rows, heads, head_dim]`, where row `r` has the table's line
/// `r % seq + offset`.
#[derive(Clone, Copy)]
pub struct RotaryTables<'a, A> {
    /// Cosines, `[positions, head_dim / 2]`.
    pub cos: &'a [A],
    /// Sines, likewise.
    pub sin: &'a [A],
    /// Elements of one head.
    pub head_dim: usize,
    /// Heads in a row.
    pub heads: usize,
    /// Rows of one sequence.
    pub seq: usize,
    /// The table's line of the first row of a sequence.
    pub offset: usize,
    /// The number of the first row given, which need not begin a sequence.
    pub first_row: usize,
    /// The direction of rotation.
    pub direction: Rotation,
}

impl<A: CpuFloat> RotaryTables<'_, A> {
    /// Rotates rows of `x`, which begin every `x_stride` elements, into rows of `y`; a stride is at
    /// least `heads · head_dim`, and larger if the rows lie inside wider ones.
    pub fn rotate<T: CpuElement<Acc = A>>(
        &self,
        rows: usize,
        x: &[T],
        x_stride: usize,
        y: &mut [T],
        y_stride: usize,
    ) {
        let (this, width) = (*self, self.heads * self.head_dim);
        vectorized(inlined!(|| {
            for row in 0..rows {
                let (cos, sin) = this.line(row);
                let x = &x[row * x_stride..][..width];
                let y = &mut y[row * y_stride..][..width];
                let heads = x.chunks_exact(this.head_dim);
                for (x, y) in heads.zip(y.chunks_exact_mut(this.head_dim)) {
                    let (x0, x1) = x.split_at(this.head_dim / 2);
                    let (y0, y1) = y.split_at_mut(this.head_dim / 2);
                    turn(x0, x1, cos, sin, this.direction, y0, y1);
                }
            }
        }));
    }

    /// Rotates rows of `x`, which begin every `stride` elements, in place.
    pub fn rotate_in_place<T: CpuElement<Acc = A>>(&self, rows: usize, x: &mut [T], stride: usize) {
        let (this, width) = (*self, self.heads * self.head_dim);
        vectorized(inlined!(|| {
            for row in 0..rows {
                let tables = this.line(row);
                let x = &mut x[row * stride..][..width];
                for x in x.chunks_exact_mut(this.head_dim) {
                    let (x0, x1) = x.split_at_mut(this.head_dim / 2);
                    turn_in_place(tables, this.direction, x0, x1);
                }
            }
        }));
    }

    #[inline(always)]
    fn line(&self, row: usize) -> (&[A], &[A]) {
        let half = self.head_dim / 2;
        let line = (self.first_row + row) % self.seq + self.offset;
        (&self.cos[line * half..][..half], &self.sin[line * half..][..half])
    }
}

#[inline(always)]
fn turn<T: CpuElement>(
    x0: &[T],
    x1: &[T],
    cos: &[T::Acc],
    sin: &[T::Acc],
    direction: Rotation,
    y0: &mut [T],
    y1: &mut [T],
) {
    let half = cos.len();
    let (x0, x1, sin) = (&x0[..half], &x1[..half], &sin[..half]);
    let (y0, y1) = (&mut y0[..half], &mut y1[..half]);
    for i in 0..half {
        (y0[i], y1[i]) = turn_point(x0[i], x1[i], cos[i], sin[i], direction);
    }
}

#[inline(always)]
fn turn_in_place<T: CpuElement>(
    (cos, sin): (&[T::Acc], &[T::Acc]),
    direction: Rotation,
    x0: &mut [T],
    x1: &mut [T],
) {
    for ((x0, x1), (cos, sin)) in x0.iter_mut().zip(x1).zip(cos.iter().zip(sin)) {
        (*x0, *x1) = turn_point(*x0, *x1, *cos, *sin, direction);
    }
}

#[inline(always)]
fn turn_point<T: CpuElement>(
    x0: T,
    x1: T,
    cos: T::Acc,
    sin: T::Acc,
    direction: Rotation,
) -> (T, T) {
    let sin = match direction {
        Rotation::Forward => sin,
        Rotation::Inverse => -sin,
    };
    let (x0, x1) = (x0.load(), x1.load());
    (T::store(x0 * cos - x1 * sin), T::store(x1 * cos + x0 * sin))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{
        assert_close, dot, doubles, normals, numerical_gradient, tolerance,
    };
    use super::*;

    const HEAD_DIM: usize = 38;
    const HEADS: usize = 2;
    const SEQ: usize = 3;
    const OFFSET: usize = 4;
    const ROWS: usize = 5;
    const FIRST: usize = 2;
    const WIDTH: usize = HEAD_DIM * HEADS;

    fn naive(x: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        for r in 0..ROWS {
            let position = ((FIRST + r) % SEQ + OFFSET) as f64;
            for h in 0..HEADS {
                for i in 0..HEAD_DIM / 2 {
                    let angle = position / 500f64.powf(2.0 * i as f64 / HEAD_DIM as f64);
                    let at = r * WIDTH + h * HEAD_DIM + i;
                    let (a, b) = (x[at], x[at + HEAD_DIM / 2]);
                    y[at] = a * angle.cos() - b * angle.sin();
                    y[at + HEAD_DIM / 2] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        y
    }

    fn tables<A: CpuFloat>() -> (Vec<A>, Vec<A>) {
        let half = HEAD_DIM / 2;
        let mut frequencies = vec![0.0; half];
        inverse_frequencies(500.0, &mut frequencies);
        let [mut cos, mut sin] = [(); 2].map(|()| vec![A::ZERO; (SEQ + OFFSET) * half]);
        fill_tables(0..SEQ + OFFSET, &frequencies, &mut cos, &mut sin);
        (cos, sin)
    }

    fn is_right<T: CpuElement>() {
        let (cos, sin) = tables::<T::Acc>();
        let mut rotary = RotaryTables {
            cos: &cos,
            sin: &sin,
            head_dim: HEAD_DIM,
            heads: HEADS,
            seq: SEQ,
            offset: OFFSET,
            first_row: FIRST,
            direction: Rotation::Forward,
        };
        let x: Vec<T> = normals("x", ROWS * WIDTH);
        let dy: Vec<T> = normals("dy", ROWS * WIDTH);
        // The angles of the naive version are rounded differently, and they are up to 6.
        let limit = tolerance::<T>(16.0);
        let mut y = vec![T::default(); ROWS * WIDTH];
        rotary.rotate(ROWS, &x, WIDTH, &mut y, WIDTH);
        assert_close(&y, &naive(&doubles(&x)), limit);

        let mut dx = vec![T::default(); ROWS * WIDTH];
        rotary.direction = Rotation::Inverse;
        rotary.rotate(ROWS, &dy, WIDTH, &mut dx, WIDTH);
        let want = numerical_gradient(&doubles(&x), |x| dot(&naive(x), &doubles(&dy)));
        assert_close(&dx, &want, limit.max(1e-8));

        // In place, inside wider rows: the same bits, and the rest of the rows untouched.
        rotary.direction = Rotation::Forward;
        let stride = WIDTH + 7;
        let mut wide = vec![T::store(T::Acc::ONE); ROWS * stride];
        for r in 0..ROWS {
            wide[r * stride..][..WIDTH].copy_from_slice(&x[r * WIDTH..][..WIDTH]);
        }
        rotary.rotate_in_place(ROWS, &mut wide, stride);
        for r in 0..ROWS {
            assert_eq!(wide[r * stride..][..WIDTH], y[r * WIDTH..][..WIDTH]);
            assert!(wide[r * stride + WIDTH..][..7].iter().all(|v| v.load() == T::Acc::ONE));
        }
    }

    #[test]
    fn rotates_forward_and_back() {
        is_right::<f64>();
        is_right::<f32>();
        is_right::<bf16>();
    }
}
