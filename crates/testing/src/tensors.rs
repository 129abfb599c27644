//! Tensors that tests are written with.

use phalanx_ir::DType;
use phalanx_ir::random::Stream;
use phalanx_reference::RefTensor;

/// Normal numbers that differ from name to name.
pub fn normal(name: &str, shape: &[usize]) -> RefTensor {
    RefTensor::normal(DType::F64, shape, Stream::named(17, name))
}

/// A tensor of `f64`.
pub fn tensor(shape: &[usize], values: &[f64]) -> RefTensor {
    RefTensor::from_f64(shape, values).unwrap()
}

/// A tensor of `i32`.
pub fn ids(shape: &[usize], values: &[i32]) -> RefTensor {
    RefTensor::from_i32(shape, values).unwrap()
}
