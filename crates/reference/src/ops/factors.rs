//! Rows and columns of the matrices of a packed unit, element by element.

use phalanx_ir::ops::Factors;

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn means(factors: &Factors, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let [mut rows, mut columns] = factors.totals().map(|count| vec![0.0; count]);
    for (i, x) in call.floats(0)?.iter().enumerate() {
        if let Some(Place { row, column, size }) = place(factors, i) {
            rows[row] += x * x / size[1] as f64;
            columns[column] += x * x / size[0] as f64;
        }
    }
    Ok(vec![call.result(0, rows), call.result(1, columns)])
}

pub(super) fn direction(
    factors: &Factors,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, rows, columns, by) =
        (call.floats(0)?, call.floats(1)?, call.floats(2)?, call.scalar(3)?);
    let stops = call.ins.len() > 4 && call.scalar(4)? == 0.0;
    let divided = |(i, x): (usize, &f64)| match place(factors, i) {
        Some(Place { row, column, .. }) if !stops => x * by / (rows[row] * columns[column]),
        _ => 0.0,
    };
    Ok(vec![call.result(0, x.iter().enumerate().map(divided).collect())])
}

/// The row and the column of an element among those of all matrices, and the extents of its matrix.
struct Place {
    row: usize,
    column: usize,
    size: [usize; 2],
}

fn place(factors: &Factors, element: usize) -> Option<Place> {
    let (block, at) = (element / factors.block, element % factors.block);
    let [mut rows, mut columns] = [0, 0];
    for member in &factors.members {
        let [matrices, last] = {
            let cut = member.sizes.len() - 2;
            [&member.sizes[..cut], &member.sizes[cut..]]
        };
        let matrices: usize = matrices.iter().product();
        let elements: usize = member.tile.iter().product();
        if (member.begin..member.begin + elements).contains(&at) {
            let mut stride = elements;
            let (mut row, mut matrix, mut column) = (0, 0, 0);
            for (dim, (&tile, &size)) in member.tile.iter().zip(&member.sizes).enumerate() {
                stride /= tile;
                let mut index = (at - member.begin) / stride % tile;
                let mut blocks: usize = factors.grid.iter().product();
                for (by, extent) in member.moves[dim].iter().zip(&factors.grid) {
                    blocks /= extent;
                    index += by * (block / blocks % extent);
                }
                if index >= size {
                    return None;
                }
                match member.tile.len() - dim {
                    1 => column = index,
                    2 => row = index,
                    _ => matrix = matrix * size + index,
                }
            }
            return Some(Place {
                row: rows + matrix * last[0] + row,
                column: columns + matrix * last[1] + column,
                size: [last[0], last[1]],
            });
        }
        rows += matrices * last[0];
        columns += matrices * last[1];
    }
    None
}
