//! Whole tensors on the host, with every element representable in its element type.

use half::{bf16, f16};
use phalanx_ir::DType;
use phalanx_ir::random::Stream;

use crate::error::ReferenceError;

/// The elements of a tensor, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// Any float type: held as `f64`, rounded to the element type.
    Float(Vec<f64>),
    /// `i32` or `u16`.
    Int(Vec<i32>),
    /// `bool`.
    Bool(Vec<bool>),
}

/// An element type, a shape and the elements.
///
/// Tensors compare as floats do, so a NaN differs from itself; compare [`RefTensor::to_bytes`] where
/// bits matter.
#[derive(Clone, Debug, PartialEq)]
pub struct RefTensor {
    dtype: DType,
    shape: Vec<usize>,
    data: TensorData,
}

impl RefTensor {
    /// Values of any element type, converted as the op `cast` converts them.
    pub fn new(dtype: DType, shape: &[usize], values: &[f64]) -> Result<Self, ReferenceError> {
        count(dtype, shape, "elements", 1, values.len())?;
        Ok(Self::rounded(dtype, shape, values.to_vec()))
    }

    /// A tensor of `f64`.
    pub fn from_f64(shape: &[usize], values: &[f64]) -> Result<Self, ReferenceError> {
        Self::new(DType::F64, shape, values)
    }

    /// A tensor of `f32`.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Result<Self, ReferenceError> {
        let wide: Vec<f64> = values.iter().map(|&x| x.into()).collect();
        Self::new(DType::F32, shape, &wide)
    }

    /// A tensor of `i32`.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> Result<Self, ReferenceError> {
        count(DType::I32, shape, "elements", 1, values.len())?;
        let data = TensorData::Int(values.to_vec());
        Ok(Self::from_data(DType::I32, shape, data))
    }

    /// A tensor of `bool`.
    pub fn from_bool(shape: &[usize], values: &[bool]) -> Result<Self, ReferenceError> {
        count(DType::Bool, shape, "elements", 1, values.len())?;
        let data = TensorData::Bool(values.to_vec());
        Ok(Self::from_data(DType::Bool, shape, data))
    }

    /// A single number.
    pub fn scalar(dtype: DType, value: f64) -> Self {
        Self::rounded(dtype, &[], vec![value])
    }

    /// Standard normal numbers: element `i` is the stream's number `i`, rounded.
    pub fn normal(dtype: DType, shape: &[usize], stream: Stream) -> Self {
        let n: usize = shape.iter().product();
        let values = (0..n as u64).map(|i| stream.normal(i)).collect();
        Self::rounded(dtype, shape, values)
    }

    /// Integers uniform in `0..bound`: element `i` is the stream's number `i`.
    pub fn ids(shape: &[usize], bound: u32, stream: Stream) -> Self {
        let n: usize = shape.iter().product();
        let id = |i| stream.below(i, bound.into()) as i32;
        let data = TensorData::Int((0..n as u64).map(id).collect());
        Self::from_data(DType::I32, shape, data)
    }

    /// Reads elements as they lie in memory, little-endian.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self, ReferenceError> {
        count(dtype, shape, "bytes", dtype.size(), bytes.len())?;
        let data = match dtype {
            DType::F64 => TensorData::Float(words(bytes).map(f64::from_le_bytes).collect()),
            DType::F32 => {
                TensorData::Float(words(bytes).map(|w| f32::from_le_bytes(w).into()).collect())
            }
            DType::Bf16 => {
                TensorData::Float(words(bytes).map(|w| bf16::from_le_bytes(w).into()).collect())
            }
            DType::F16 => {
                TensorData::Float(words(bytes).map(|w| f16::from_le_bytes(w).into()).collect())
            }
            DType::I32 => TensorData::Int(words(bytes).map(i32::from_le_bytes).collect()),
            DType::U16 => {
                TensorData::Int(words(bytes).map(|w| u16::from_le_bytes(w).into()).collect())
            }
            DType::Bool => TensorData::Bool(bytes.iter().map(|&b| b != 0).collect()),
        };
        Ok(Self::from_data(dtype, shape, data))
    }

    /// The elements as they lie in memory, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        match &self.data {
            TensorData::Float(values) => (values.iter())
                .flat_map(|&x| match self.dtype {
                    DType::F64 => x.to_le_bytes().to_vec(),
                    DType::Bf16 => bf16::from_f32(x as f32).to_le_bytes().to_vec(),
                    DType::F16 => f16::from_f32(x as f32).to_le_bytes().to_vec(),
                    _ => (x as f32).to_le_bytes().to_vec(),
                })
                .collect(),
            TensorData::Int(values) if self.dtype == DType::U16 => {
                values.iter().flat_map(|&x| (x as u16).to_le_bytes()).collect()
            }
            TensorData::Int(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            TensorData::Bool(values) => values.iter().map(|&x| u8::from(x)).collect(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn data(&self) -> &TensorData {
        &self.data
    }

    /// The elements as `f64`, which holds every value of every element type.
    pub fn values(&self) -> Vec<f64> {
        match &self.data {
            TensorData::Float(values) => values.clone(),
            TensorData::Int(values) => values.iter().map(|&x| x.into()).collect(),
            TensorData::Bool(values) => values.iter().map(|&x| f64::from(u8::from(x))).collect(),
        }
    }

    /// As many values as the shape holds, converted to the element type.
    pub(crate) fn rounded(dtype: DType, shape: &[usize], mut values: Vec<f64>) -> Self {
        let data = match dtype {
            DType::I32 => TensorData::Int(values.into_iter().map(|x| x as i32).collect()),
            DType::U16 => {
                TensorData::Int(values.into_iter().map(|x| i32::from(x as u16)).collect())
            }
            DType::Bool => TensorData::Bool(values.into_iter().map(|x| x != 0.0).collect()),
            _ => {
                values.iter_mut().for_each(|x| *x = round(dtype, *x));
                TensorData::Float(values)
            }
        };
        Self::from_data(dtype, shape, data)
    }

    /// Elements that are known to fit.
    pub(crate) fn from_data(dtype: DType, shape: &[usize], data: TensorData) -> Self {
        debug_assert_eq!(data.len(), shape.iter().product::<usize>());
        let shape = shape.to_vec();
        Self { dtype, shape, data }
    }
}

impl TensorData {
    /// The elements at these offsets, in their order.
    pub(crate) fn gather(&self, offsets: &[usize]) -> Self {
        match self {
            TensorData::Float(x) => TensorData::Float(offsets.iter().map(|&i| x[i]).collect()),
            TensorData::Int(x) => TensorData::Int(offsets.iter().map(|&i| x[i]).collect()),
            TensorData::Bool(x) => TensorData::Bool(offsets.iter().map(|&i| x[i]).collect()),
        }
    }

    fn len(&self) -> usize {
        match self {
            TensorData::Float(x) => x.len(),
            TensorData::Int(x) => x.len(),
            TensorData::Bool(x) => x.len(),
        }
    }
}

/// The nearest number of a float type, ties to even. Values of 16-bit types are rounded through
/// `f32`, the type in which their sums and products are computed everywhere.
fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::Bf16 => bf16::from_f32(x as f32).into(),
        DType::F16 => f16::from_f32(x as f32).into(),
        _ => x,
    }
}

fn count(
    dtype: DType,
    shape: &[usize],
    unit: &'static str,
    each: usize,
    got: usize,
) -> Result<(), ReferenceError> {
    let expected = shape.iter().product::<usize>() * each;
    if got == expected {
        return Ok(());
    }
    Err(ReferenceError::Count { dtype, shape: shape.to_vec(), unit, expected, got })
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_their_type() {
        let third = 1.0 / 3.0;
        let at = |dtype| RefTensor::scalar(dtype, third).values()[0];
        assert_eq!(at(DType::F64), third);
        assert_eq!(at(DType::F32), f64::from(1.0f32 / 3.0));
        // 1/3 is 0x3eaaaaab as a single; its upper half rounds up to 0x3eab.
        assert_eq!(at(DType::Bf16), f64::from(f32::from_bits(0x3eab_0000)));
        // Halfway between 1 and the next bf16 (1 + 2⁻⁷) goes to the even one, 1.
        let tie = RefTensor::scalar(DType::Bf16, 1.0 + 2f64.powi(-8));
        assert_eq!(tie.values(), [1.0]);
        assert_eq!(RefTensor::scalar(DType::I32, -2.7).values(), [-2.0]);
        assert_eq!(RefTensor::scalar(DType::Bool, -2.7).values(), [1.0]);
    }

    #[test]
    fn bytes_go_both_ways() {
        for dtype in DType::ALL {
            let x = RefTensor::normal(dtype, &[3, 4], Stream::named(1, "bytes"));
            let bytes = x.to_bytes();
            assert_eq!(bytes.len(), 12 * dtype.size());
            assert_eq!(RefTensor::from_bytes(dtype, &[3, 4], &bytes).unwrap(), x);
        }
        let x = RefTensor::new(DType::Bf16, &[2], &[1.0, -2.0]).unwrap();
        assert_eq!(x.to_bytes(), [0x80, 0x3f, 0x00, 0xc0]);
    }

    #[test]
    fn wrong_counts_are_errors() {
        let error = RefTensor::from_f64(&[2, 2], &[1.0]).unwrap_err();
        assert_eq!(error.to_string(), "f64[2, 2] holds 4 elements, but 1 were given");
        assert!(RefTensor::from_bytes(DType::F32, &[2], &[0; 7]).is_err());
        assert!(RefTensor::from_i32(&[2], &[0; 3]).is_err());
        assert!(RefTensor::from_bool(&[], &[]).is_err());
    }
}
