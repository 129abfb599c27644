//! Products of packed rows with the matrices of their experts, row by row.

use phalanx_ir::ops::{GroupedMatmul, GroupedMatmulGrad};

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

/// For each row of operand 0 that belongs to an expert, the row and the expert; the counts are operand 2.
fn owners(call: &Call<'_>, experts: usize) -> Result<Vec<(usize, usize)>, ReferenceError> {
    let (shape, runs) = (call.shape(0), call.width(2));
    let (parts, room) = (shape[0], shape[shape.len() - 2]);
    let here = experts / parts;
    let counts = call.ints(2)?;
    let regions = counts.len() / runs;
    let mut found = Vec::new();
    for (region, counts) in counts.chunks(runs).enumerate() {
        let part = region * parts / regions;
        let mut row = 0;
        for (run, &count) in counts.iter().enumerate() {
            for _ in 0..count {
                if row == room {
                    return Err(call.wrong(2, "counts of rows that there are"));
                }
                found.push((region * room + row, part * here + run % here));
                row += 1;
            }
        }
    }
    Ok(found)
}

pub(super) fn product(
    op: &GroupedMatmul,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, w, shape) = (call.floats(0)?, call.floats(1)?, call.shape(1));
    let (rows, cols) = (shape[1], shape[2]);
    let (inner, outer) = if op.transposed { (cols, rows) } else { (rows, cols) };
    let mut out = vec![0.0; call.elements(0)];
    for (row, expert) in owners(call, shape[0])? {
        let w = &w[expert * rows * cols..][..rows * cols];
        for j in 0..outer {
            let at = |i: usize| if op.transposed { w[j * cols + i] } else { w[i * cols + j] };
            out[row * outer + j] = (0..inner).map(|i| x[row * inner + i] * at(i)).sum();
        }
    }
    Ok(vec![call.result(0, out)])
}

pub(super) fn gradient(
    op: &GroupedMatmulGrad,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, y, d, f) = (call.floats(0)?, call.floats(1)?, call.width(0), call.width(1));
    let mut out = vec![0.0; call.elements(0)];
    for (row, expert) in owners(call, op.experts)? {
        for i in 0..d {
            for j in 0..f {
                out[(expert * d + i) * f + j] += x[row * d + i] * y[row * f + j];
            }
        }
    }
    Ok(vec![call.result(0, out)])
}
