//! Converts numbers between `f64` and bytes of an engine's element types.

use half::{bf16, f16};
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
        DType::F16 => fill(values, out, |x| f16::from_f32(x as f32).to_ne_bytes()),
        DType::I32 | DType::U16 | DType::Bool => panic!("{dtype} values are not written"),
    }
}

/// Writes numbers as bytes of a float type, one after the other.
///
/// # Panics
/// If `dtype` is not a float type that engines compute in.
pub(crate) fn encode_all(dtype: DType, values: impl Iterator<Item = f64>, out: &mut [u8]) {
    for (place, value) in out.chunks_exact_mut(dtype.size()).zip(values) {
        encode(dtype, &[value], place);
    }
}

/// Bytes of f32 as bytes of bf16, as [`encode`] rounds them.
pub(crate) fn rounded(full: &[u8]) -> Vec<u8> {
    let mut narrow = vec![0; full.len() / 2];
    on_all_cores(&mut narrow, 2, &|first, own| {
        let (values, _) = full[4 * first..].as_chunks::<4>();
        for (place, value) in own.chunks_exact_mut(2).zip(values) {
            place.copy_from_slice(&bf16::from_f32(f32::from_ne_bytes(*value)).to_ne_bytes());
        }
    });
    narrow
}

/// Values of so many bytes that a core takes at least.
const FEW: usize = 1 << 16;

/// Fills values of `size` bytes: each core calls `fill` for a range of them, with the number of its
/// first one.
pub(crate) fn on_all_cores(out: &mut [u8], size: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) {
    let count = out.len() / size.max(1);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let each = count.div_ceil(cores).max(FEW);
    if count <= each {
        return fill(0, out);
    }
    std::thread::scope(|scope| {
        for (index, own) in out.chunks_mut(each * size).enumerate() {
            scope.spawn(move || fill(index * each, own));
        }
    });
}

/// Reads bytes of a float type.
///
/// # Panics
/// If `dtype` is not a float type that engines compute in.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        let (chunks, _) = bytes.as_chunks::<N>();
        chunks.iter().map(|&chunk| value(chunk)).collect()
    }
    match dtype {
        DType::F64 => each(bytes, f64::from_ne_bytes),
        DType::F32 => each(bytes, |b| f64::from(f32::from_ne_bytes(b))),
        DType::Bf16 => each(bytes, |b| bf16::from_ne_bytes(b).to_f64()),
        DType::F16 => each(bytes, |b| f16::from_ne_bytes(b).to_f64()),
        DType::I32 | DType::U16 | DType::Bool => panic!("{dtype} values are not read"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cores_together_fill_what_one_fills() {
        let full: Vec<u8> = (0..3 * FEW + 5).flat_map(|i| (i as f32 / 3.0).to_ne_bytes()).collect();
        let mut narrow = vec![0; full.len() / 2];
        encode(DType::Bf16, &decode(DType::F32, &full), &mut narrow);
        assert_eq!(rounded(&full), narrow);
    }

    #[test]
    fn numbers_come_back_as_their_type_rounds_them() {
        let values = [0.1, -3.0, 0.0];
        for (dtype, eps) in
            [(DType::F64, 0.0), (DType::F32, 6e-8), (DType::Bf16, 4e-3), (DType::F16, 5e-4)]
        {
            let mut bytes = vec![0; values.len() * dtype.size()];
            encode(dtype, &values, &mut bytes);
            for (a, b) in values.iter().zip(decode(dtype, &bytes)) {
                assert!((a - b).abs() <= eps * a.abs(), "{dtype}: {a} and {b}");
            }
        }
    }
}
