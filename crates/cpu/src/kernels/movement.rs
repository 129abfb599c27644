//! Moving elements without computing with them: permutations, slices, joins.
//!
//! A thread's share is always a contiguous range of the result, which may begin and end anywhere.

use super::inlined::inlined;
use crate::element::vectorized;

/// The most dims a tensor may have here.
pub const MAX_DIMS: usize = 8;

/// The result's elements from number `first` on, where dim `i` of the result is dim
/// `permutation[i]` of `x`.
///
/// # Panics
/// If there are more than [`MAX_DIMS`] dims, or not as many numbers in both lists.
pub fn permute<T: Copy>(
    x: &[T],
    shape: &[usize],
    permutation: &[usize],
    first: usize,
    out: &mut [T],
) {
    let walk = Walk::new(shape, permutation);
    let mut done = 0;
    while done < out.len() {
        let (row, column) = ((first + done) / walk.inner.size, (first + done) % walk.inner.size);
        let base = walk.row_start(row);
        let whole_rows = (out.len() - done) / walk.inner.size;
        let together = whole_rows.min(walk.rows_side_by_side(row));
        let rest = &mut out[done..];
        if column == 0 && together > 1 {
            let piece = &mut rest[..together * walk.inner.size];
            transpose(&x[base..], walk.inner.stride, together, piece);
            done += piece.len();
        } else {
            let count = (walk.inner.size - column).min(rest.len());
            let from = &x[base + column * walk.inner.stride..];
            if walk.inner.stride == 1 {
                rest[..count].copy_from_slice(&from[..count]);
            } else {
                let strided = from.iter().step_by(walk.inner.stride);
                rest[..count].iter_mut().zip(strided).for_each(|(o, x)| *o = *x);
            }
            done += count;
        }
    }
}

/// The result's elements from number `first` on, where the result is `x[:, start..start + length]`
/// of `x: [outer, dim, inner]`.
pub fn slice<T: Copy>(
    x: &[T],
    [dim, inner]: [usize; 2],
    start: usize,
    length: usize,
    first: usize,
    out: &mut [T],
) {
    let width = length * inner;
    let mut done = 0;
    while done < out.len() {
        let (row, column) = ((first + done) / width, (first + done) % width);
        let count = (width - column).min(out.len() - done);
        let from = (row * dim + start) * inner + column;
        out[done..done + count].copy_from_slice(&x[from..from + count]);
        done += count;
    }
}

/// Writes those elements of one part of a join that lie in this share of the result.
///
/// The result is `[outer, dim, inner]`; the part is `[outer, length, inner]` and takes the indices
/// from `start` on of its dim. `out` is the result's elements from number `first` on. Called once
/// for every part.
pub fn join_part<T: Copy>(
    part: &[T],
    [dim, inner]: [usize; 2],
    start: usize,
    length: usize,
    first: usize,
    out: &mut [T],
) {
    let (width, total) = (length * inner, dim * inner);
    let end = first + out.len();
    if out.is_empty() {
        return;
    }
    for row in first / total..end.div_ceil(total) {
        let begins = row * total + start * inner;
        let (from, to) = (begins.max(first), (begins + width).min(end));
        if from < to {
            let source = &part[row * width + (from - begins)..][..to - from];
            out[from - first..to - first].copy_from_slice(source);
        }
    }
}

/// One dim of the result: its size, and how far apart its elements are in the source.
#[derive(Clone, Copy)]
struct Dim {
    size: usize,
    stride: usize,
}

/// The result's dims with dims of one dropped and dims that stay together merged.
struct Walk {
    outer: [Dim; MAX_DIMS],
    count: usize,
    inner: Dim,
}

impl Walk {
    fn new(shape: &[usize], permutation: &[usize]) -> Self {
        assert_eq!(shape.len(), permutation.len());
        let mut strides = [1; MAX_DIMS];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i];
        }
        let unit = Dim { size: 1, stride: 1 };
        let mut walk = Self { outer: [unit; MAX_DIMS], count: 0, inner: unit };
        for &p in permutation {
            let (dim, last) = (Dim { size: shape[p], stride: strides[p] }, walk.inner);
            if dim.size == 1 {
                continue;
            }
            if last.size == 1 {
                walk.inner = dim;
            } else if last.stride == dim.size * dim.stride {
                walk.inner = Dim { size: last.size * dim.size, ..dim };
            } else {
                walk.outer[walk.count] = last;
                walk.count += 1;
                walk.inner = dim;
            }
        }
        walk
    }

    /// Where the source of a row of the result begins.
    fn row_start(&self, row: usize) -> usize {
        let (mut rest, mut start) = (row, 0);
        for dim in self.outer[..self.count].iter().rev() {
            start += rest % dim.size * dim.stride;
            rest /= dim.size;
        }
        start
    }

    /// How many rows from this one on begin side by side in the source: a matrix to transpose.
    fn rows_side_by_side(&self, row: usize) -> usize {
        match self.outer[..self.count].last() {
            Some(dim) if dim.stride == 1 => dim.size - row % dim.size,
            _ => 1,
        }
    }
}

/// The side of a square that is transposed in registers and first-level cache.
const TILE: usize = 16;

/// `out[r][c] = x[c · stride + r]` for `rows` rows.
fn transpose<T: Copy>(x: &[T], stride: usize, rows: usize, out: &mut [T]) {
    let columns = out.len() / rows;
    vectorized(inlined!(|| {
        for r in (0..rows).step_by(TILE) {
            for c in (0..columns).step_by(TILE) {
                let (height, width) = (TILE.min(rows - r), TILE.min(columns - c));
                if height == TILE && width == TILE {
                    transpose_tile(x, stride, out, columns, r, c);
                    continue;
                }
                for i in r..r + height {
                    for j in c..c + width {
                        out[i * columns + j] = x[j * stride + i];
                    }
                }
            }
        }
    }));
}

#[inline(always)]
fn transpose_tile<T: Copy>(
    x: &[T],
    stride: usize,
    out: &mut [T],
    columns: usize,
    r: usize,
    c: usize,
) {
    // Uses a copy, because cache lines at power-of-two distances evict each other.
    let mut tile = [[x[c * stride + r]; TILE]; TILE];
    for (j, line) in tile.iter_mut().enumerate() {
        line.copy_from_slice(&x[(c + j) * stride + r..][..TILE]);
    }
    for i in 0..TILE {
        let line = &mut out[(r + i) * columns + c..][..TILE];
        for j in 0..TILE {
            line[j] = tile[j][i];
        }
    }
}

/// Some places of a dim of `[outer, from, inner]`, in the order of `places`: the elements of the
/// result from `first` on.
pub fn pick<T: Copy>(
    x: &[T],
    [from, inner]: [usize; 2],
    places: &[usize],
    first: usize,
    out: &mut [T],
) {
    let mut done = 0;
    while done < out.len() {
        let (line, column) = ((first + done) / inner, (first + done) % inner);
        let (outer, index) = (line / places.len(), line % places.len());
        let count = (inner - column).min(out.len() - done);
        let start = (outer * from + places[index]) * inner + column;
        out[done..done + count].copy_from_slice(&x[start..start + count]);
        done += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any share of the result must equal that part of the naive result.
    fn check_shares(want: &[u32], share: impl Fn(usize, &mut [u32])) {
        let n = want.len();
        for (first, end) in [(0, n), (0, n / 2), (n / 2, n), (n / 3, n - n / 5), (1.min(n), n)] {
            let mut out = vec![u32::MAX; end - first];
            share(first, &mut out);
            assert_eq!(out, want[first..end], "elements {first}..{end} of {n}");
        }
    }

    fn naive_permute(x: &[u32], shape: &[usize], permutation: &[usize]) -> Vec<u32> {
        let sizes: Vec<usize> = permutation.iter().map(|&p| shape[p]).collect();
        (0..x.len())
            .map(|mut element| {
                let mut index = vec![0; shape.len()];
                for (size, p) in sizes.iter().zip(permutation).rev() {
                    index[*p] = element % size;
                    element /= size;
                }
                let flat = index.iter().zip(shape).fold(0, |flat, (i, size)| flat * size + i);
                x[flat]
            })
            .collect()
    }

    #[test]
    fn permutations() {
        for (shape, permutation) in [
            (&[37usize, 53][..], &[1usize, 0][..]),
            (&[16, 48], &[1, 0]),
            (&[48, 64], &[0, 1]),
            (&[1, 7, 1], &[2, 1, 0]),
            (&[3, 20, 33], &[0, 2, 1]),
            (&[3, 4, 5], &[2, 1, 0]),
            (&[2, 5, 3, 8], &[0, 2, 1, 3]),
            (&[2, 5, 3, 8], &[2, 0, 3, 1]),
            (&[2, 5, 3, 8], &[3, 0, 1, 2]),
            (&[4, 3, 2, 2, 3], &[1, 3, 4, 0, 2]),
            (&[], &[]),
        ] {
            let x: Vec<u32> = (0..shape.iter().product::<usize>() as u32).collect();
            let want = naive_permute(&x, shape, permutation);
            check_shares(&want, |first, out| permute(&x, shape, permutation, first, out));
        }
    }

    #[test]
    fn slices_and_joins() {
        let (outer, dim, inner) = (3, 7, 4);
        let x: Vec<u32> = (0..(outer * dim * inner) as u32).collect();
        let cut = |start: usize, length: usize| -> Vec<u32> {
            let kept = |i: &usize| (start..start + length).contains(&(i / inner % dim));
            (0..x.len()).filter(kept).map(|i| x[i]).collect()
        };
        for (start, length) in [(0, 7), (2, 3), (6, 1)] {
            check_shares(&cut(start, length), |first, out| {
                slice(&x, [dim, inner], start, length, first, out);
            });
        }
        check_shares(&x, |first, out| {
            for (start, length) in [(0, 2), (2, 4), (6, 1)] {
                join_part(&cut(start, length), [dim, inner], start, length, first, out);
            }
        });
    }
}
