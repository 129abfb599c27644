//! The end of a tile: its sums are rounded, and stored or added.

use super::multiply::Addition;
use crate::element::{CpuElement, vectorized};
use crate::kernels::matrix::MatMut;

/// Stores the sums of a tile whose rows are `stride` apart, with what is added to them.
///
/// # Panics
/// If the tile has fewer rows or columns than `to`.
#[inline(always)]
pub(super) fn store<C: CpuElement<Acc = f32>>(
    tile: &[f32],
    stride: usize,
    mut to: MatMut<C>,
    add: Addition<'_, C>,
) {
    let [rows, columns] = to.shape();
    if to.strides()[1] != 1 && columns > 1 {
        return scattered(tile, stride, to, add);
    }
    vectorized(
        #[inline(always)]
        || {
            for i in 0..rows {
                let sums = &tile[i * stride..][..columns];
                let to = to.row(i);
                match add {
                    Addition::Nothing => {
                        for (to, &sum) in to.iter_mut().zip(sums) {
                            *to = C::store(sum);
                        }
                    }
                    Addition::Result => {
                        for (to, &sum) in to.iter_mut().zip(sums) {
                            *to = C::store(to.load() + sum);
                        }
                    }
                    Addition::Other(other) => {
                        for ((to, &sum), other) in to.iter_mut().zip(sums).zip(other.row(i)) {
                            *to = C::store(other.load() + sum);
                        }
                    }
                }
            }
        },
    );
}

/// For a result whose columns are not adjacent.
#[cold]
fn scattered<C: CpuElement<Acc = f32>>(
    tile: &[f32],
    stride: usize,
    mut to: MatMut<C>,
    add: Addition<'_, C>,
) {
    let [rows, columns] = to.shape();
    for i in 0..rows {
        for j in 0..columns {
            let to = to.at_mut(i, j);
            let before = match add {
                Addition::Nothing => 0.0,
                Addition::Result => to.load(),
                Addition::Other(other) => other.at(i, j).load(),
            };
            *to = C::store(before + tile[i * stride + j]);
        }
    }
}
