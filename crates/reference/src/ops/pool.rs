//! Pooling by its definition.

use phalanx_ir::ops::{PoolKind, Pooling, PoolingGrad};

use super::Call;
use super::conv::taps;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn pool(op: &Pooling, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, images, outputs) = (call.floats(0)?, call.shape(0), &call.outs[0].1);
    let mut y = Vec::with_capacity(call.elements(0));
    let mut taken = Vec::with_capacity(call.elements(0));
    for_each(outputs, |[b, row, column, channel]| {
        let (mut sum, mut largest, mut tap) = (0.0, f64::NEG_INFINITY, -1.0);
        taps(&op.window, [row, column], [images[1], images[2]], |[k, l], [r, c]| {
            let value = x[place(images, [b, r, c, channel])];
            sum += value;
            if tap < 0.0 || value > largest || value.is_nan() {
                largest = value;
                tap = (k * op.window.size[1] + l) as f64;
            }
        });
        taken.push(tap);
        y.push(match op.kind {
            PoolKind::Max => largest,
            PoolKind::Mean => sum / op.window.taps() as f64,
        });
    });
    let mut results = vec![call.result(0, y)];
    results.extend((op.kind == PoolKind::Max).then(|| call.result(1, taken)));
    Ok(results)
}

pub(super) fn pool_grad(
    op: &PoolingGrad,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (dy, outputs, images) = (call.floats(0)?, call.shape(0), &call.outs[0].1);
    let taken = match op.of.kind {
        PoolKind::Max => Some(call.ints(1)?),
        PoolKind::Mean => None,
    };
    let mut dx = vec![0.0; call.elements(0)];
    let (window, mut index) = (op.of.window, 0);
    for_each(outputs, |[b, row, column, channel]| {
        taps(&window, [row, column], [images[1], images[2]], |[k, l], [r, c]| {
            dx[place(images, [b, r, c, channel])] += match taken {
                None => dy[index] / window.taps() as f64,
                Some(taken) if taken[index] == (k * window.size[1] + l) as i32 => dy[index],
                Some(_) => 0.0,
            };
        });
        index += 1;
    });
    Ok(vec![call.result(0, dx)])
}

fn place(shape: &[usize], at: [usize; 4]) -> usize {
    at.iter().zip(shape).fold(0, |sum, (at, size)| sum * size + at)
}

/// Calls `f` for every place of four dims, in order.
fn for_each(shape: &[usize], mut f: impl FnMut([usize; 4])) {
    for b in 0..shape[0] {
        for row in 0..shape[1] {
            for column in 0..shape[2] {
                (0..shape[3]).for_each(|channel| f([b, row, column, channel]));
            }
        }
    }
}
