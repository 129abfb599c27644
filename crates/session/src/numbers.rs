//! Converts numbers between `f64` and bytes of an engine's element types.

use half::bf16;
use phalanx_ir::DType;

/// Writes values as `dtype` over the start of `out`. Narrow floats are rounded through `f32`, as an
/// update does when it rounds master weights.
///
/// # Panics
/// If `dtype` is not a float type that engines compute in; configurations never name another.
pub(crate) fn encode(dtype: DType, values: &[f64], out: &mut [u8]) {
    fn fill<const N: usize>(values: &[f64], out: &mut [u8], bytes: impl Fn(f64) -> [u8; N]) {
        for (place, &value) in out.chunks_exact_mut(N).zip(values) {
            place.copy_from_slice(&bytes(value));
        }
    }
    match dtype {
        DType::F64 => fill(values, out, f64::to_ne_bytes),
        DType::F32 => fill(values, out, |x| (x as f32).to_ne_bytes()),
        DType::Bf16 => fill(values, out, |x| bf16::from_f32(x as f32).to_ne_bytes()),
        DType::F16 | DType::I32 | DType::Bool => panic!("{dtype} values are not written"),
    }
}

/// Appends numbers as bytes of a float type, one after the other.
///
/// # Panics
/// If `dtype` is not a float type that engines compute in.
pub(crate) fn encode_all(
    dtype: DType,
    values: impl ExactSizeIterator<Item = f64>,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    out.resize(start + values.len() * dtype.size(), 0);
    for (place, value) in out[start..].chunks_exact_mut(dtype.size()).zip(values) {
        encode(dtype, &[value], place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads bytes of a float type.
    fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
        fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            let (chunks, _) = bytes.as_chunks::<N>();
            chunks.iter().map(|&chunk| value(chunk)).collect()
        }
        match dtype {
            DType::F64 => each(bytes, f64::from_ne_bytes),
            DType::F32 => each(bytes, |b| f64::from(f32::from_ne_bytes(b))),
            DType::Bf16 => each(bytes, |b| bf16::from_ne_bytes(b).to_f64()),
            DType::F16 | DType::I32 | DType::Bool => panic!("{dtype} values are not read"),
        }
    }

    #[test]
    fn numbers_come_back_as_their_type_rounds_them() {
        let values = [0.1, -3.0, 1e-30];
        for (dtype, eps) in [(DType::F64, 0.0), (DType::F32, 6e-8), (DType::Bf16, 4e-3)] {
            let mut bytes = vec![0; values.len() * dtype.size()];
            encode(dtype, &values, &mut bytes);
            for (a, b) in values.iter().zip(decode(dtype, &bytes)) {
                assert!((a - b).abs() <= eps * a.abs(), "{dtype}: {a} and {b}");
            }
        }
    }
}
