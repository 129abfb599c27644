//! Looks up rows of a table by id; its gradient adds rows by id.
//!
//! A rank may hold only some rows of the table (a vocabulary that is sharded): for an id whose row
//! another rank holds, the result here is a row of zeros and the gradient is not changed.

use std::ops::Range;

use crate::element::{CpuElement, vectorized};

/// An id that names no row of the whole table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("id {id} at position {position} is not in the vocabulary of {vocabulary} rows")]
pub struct UnknownId {
    /// Which of the given ids it is.
    pub position: usize,
    /// The id.
    pub id: i32,
    /// How many rows the whole table has.
    pub vocabulary: usize,
}

/// Which rows of the table are in memory here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldRows {
    /// Rows of the whole table.
    pub vocabulary: usize,
    /// The first row that is held.
    pub first: usize,
    /// How many are held.
    pub rows: usize,
}

impl HeldRows {
    /// A table that is held as a whole.
    pub fn all(vocabulary: usize) -> Self {
        Self { vocabulary, first: 0, rows: vocabulary }
    }

    /// Where row `id` is, if it is held.
    #[inline(always)]
    fn find(&self, position: usize, id: i32) -> Result<Option<usize>, UnknownId> {
        match usize::try_from(id) {
            Ok(row) if row < self.vocabulary => {
                let local = row.wrapping_sub(self.first);
                Ok((local < self.rows).then_some(local))
            }
            _ => Err(UnknownId { position, id, vocabulary: self.vocabulary }),
        }
    }
}

/// `out[i] = table[ids[i]]`, for rows of `d` elements.
pub fn gather<T: CpuElement>(
    table: &[T],
    held: HeldRows,
    d: usize,
    ids: &[i32],
    out: &mut [T],
) -> Result<(), UnknownId> {
    assert_eq!(out.len(), ids.len() * d);
    for (position, (id, out)) in ids.iter().zip(out.chunks_exact_mut(d)).enumerate() {
        match held.find(position, *id)? {
            Some(row) => out.copy_from_slice(&table[row * d..][..d]),
            None => out.fill(T::default()),
        }
    }
    Ok(())
}

/// Adds `dy[i]` to `grad[ids[i]]` in order of `i`, for the held rows; `grad` is `[held.rows, d]`.
///
/// Unless it is to `accumulate`, what `grad` held before does not matter.
/// Threads share the work by holding different rows; each goes through all ids.
pub fn gather_gradient<T, G>(
    ids: &[i32],
    dy: &[T],
    d: usize,
    held: HeldRows,
    accumulate: bool,
    grad: &mut [G],
) -> Result<(), UnknownId>
where
    T: CpuElement,
    G: CpuElement<Acc = T::Acc>,
{
    assert!(
        grad.len() >= held.rows * d,
        "a gradient of {} elements cannot hold {} rows of {d}",
        grad.len(),
        held.rows
    );
    // SAFETY: the slice is exclusive, and as long as the rows that are written.
    unsafe { gather_gradient_columns(ids, dy, d, held, accumulate, grad.as_mut_ptr(), 0..d) }
}

/// Like [`gather_gradient`] for some columns of every held row.
///
/// Frequent ids make shares by rows uneven; shares by columns are equal whatever the ids are.
///
/// # Safety
/// `grad` points to `held.rows · d` elements, and nothing else reads or writes the given columns of
/// them during the call. (Other threads may use other columns.)
///
/// # Panics
/// If the columns do not lie in `0..d`.
pub unsafe fn gather_gradient_columns<T, G>(
    ids: &[i32],
    dy: &[T],
    d: usize,
    held: HeldRows,
    accumulate: bool,
    grad: *mut G,
    columns: Range<usize>,
) -> Result<(), UnknownId>
where
    T: CpuElement,
    G: CpuElement<Acc = T::Acc>,
{
    assert!(
        columns.start <= columns.end && columns.end <= d,
        "columns {columns:?} do not lie in rows of {d}"
    );
    assert_eq!(dy.len(), ids.len() * d);
    let piece = |row: usize| {
        // SAFETY: `row` is one of the held rows and the columns lie in it, so the piece is part of
        // what the caller promised; it is used up before the next one is made.
        unsafe { std::slice::from_raw_parts_mut(grad.add(row * d + columns.start), columns.len()) }
    };
    if !accumulate {
        (0..held.rows).for_each(|row| piece(row).fill(G::default()));
    }
    vectorized(
        #[inline(always)]
        || {
            for (position, (id, dy)) in ids.iter().zip(dy.chunks_exact(d)).enumerate() {
                if let Some(row) = held.find(position, *id)? {
                    for (grad, dy) in piece(row).iter_mut().zip(&dy[columns.clone()]) {
                        *grad = G::store(grad.load() + dy.load());
                    }
                }
            }
            Ok(())
        },
    )
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{assert_close, doubles, normals, tolerance};
    use super::*;

    const V: usize = 7;
    const D: usize = 21;
    const IDS: [i32; 9] = [3, 0, 6, 3, 3, 1, 0, 5, 6];

    fn held(first: usize, rows: usize) -> HeldRows {
        HeldRows { vocabulary: V, first, rows }
    }

    #[test]
    fn gathers_what_is_held() {
        let table: Vec<f32> = normals("table", V * D);
        let mut out = vec![9.0; IDS.len() * D];
        gather(&table, HeldRows::all(V), D, &IDS, &mut out).unwrap();
        for (id, row) in IDS.iter().zip(out.chunks(D)) {
            assert_eq!(row, &table[*id as usize * D..][..D]);
        }
        gather(&table[3 * D..][..2 * D], held(3, 2), D, &IDS, &mut out).unwrap();
        for (id, row) in IDS.iter().zip(out.chunks(D)) {
            if (3..5).contains(id) {
                assert_eq!(row, &table[*id as usize * D..][..D]);
            } else {
                assert_eq!(row, [0.0; D]);
            }
        }
    }

    #[test]
    fn unknown_ids_are_reported() {
        let table = [0f32; V * D];
        for bad in [-1, 7, i32::MIN, i32::MAX] {
            let (mut out, mut grad) = ([0f32; 3 * D], [0f32; V * D]);
            let ids = [0, 6, bad];
            let error = UnknownId { position: 2, id: bad, vocabulary: V };
            let got = gather(&table, HeldRows::all(V), D, &ids, &mut out);
            assert_eq!(got, Err(error));
            let got = gather_gradient(&ids, &out, D, held(2, 3), true, &mut grad);
            assert_eq!(got, Err(error));
        }
    }

    fn gradient_is_right<T: CpuElement, G: CpuElement<Acc = T::Acc>>() {
        let dy: Vec<T> = normals("dy", IDS.len() * D);
        let before: Vec<G> = normals("before", V * D);
        for accumulate in [false, true] {
            let mut want = if accumulate { doubles(&before) } else { vec![0.0; V * D] };
            for (id, dy) in IDS.iter().zip(doubles(&dy).chunks(D)) {
                for (want, dy) in want[*id as usize * D..][..D].iter_mut().zip(dy) {
                    *want += dy;
                }
            }
            let mut whole = before.clone();
            gather_gradient(&IDS, &dy, D, HeldRows::all(V), accumulate, &mut whole).unwrap();
            assert_close(&whole, &want, tolerance::<G>(4.0));

            let mut rows = before.clone();
            let (upper, lower) = rows.split_at_mut(4 * D);
            gather_gradient(&IDS, &dy, D, held(0, 4), accumulate, upper).unwrap();
            gather_gradient(&IDS, &dy, D, held(4, 3), accumulate, lower).unwrap();
            assert_eq!(rows, whole, "shares by rows");

            let mut columns = before.clone();
            for share in [0..8, 8..D] {
                let (all, grad) = (HeldRows::all(V), columns.as_mut_ptr());
                // SAFETY: the pointer is to a whole table, and the calls follow one another.
                unsafe { gather_gradient_columns(&IDS, &dy, D, all, accumulate, grad, share) }
                    .unwrap();
            }
            assert_eq!(columns, whole, "shares by columns");
        }
    }

    #[test]
    fn gradient_adds_up_rows() {
        gradient_is_right::<f64, f64>();
        gradient_is_right::<f32, f32>();
        gradient_is_right::<bf16, f32>();
        gradient_is_right::<bf16, bf16>();
    }
}
