//! Dropout and random numbers, as `phalanx_ir::random` defines them.

use phalanx_ir::ops::{Dropout, Noise, NoiseKind};
use phalanx_ir::random::{keeps, normal_at, uniform_at};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn dropout(op: &Dropout, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, key) = (call.floats(0)?, call.key(1)?);
    // A value without dims is one sample of one element.
    let sample: usize = call.shape(0).iter().skip(1).product();
    let y = (x.iter().enumerate())
        .map(|(i, x)| {
            let (row, element) = ((i / sample) as u64, (i % sample) as u64);
            match keeps(key, op.site, row, element, op.p) {
                true => x / (1.0 - op.p),
                false => 0.0,
            }
        })
        .collect();
    Ok(vec![call.result(0, y)])
}

pub(super) fn noise(op: &Noise, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let key = call.key(1)?;
    let sample: usize = call.shape(0).iter().skip(1).product();
    let drawn = |i: usize| {
        let (row, element) = ((i / sample) as u64, (i % sample) as u64);
        match op.kind {
            NoiseKind::Uniform => uniform_at(key, op.site, row, element),
            NoiseKind::Normal => normal_at(key, op.site, row, element),
        }
    };
    Ok(vec![call.result(0, (0..call.elements(0)).map(drawn).collect())])
}
