//! Tensors on their way between a file and an engine: a shape and its values, row-major.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_ir::DType;
use safetensors::Dtype;

/// A tensor in memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The extents.
    pub shape: Vec<usize>,
    /// The values, as many as the product of the extents.
    pub values: Values,
}

/// Values in the precision they were stored in; 16-bit floats are widened to `f32`, which is exact.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
}

impl Tensor {
    /// A single-precision tensor.
    pub fn f32(shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Self {
        Tensor { shape: shape.into(), values: Values::F32(values) }
    }

    /// A double-precision tensor.
    pub fn f64(shape: impl Into<Vec<usize>>, values: Vec<f64>) -> Self {
        Tensor { shape: shape.into(), values: Values::F64(values) }
    }

    /// A tensor of these native-endian bytes of a float type.
    ///
    /// # Panics
    /// If `dtype` is no float that parameters are kept in.
    pub fn from_bytes(shape: impl Into<Vec<usize>>, dtype: DType, bytes: &[u8]) -> Self {
        fn each<const N: usize, T>(bytes: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
            let (chunks, _) = bytes.as_chunks::<N>();
            chunks.iter().map(|&chunk| value(chunk)).collect()
        }
        let values = match dtype {
            DType::F64 => Values::F64(each(bytes, f64::from_ne_bytes)),
            DType::F32 => Values::F32(each(bytes, f32::from_ne_bytes)),
            DType::Bf16 => Values::F32(each(bytes, |b| bf16::from_ne_bytes(b).to_f32())),
            DType::F16 => Values::F32(each(bytes, |b| f16::from_ne_bytes(b).to_f32())),
            DType::I32 | DType::Bool => panic!("parameters are not kept in {dtype}"),
        };
        Tensor { shape: shape.into(), values }
    }

    /// Some of the values as native-endian bytes of a float type, rounded where they were wider; none if
    /// there are fewer.
    ///
    /// # Panics
    /// If `dtype` is no float that parameters are kept in.
    pub fn to_bytes(&self, elements: Range<usize>, dtype: DType) -> Option<Vec<u8>> {
        fn each<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
            values.iter().flat_map(|&x| bytes(x)).collect()
        }
        fn narrow(values: impl Iterator<Item = f32>, dtype: DType) -> Vec<u8> {
            match dtype {
                DType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
                DType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
                DType::F16 => values.flat_map(|x| f16::from_f32(x).to_ne_bytes()).collect(),
                other => panic!("parameters are not kept in {other}"),
            }
        }
        Some(match (&self.values, dtype) {
            (Values::F32(v), DType::F64) => each(v.get(elements)?, |x| f64::from(x).to_ne_bytes()),
            (Values::F64(v), DType::F64) => each(v.get(elements)?, f64::to_ne_bytes),
            (Values::F32(v), dtype) => narrow(v.get(elements)?.iter().copied(), dtype),
            (Values::F64(v), dtype) => narrow(v.get(elements)?.iter().map(|&x| x as f32), dtype),
        })
    }

    /// The values in single precision, rounded where they were wider.
    pub fn to_f32(&self) -> Vec<f32> {
        match &self.values {
            Values::F32(v) => v.clone(),
            Values::F64(v) => v.iter().map(|&x| x as f32).collect(),
        }
    }

    /// The values in double precision.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.values {
            Values::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Values::F64(v) => v.clone(),
        }
    }

    /// The element type of the values in memory.
    pub fn dtype(&self) -> DType {
        match self.values {
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
        }
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        match &self.values {
            Values::F32(v) => v.len(),
            Values::F64(v) => v.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there are as many values as the shape says.
    pub(super) fn is_whole(&self) -> bool {
        self.shape.iter().product::<usize>() == self.len()
    }

    /// The transpose of a matrix.
    pub(super) fn transposed(&self) -> Self {
        let (rows, cols) = (self.shape[0], self.shape[1]);
        Tensor {
            shape: vec![cols, rows],
            values: match &self.values {
                Values::F32(v) => Values::F32(transpose(v, rows, cols)),
                Values::F64(v) => Values::F64(transpose(v, rows, cols)),
            },
        }
    }

    /// Part `part` of `of` equal parts along the last dim.
    pub(super) fn part(&self, part: usize, of: usize) -> Self {
        let mut shape = self.shape.clone();
        let width = shape.last().copied().unwrap_or(1);
        let share = width / of;
        if let Some(last) = shape.last_mut() {
            *last = share;
        }
        let range = part * share..(part + 1) * share;
        Tensor {
            shape,
            values: match &self.values {
                Values::F32(v) => Values::F32(columns(v, width, range)),
                Values::F64(v) => Values::F64(columns(v, width, range)),
            },
        }
    }

    /// Parts of equal shape laid side by side along the last dim: the inverse of [`Tensor::part`].
    /// Parts of different precision are joined in double precision.
    pub(super) fn join(parts: &[&Tensor]) -> Self {
        let mut shape = parts[0].shape.clone();
        let share = shape.last().copied().unwrap_or(1);
        if let Some(last) = shape.last_mut() {
            *last = share * parts.len();
        }
        let singles: Option<Vec<&[f32]>> = parts
            .iter()
            .map(|p| match &p.values {
                Values::F32(v) => Some(v.as_slice()),
                Values::F64(_) => None,
            })
            .collect();
        let values = match singles {
            Some(singles) => Values::F32(side_by_side(&singles, share)),
            None => {
                let wide: Vec<Vec<f64>> = parts.iter().map(|p| p.to_f64()).collect();
                let wide: Vec<&[f64]> = wide.iter().map(Vec::as_slice).collect();
                Values::F64(side_by_side(&wide, share))
            }
        };
        Tensor { shape, values }
    }

    /// The values as little-endian bytes, rounded to nearest even where the file's type is narrower.
    pub(super) fn encode(&self, stored: Stored) -> Vec<u8> {
        fn bytes<T: Copy, const N: usize>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
            values.iter().flat_map(|&x| encode(x)).collect()
        }
        match (&self.values, stored) {
            (Values::F32(v), Stored::F32) => bytes(v, f32::to_le_bytes),
            (Values::F32(v), Stored::F64) => bytes(v, |x| f64::from(x).to_le_bytes()),
            (Values::F32(v), Stored::Bf16) => bytes(v, |x| bf16::from_f32(x).to_le_bytes()),
            (Values::F32(v), Stored::F16) => bytes(v, |x| f16::from_f32(x).to_le_bytes()),
            (Values::F64(v), Stored::F32) => bytes(v, |x| (x as f32).to_le_bytes()),
            (Values::F64(v), Stored::F64) => bytes(v, f64::to_le_bytes),
            (Values::F64(v), Stored::Bf16) => bytes(v, |x| bf16::from_f64(x).to_le_bytes()),
            (Values::F64(v), Stored::F16) => bytes(v, |x| f16::from_f64(x).to_le_bytes()),
        }
    }
}

/// The element types in which parameters are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    F64,
    F32,
    Bf16,
    F16,
}

impl Stored {
    /// `None` for types that are not floats.
    pub(super) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => Some(Stored::F64),
            DType::F32 => Some(Stored::F32),
            DType::Bf16 => Some(Stored::Bf16),
            DType::F16 => Some(Stored::F16),
            DType::I32 | DType::Bool => None,
        }
    }

    /// The name in a header, the name in `config.json`, and the bytes of an element.
    fn facts(self) -> (&'static str, &'static str, usize) {
        match self {
            Stored::F64 => ("F64", "float64", 8),
            Stored::F32 => ("F32", "float32", 4),
            Stored::Bf16 => ("BF16", "bfloat16", 2),
            Stored::F16 => ("F16", "float16", 2),
        }
    }

    pub(super) fn header_name(self) -> &'static str {
        self.facts().0
    }

    pub(super) fn torch_name(self) -> &'static str {
        self.facts().1
    }

    pub(super) fn size(self) -> usize {
        self.facts().2
    }
}

/// The values of little-endian bytes, or `None` if the type is not a float that can be trained.
pub(super) fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Values> {
    Some(match dtype {
        Dtype::F32 => Values::F32(elements(bytes, f32::from_le_bytes)),
        Dtype::F64 => Values::F64(elements(bytes, f64::from_le_bytes)),
        Dtype::BF16 => Values::F32(elements(bytes, |b| bf16::from_le_bytes(b).to_f32())),
        Dtype::F16 => Values::F32(elements(bytes, |b| f16::from_le_bytes(b).to_f32())),
        _ => return None,
    })
}

fn elements<T, const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| decode(chunk)).collect()
}

/// Rows are taken in bands, so that the writes of a band stay within a few cache lines per column.
fn transpose<T: Copy + Default>(source: &[T], rows: usize, cols: usize) -> Vec<T> {
    const BAND: usize = 32;
    let mut out = vec![T::default(); source.len()];
    for band in (0..rows).step_by(BAND) {
        for col in 0..cols {
            for row in band..rows.min(band + BAND) {
                out[col * rows + row] = source[row * cols + col];
            }
        }
    }
    out
}

fn columns<T: Copy>(source: &[T], width: usize, range: std::ops::Range<usize>) -> Vec<T> {
    source.chunks_exact(width).flat_map(|row| row[range.clone()].iter().copied()).collect()
}

fn side_by_side<T: Copy>(parts: &[&[T]], share: usize) -> Vec<T> {
    let rows = parts[0].len() / share;
    (0..rows)
        .flat_map(|row| parts.iter().map(move |p| &p[row * share..][..share]))
        .flatten()
        .copied()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_moves_every_entry() {
        let (rows, cols) = (70, 3);
        let t = Tensor::f32([rows, cols], (0..rows * cols).map(|i| i as f32).collect());
        let turned = t.transposed();
        assert_eq!(turned.shape, [cols, rows]);
        let values = turned.to_f32();
        for r in 0..rows {
            for c in 0..cols {
                assert_eq!(values[c * rows + r], (r * cols + c) as f32);
            }
        }
    }

    #[test]
    fn joining_the_parts_gives_the_whole() {
        let whole = Tensor::f64([2, 6], (0..12).map(f64::from).collect());
        let parts: Vec<Tensor> = (0..3).map(|i| whole.part(i, 3)).collect();
        assert_eq!(parts[1], Tensor::f64([2, 2], vec![2.0, 3.0, 8.0, 9.0]));
        assert_eq!(Tensor::join(&parts.iter().collect::<Vec<_>>()), whole);
        let vector = Tensor::f32([6], vec![0., 1., 2., 3., 4., 5.]);
        assert_eq!(vector.part(2, 3), Tensor::f32([2], vec![4., 5.]));
    }

    #[test]
    fn narrow_floats_round_to_nearest_even_and_widen_exactly() {
        // 1 + 2^-8 lies halfway between two bf16 values; the even one is 1.
        let t = Tensor::f32([3], vec![1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5]);
        let bytes = t.encode(Stored::Bf16);
        let back = decode(Dtype::BF16, &bytes).unwrap();
        assert_eq!(back, Values::F32(vec![1.0, 1.015625, -2.5]));
        let bytes = t.encode(Stored::F16);
        assert_eq!(decode(Dtype::F16, &bytes).unwrap(), t.values);
        assert!(decode(Dtype::I64, &[0; 8]).is_none());
    }
}
