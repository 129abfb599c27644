//! Tensors on their way between a file and an engine: a shape and its values, row-major.

use std::io::{self, Write};
use std::ops::Range;

use half::{bf16, f16};
use phalanx_ir::DType;
use safetensors::Dtype;

/// A tensor in memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightTensor {
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

impl WeightTensor {
    /// A single-precision tensor.
    pub fn f32(shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Self {
        WeightTensor { shape: shape.into(), values: Values::F32(values) }
    }

    /// A double-precision tensor.
    pub fn f64(shape: impl Into<Vec<usize>>, values: Vec<f64>) -> Self {
        WeightTensor { shape: shape.into(), values: Values::F64(values) }
    }

    /// A tensor of these native-endian bytes of a float type.
    ///
    /// # Panics
    /// If `dtype` is not a float type in which parameters are kept.
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
            DType::I32 | DType::U16 | DType::Bool => panic!("parameters are not kept in {dtype}"),
        };
        WeightTensor { shape: shape.into(), values }
    }

    /// Some of the values as native-endian bytes of a float type, rounded if they were wider;
    /// `None` if the range is too long.
    ///
    /// # Panics
    /// If `dtype` is not a float type in which parameters are kept.
    pub fn to_bytes(&self, elements: Range<usize>, dtype: DType) -> Option<Vec<u8>> {
        fn narrow(values: impl Iterator<Item = f32>, dtype: DType) -> Vec<u8> {
            match dtype {
                DType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
                DType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
                DType::F16 => values.flat_map(|x| f16::from_f32(x).to_ne_bytes()).collect(),
                other => panic!("parameters are not kept in {other}"),
            }
        }
        Some(match (&self.values, dtype) {
            (Values::F32(v), DType::F64) => bytes(v.get(elements)?, |x| f64::from(x).to_ne_bytes()),
            (Values::F64(v), DType::F64) => bytes(v.get(elements)?, f64::to_ne_bytes),
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

    /// Whether all values are finite.
    pub fn is_finite(&self) -> bool {
        match &self.values {
            Values::F32(v) => v.iter().all(|x| x.is_finite()),
            Values::F64(v) => v.iter().all(|x| x.is_finite()),
        }
    }

    /// Whether there are as many values as the shape says.
    pub(super) fn is_whole(&self) -> bool {
        self.shape.iter().product::<usize>() == self.len()
    }

    /// Writes some of the values as little-endian bytes, rounded to nearest even if the file's type
    /// is narrower. Works in small pieces, so that there is no second full copy.
    pub(super) fn encode(
        &self,
        elements: Range<usize>,
        stored: Stored,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        const PIECE: usize = 1 << 14;
        for start in elements.clone().step_by(PIECE) {
            let piece = start..elements.end.min(start + PIECE);
            let bytes = match &self.values {
                Values::F32(v) => encode_singles(&v[piece], stored),
                Values::F64(v) => encode_doubles(&v[piece], stored),
            };
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

fn encode_singles(values: &[f32], stored: Stored) -> Vec<u8> {
    match stored {
        Stored::F64 => bytes(values, |x| f64::from(x).to_le_bytes()),
        Stored::F32 => bytes(values, f32::to_le_bytes),
        Stored::Bf16 => bytes(values, |x| bf16::from_f32(x).to_le_bytes()),
        Stored::F16 => bytes(values, |x| f16::from_f32(x).to_le_bytes()),
    }
}

fn encode_doubles(values: &[f64], stored: Stored) -> Vec<u8> {
    match stored {
        Stored::F64 => bytes(values, f64::to_le_bytes),
        Stored::F32 => bytes(values, |x| (x as f32).to_le_bytes()),
        Stored::Bf16 => bytes(values, |x| bf16::from_f64(x).to_le_bytes()),
        Stored::F16 => bytes(values, |x| f16::from_f64(x).to_le_bytes()),
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| encode(x)).collect()
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
            DType::I32 | DType::U16 | DType::Bool => None,
        }
    }

    /// The type that a file's header names; `None` if it is not a float that can be trained.
    pub(super) fn named(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F64 => Some(Stored::F64),
            Dtype::F32 => Some(Stored::F32),
            Dtype::BF16 => Some(Stored::Bf16),
            Dtype::F16 => Some(Stored::F16),
            _ => None,
        }
    }

    pub(super) fn dtype(self) -> DType {
        match self {
            Stored::F64 => DType::F64,
            Stored::F32 => DType::F32,
            Stored::Bf16 => DType::Bf16,
            Stored::F16 => DType::F16,
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

/// The values of little-endian bytes.
pub(super) fn decode(stored: Stored, bytes: &[u8]) -> Values {
    match stored {
        Stored::F64 => Values::F64(elements(bytes, f64::from_le_bytes)),
        Stored::F32 => Values::F32(elements(bytes, f32::from_le_bytes)),
        Stored::Bf16 => Values::F32(elements(bytes, |b| bf16::from_le_bytes(b).to_f32())),
        Stored::F16 => Values::F32(elements(bytes, |b| f16::from_le_bytes(b).to_f32())),
    }
}

fn elements<T, const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| decode(chunk)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_floats_round_to_nearest_even_and_widen_exactly() {
        // 1 + 2^-8 lies halfway between two bf16 values; the even one is 1.
        let t = WeightTensor::f32([3], vec![1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5]);
        let encoded = |range, stored| {
            let mut out = Vec::new();
            t.encode(range, stored, &mut out).unwrap();
            out
        };
        let back = decode(Stored::Bf16, &encoded(0..3, Stored::Bf16));
        assert_eq!(back, Values::F32(vec![1.0, 1.015625, -2.5]));
        assert_eq!(decode(Stored::F16, &encoded(0..3, Stored::F16)), t.values);
        assert_eq!(encoded(2..3, Stored::F32), (-2.5f32).to_le_bytes());
        assert!(Stored::named(Dtype::I64).is_none());
    }

    #[test]
    fn a_long_tensor_is_written_in_pieces_without_a_seam() {
        let values: Vec<f64> = (0..40_000).map(f64::from).collect();
        let mut out = Vec::new();
        WeightTensor::f64([40_000], values.clone())
            .encode(1..39_999, Stored::F64, &mut out)
            .unwrap();
        assert_eq!(decode(Stored::F64, &out), Values::F64(values[1..39_999].to_vec()));
    }
}
