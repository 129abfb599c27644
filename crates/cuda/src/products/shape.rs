//! Products in the library's terms.
//!
//! The library thinks in columns. A row-major matrix is the transpose of a column-major one in the
//! same memory, so a row-major result is asked for as its transpose, with the operands exchanged.

use phalanx_ir::{DType, ProductLoops, StridedLoop};

/// A product in the library's terms: `D[m×n] = op(A)·op(B) + beta·C`, columns first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ProductShape {
    /// Whether the library's A is the program's second operand.
    pub(super) swapped: bool,
    pub(super) sides: [usize; 3],
    /// Whether A and B are transposed.
    pub(super) transposed: [bool; 2],
    /// Leading dimensions of A, B and D.
    pub(super) leading: [usize; 3],
    /// How many products, and the elements from one to the next in A, B and D.
    pub(super) batch: (usize, [usize; 3]),
    pub(super) of: DType,
    pub(super) out: DType,
    /// Bytes of which all addresses of A, B and D are multiples.
    pub(super) aligned: [u32; 3],
    /// What is computed besides the product.
    pub(super) epilogue: Epilogue,
}

/// What the library computes with a product, before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Epilogue {
    Nothing,
    /// A number for each row of D is added.
    Bias,
    /// The same, and the GELU of the sum is stored too.
    BiasAndGelu,
}

impl ProductShape {
    /// The library's terms for these loops, or nothing if it cannot describe some matrix.
    pub(crate) fn of(
        loops: &ProductLoops,
        batch: Option<StridedLoop>,
        [of, out]: [DType; 2],
    ) -> Option<Self> {
        let StridedLoop { size, .. } = loops.inner;
        let nothing = size == 0 || loops.sums.iter().any(|axis| axis.size == 0);
        if nothing || loops.rows.size == 0 || loops.cols.size == 0 {
            return None;
        }
        let (rows, cols) = (loops.rows, loops.cols);
        // Along which index results are neighbours.
        let swapped = cols.strides[2] == 1 || (rows.strides[2] != 1 && cols.size == 1);
        let (m, n, first, second) = match swapped {
            true => (cols, rows, 1, 0),
            false => (rows, cols, 0, 1),
        };
        let k = loops.inner;
        let (near, result) = matrix((m.size, m.strides[2]), (n.size, n.strides[2]))?;
        if near {
            return None;
        }
        let (ta, lda) = matrix((m.size, m.strides[first]), (k.size, k.strides[first]))?;
        let (tb, ldb) = matrix((k.size, k.strides[second]), (n.size, n.strides[second]))?;
        let strides = |t: usize| batch.map_or(0, |axis| axis.strides[t]);
        let steps = [strides(first), strides(second), strides(2)];
        // Every loop around the product moves all three addresses.
        let align = |t: usize, size: usize| {
            let around = loops.outer.iter().chain(&loops.sums).map(|axis| axis.strides[t] * size);
            around.fold(16, |all: usize, step| match step {
                0 => all,
                _ => all.min(1 << step.trailing_zeros()),
            }) as u32
        };
        Some(Self {
            swapped,
            sides: [m.size, n.size, k.size],
            transposed: [ta, tb],
            leading: [lda, ldb, result],
            batch: (batch.map_or(1, |axis| axis.size), steps),
            of,
            out,
            aligned: [align(first, of.size()), align(second, of.size()), align(2, out.size())],
            epilogue: Epilogue::Nothing,
        })
    }

    /// The same with a bias for each column of the program's result, if these are the rows of D, and with
    /// the GELU of the sum.
    pub(crate) fn with_bias(self, gelu: bool) -> Option<Self> {
        let epilogue = if gelu { Epilogue::BiasAndGelu } else { Epilogue::Bias };
        self.swapped.then_some(Self { epilogue, ..self })
    }

    /// Elements from the first to the last of A, B and D.
    pub(super) fn extents(&self) -> [usize; 3] {
        let [m, n, k] = self.sides;
        let [ta, tb] = self.transposed;
        let columns = [if ta { m } else { k }, if tb { k } else { n }, n];
        let (count, steps) = self.batch;
        std::array::from_fn(|i| self.leading[i] * columns[i] + (count - 1) * steps[i])
    }

    /// Multiplications and additions of all products of the batch.
    pub(super) fn flops(&self) -> usize {
        2 * self.batch.0 * self.sides.iter().product::<usize>()
    }
}

/// Whether a matrix, whose rows and columns have these sizes and strides, must be transposed to have its
/// columns together, and its leading dimension.
fn matrix(rows: (usize, usize), cols: (usize, usize)) -> Option<(bool, usize)> {
    let together = |(size, stride): (usize, usize)| size == 1 || stride == 1;
    // A stride that is never taken can be any.
    let leading = |(size, stride): (usize, usize), inner: usize| {
        if size == 1 { inner } else { stride }
    };
    if together(rows) && leading(cols, rows.0) >= rows.0 {
        return Some((false, leading(cols, rows.0)));
    }
    if together(cols) && leading(rows, cols.0) >= cols.0 {
        return Some((true, leading(rows, cols.0)));
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn shape(spec: &str, a: &[usize], b: &[usize], out: &[usize]) -> Option<ProductShape> {
        let loops = ProductLoops::new(&spec.parse().unwrap(), [a, b, out], a);
        let batch = loops.outer.iter().copied().max_by_key(|axis| axis.size);
        ProductShape::of(&loops, batch, [DType::Bf16, DType::F32])
    }

    #[test]
    fn products_of_layers_are_described_without_copies() {
        // y = x·w: asked for as yᵀ = wᵀ·xᵀ, in which both lie as columns.
        let forward = shape("bsd,de->bse", &[2, 3, 4], &[4, 5], &[2, 3, 5]).unwrap();
        assert!(forward.swapped);
        assert_eq!((forward.sides, forward.transposed), ([5, 6, 4], [false, false]));
        assert_eq!(forward.leading, [5, 4, 5]);
        let inputs = shape("bse,de->bsd", &[2, 3, 5], &[4, 5], &[2, 3, 4]).unwrap();
        assert_eq!((inputs.sides, inputs.transposed), ([4, 6, 5], [true, false]));
        let weights = shape("bsd,bse->de", &[2, 3, 4], &[2, 3, 5], &[4, 5]).unwrap();
        assert_eq!((weights.sides, weights.transposed), ([5, 4, 6], [false, true]));
        // Of the library's operands, which are the program's in the other order.
        assert_eq!(forward.extents(), [4 * 5, 6 * 4, 6 * 5]);
        assert_eq!(inputs.extents(), [4 * 5, 6 * 5, 6 * 4]);
        assert_eq!(weights.extents(), [6 * 5, 6 * 4, 4 * 5]);
        assert_eq!(weights.flops(), 2 * 4 * 5 * 6);
    }

    #[test]
    fn batches_have_strides_and_odd_ones_limit_the_alignment() {
        let scores = shape("bshd,bthd->bhst", &[2, 3, 7, 5], &[2, 4, 7, 5], &[2, 7, 3, 4]).unwrap();
        assert_eq!(scores.batch, (7, [5, 5, 12]));
        assert_eq!(scores.aligned, [2, 2, 16]);
        assert_eq!(scores.extents(), [6 * 5 + 4 * 35, 6 * 5 + 3 * 35, 6 * 12 + 4 * 3]);
    }
}
