//! Moving elements without computing with them: permutations, slices, joins, casts; and dropout.
//!
//! A thread's share is always a contiguous range of the result, which may begin and end anywhere.

use half::bf16;
use phalanx_ir::random::philox;

use crate::element::{Element, Float, vectorized};

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
        let (row, column) = (
            (first + done) / walk.inner.size,
            (first + done) % walk.inner.size,
        );
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
                rest[..count]
                    .iter_mut()
                    .zip(strided)
                    .for_each(|(o, x)| *o = *x);
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
    for row in first / total..end.div_ceil(total) {
        let begins = row * total + start * inner;
        let (from, to) = (begins.max(first), (begins + width).min(end));
        if from < to {
            let source = &part[row * width + (from - begins)..][..to - from];
            out[from - first..to - first].copy_from_slice(source);
        }
    }
}

/// `out = x` in another type, rounded to nearest; towards zero for integers, and NaN becomes 0.
pub fn cast<S: Scalar, D: Scalar>(x: &[S], out: &mut [D]) {
    vectorized(
        #[inline(always)]
        || {
            for (out, x) in out.iter_mut().zip(x) {
                *out = D::from_f64(x.to_f64());
            }
        },
    );
}

/// What the random numbers of one dropout depend on, besides the element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// Philox's key.
    pub key: [u32; 2],
    /// The upper half of Philox's counter: which op this is, in which step.
    pub purpose: [u32; 2],
}

/// `out = x / (1 − p)` where an element is kept, which it is with probability `1 − p`, else zero.
///
/// `first` is the global index of the first element. Element `i` is kept iff word `i % 4` of
/// Philox's block `i / 4` is at least `p · 2³²`. The same call on `dy` gives the gradient.
pub fn dropout<T: Element>(x: &[T], p: f64, key: DropoutKey, first: u64, out: &mut [T]) {
    let threshold = (p * 2f64.powi(32)) as u64;
    let Ok(threshold) = u32::try_from(threshold) else {
        out.fill(T::default());
        return;
    };
    let factor = T::Acc::from_f64(1.0 / (1.0 - p));
    // Up to where the first block of Philox begins.
    let head = (first.wrapping_neg() % 4).min(out.len() as u64) as usize;
    let (x_head, x) = x.split_at(head);
    let (out_head, out) = out.split_at_mut(head);
    let words = key.words(first / 4);
    let word_of = |i: usize| words[(first % 4) as usize + i];
    for (i, (out, x)) in out_head.iter_mut().zip(x_head).enumerate() {
        *out = keep(*x, word_of(i), threshold, factor);
    }
    vectorized(
        #[inline(always)]
        || {
            let mut block = first.div_ceil(4);
            for (x, out) in x.chunks(4 * BLOCKS).zip(out.chunks_mut(4 * BLOCKS)) {
                let mut words = [0; 4 * BLOCKS];
                for (i, four) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    *four = key.words(block + i as u64);
                }
                for ((out, x), word) in out.iter_mut().zip(x).zip(&words) {
                    *out = keep(*x, *word, threshold, factor);
                }
                block += BLOCKS as u64;
            }
        },
    );
}

/// A stored type that can be cast to any other.
///
/// All go through `f64`, which holds every value of every type; a compiler sees through it where a
/// shorter way gives the same bits.
pub trait Scalar: Copy {
    /// The value; exact.
    fn to_f64(self) -> f64;
    /// The nearest value of this type.
    fn from_f64(value: f64) -> Self;
}

macro_rules! scalar {
    ($($type:ty: |$x:ident| $to:expr, |$v:ident| $from:expr;)*) => {$(
        impl Scalar for $type {
            #[inline(always)]
            fn to_f64(self) -> f64 {
                let $x = self;
                $to
            }

            #[inline(always)]
            fn from_f64($v: f64) -> Self {
                $from
            }
        }
    )*};
}

scalar! {
    f64: |x| x, |v| v;
    f32: |x| f64::from(x), |v| v as f32;
    bf16: |x| f64::from(x.load()), |v| bf16::store(v as f32);
    i32: |x| f64::from(x), |v| v as i32;
    u8: |x| f64::from(x), |v| u8::from(v != 0.0);
}

/// Blocks of random words that are made at a time: enough to fill the vector registers.
const BLOCKS: usize = 64;

impl DropoutKey {
    #[inline(always)]
    fn words(&self, block: u64) -> [u32; 4] {
        let [low, high] = self.purpose;
        philox(self.key, [block as u32, (block >> 32) as u32, low, high])
    }
}

#[inline(always)]
fn keep<T: Element>(x: T, word: u32, threshold: u32, factor: T::Acc) -> T {
    let scaled = T::store(x.load() * factor);
    if word >= threshold {
        scaled
    } else {
        T::default()
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
        let mut walk = Self {
            outer: [unit; MAX_DIMS],
            count: 0,
            inner: unit,
        };
        for &p in permutation {
            let (dim, last) = (
                Dim {
                    size: shape[p],
                    stride: strides[p],
                },
                walk.inner,
            );
            if dim.size == 1 {
                continue;
            }
            if last.size == 1 {
                walk.inner = dim;
            } else if last.stride == dim.size * dim.stride {
                walk.inner = Dim {
                    size: last.size * dim.size,
                    ..dim
                };
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
    vectorized(
        #[inline(always)]
        || {
            for r in (0..rows).step_by(TILE) {
                for c in (0..columns).step_by(TILE) {
                    let (height, width) = (TILE.min(rows - r), TILE.min(columns - c));
                    if height == TILE && width == TILE {
                        transpose_tile(x, stride, out, columns, r, c);
                    } else {
                        for i in r..r + height {
                            for j in c..c + width {
                                out[i * columns + j] = x[j * stride + i];
                            }
                        }
                    }
                }
            }
        },
    );
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
    let mut tile = [[x[c * stride + r]; TILE]; TILE];
    for j in 0..TILE {
        let source = &x[(c + j) * stride + r..][..TILE];
        for i in 0..TILE {
            tile[i][j] = source[i];
        }
    }
    for (i, line) in tile.iter().enumerate() {
        out[(r + i) * columns + c..][..TILE].copy_from_slice(line);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{doubles, normals};
    use super::*;

    /// Any share of the result must equal that part of the naive result.
    fn check_shares(want: &[u32], share: impl Fn(usize, &mut [u32])) {
        let n = want.len();
        for (first, end) in [
            (0, n),
            (0, n / 2),
            (n / 2, n),
            (n / 3, n - n / 5),
            (1.min(n), n),
        ] {
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
                let flat = index
                    .iter()
                    .zip(shape)
                    .fold(0, |flat, (i, size)| flat * size + i);
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
            check_shares(&want, |first, out| {
                permute(&x, shape, permutation, first, out)
            });
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

    #[test]
    fn casts() {
        fn to<S: Scalar, D: Scalar + Default + Clone>(x: &[S]) -> Vec<D> {
            let mut out = vec![D::default(); x.len()];
            cast(x, &mut out);
            out
        }
        let x = [
            1.5f64,
            -2.75,
            0.0,
            1e10,
            -1e10,
            f64::NAN,
            1.003_906_25,
            16_777_217.0,
        ];
        assert_eq!(
            to::<_, i32>(&x),
            [1, -2, 0, i32::MAX, i32::MIN, 0, 1, 16_777_217]
        );
        assert_eq!(to::<_, u8>(&x), [1, 1, 0, 1, 1, 1, 1, 1]);
        let singles = to::<_, f32>(&x);
        assert!(
            singles
                .iter()
                .zip(x)
                .all(|(s, x)| s.to_bits() == (x as f32).to_bits())
        );
        let narrow = to::<_, bf16>(&singles);
        let same = |(b, s): (&bf16, &f32)| b.to_bits() == bf16::from_f32(*s).to_bits();
        assert!(narrow.iter().zip(&singles).all(same));
        assert_eq!(to::<_, f64>(&narrow[..3]), x[..3]);
        assert_eq!(to::<_, f32>(&[16_777_217, -3]), [16_777_216.0, -3.0]);
        assert_eq!(to::<_, bf16>(&[0u8, 1]), [bf16::ZERO, bf16::ONE]);
        assert_eq!(to::<_, i32>(&[0u8, 1]), [0, 1]);
        assert_eq!(to::<_, u8>(&[7, 0, -1]), [1, 0, 1]);
    }

    const KEY: DropoutKey = DropoutKey {
        key: [11, 12],
        purpose: [13, 14],
    };

    #[test]
    fn dropout_follows_the_global_index() {
        let x: Vec<f32> = normals("x", 1000);
        // Near 2³⁴ the block's number outgrows one word of the counter.
        for first in [0, 1, 2, 3, 4, 17, (1 << 34) - 500] {
            let mut out = vec![9.0; x.len()];
            dropout(&x, 0.3, KEY, first, &mut out);
            for (i, (out, x)) in (first..).zip(out.iter().zip(&x)) {
                let counter = [(i / 4) as u32, ((i / 4) >> 32) as u32, 13, 14];
                let word = philox([11, 12], counter)[(i % 4) as usize];
                let kept = f64::from(word) >= 0.3 * 2f64.powi(32);
                assert_eq!(
                    *out,
                    if kept { x * (1.0 / 0.7) } else { 0.0 },
                    "element {i}"
                );
            }
            let mut piece = vec![9.0; 2];
            dropout(&x[501..503], 0.3, KEY, first + 501, &mut piece);
            assert_eq!(piece, out[501..503]);
        }
    }

    #[test]
    fn dropout_keeps_its_share_and_the_mean() {
        let x = vec![bf16::ONE; 100_000];
        let mut out = x.clone();
        for p in [0.1, 0.5] {
            dropout(&x, p, KEY, 0, &mut out);
            let kept = out.iter().filter(|v| **v != bf16::ZERO).count() as f64 / 1e5;
            assert!((kept - (1.0 - p)).abs() < 0.006, "kept {kept} at {p}");
            let mean = doubles(&out).iter().sum::<f64>() / 1e5;
            assert!((mean - 1.0).abs() < 0.01, "mean {mean} at {p}");
        }
        dropout(&x, 0.0, KEY, 0, &mut out);
        assert_eq!(out, x);
        dropout(&x, 1.0, KEY, 0, &mut out);
        assert!(out.iter().all(|v| *v == bf16::ZERO));
    }
}
