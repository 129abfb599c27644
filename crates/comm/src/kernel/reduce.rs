//! Combining blocks of many ranks in one pass.
//!
//! Values are held in registers while the ranks are walked through, in their order: every element
//! is read once per rank and written once, and the result may lie over one of the sources.

use half::bf16;
use phalanx_ir::DType;

use super::number::Number;
use super::{Meter, Place};
use crate::call::Reduction;

/// Elements that are combined at a time: four vectors of the widest kind for `f32`.
const LANES: usize = 64;

/// Whether values of this type can be combined.
pub(crate) fn is_reducible(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::I32)
}

/// What a reduction does, apart from where.
#[derive(Clone, Copy)]
pub(crate) struct Combine {
    /// The type of elements.
    pub(crate) dtype: DType,
    /// How they are combined.
    pub(crate) reduction: Reduction,
    /// Whether the result is combined with what the target holds.
    pub(crate) accumulate: bool,
}

/// Reduces blocks of `shape` (`outer`, `rows`, elements per row) in the order of `sources`.
/// `pointers` is room for as many pointers as there are sources.
///
/// # Safety
/// As for [`super::copy`]; the target may be one of the sources but may not overlap one otherwise.
/// All places are aligned for the type.
pub(crate) unsafe fn reduce(
    combine: Combine,
    shape: [usize; 3],
    sources: &[Place],
    to: Place,
    pointers: &mut Vec<*const u8>,
    meter: &mut Meter,
) {
    let size = combine.dtype.size();
    let bytes = [shape[0], shape[1], shape[2] * size];
    let dense = to.is_dense(bytes) && sources.iter().all(|source| source.is_dense(bytes));
    let [outer, rows, len] = if dense { [1, 1, shape[0] * shape[1] * shape[2]] } else { shape };
    let foreign = sources.iter().filter(|source| source.foreign).count();
    for o in 0..outer {
        for r in 0..rows {
            pointers.clear();
            pointers.extend(sources.iter().map(|source| source.at(o, r).cast_const()));
            // SAFETY: the caller vouches for every row of all places.
            unsafe { row(combine, pointers, to.at(o, r), len) };
            meter.bytes += (foreign * len * size) as u64;
        }
    }
}

/// One row of known type.
///
/// # Safety
/// As for [`reduce`], for `len` elements.
unsafe fn row(combine: Combine, sources: &[*const u8], to: *mut u8, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe {
        match combine.dtype {
            DType::F64 => chosen::<f64>(combine, sources, to, len),
            DType::F32 => chosen::<f32>(combine, sources, to, len),
            DType::Bf16 => chosen::<bf16>(combine, sources, to, len),
            DType::I32 => chosen::<i32>(combine, sources, to, len),
            DType::F16 | DType::Bool => unreachable!("refused when the call was started"),
        }
    }
}

/// One row, with what is done known to the compiler and compiled for this machine.
///
/// # Safety
/// As for [`row`].
unsafe fn chosen<T: Number>(combine: Combine, sources: &[*const u8], to: *mut u8, len: usize) {
    let arch = pulp::Arch::new();
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe {
        match (combine.reduction, combine.accumulate) {
            (Reduction::Sum, false) => arch.dispatch(
                #[inline(always)]
                || lanes::<T, false, false>(sources, to.cast(), len),
            ),
            (Reduction::Sum, true) => arch.dispatch(
                #[inline(always)]
                || lanes::<T, false, true>(sources, to.cast(), len),
            ),
            (Reduction::Max, false) => arch.dispatch(
                #[inline(always)]
                || lanes::<T, true, false>(sources, to.cast(), len),
            ),
            (Reduction::Max, true) => arch.dispatch(
                #[inline(always)]
                || lanes::<T, true, true>(sources, to.cast(), len),
            ),
        }
    }
}

/// All of a row: as many lanes at a time as there are, then one by one.
///
/// # Safety
/// As for [`row`].
#[inline(always)]
unsafe fn lanes<T: Number, const MAX: bool, const ACC: bool>(
    sources: &[*const u8],
    to: *mut T,
    len: usize,
) {
    let whole = len - len % LANES;
    let mut i = 0;
    // SAFETY: indices stay below `len`, for which the caller vouches; a target that is one of the
    // sources is only written after the same elements of all sources were read.
    unsafe {
        while i < whole {
            step::<T, MAX, ACC, LANES>(sources, to, i);
            i += LANES;
        }
        while i < len {
            step::<T, MAX, ACC, 1>(sources, to, i);
            i += 1;
        }
    }
}

/// `N` elements from index `i` on.
///
/// # Safety
/// As for [`row`], for the elements `i..i + N`.
#[inline(always)]
unsafe fn step<T: Number, const MAX: bool, const ACC: bool, const N: usize>(
    sources: &[*const u8],
    to: *mut T,
    i: usize,
) {
    // SAFETY: the caller vouches for `N` elements from `i` on of every place.
    unsafe {
        let mut acc = [T::Acc::default(); N];
        let first = sources[0].cast::<T>().add(i).cast::<[T; N]>().read();
        for (acc, first) in acc.iter_mut().zip(first) {
            *acc = first.load();
        }
        for source in &sources[1..] {
            let next = source.cast::<T>().add(i).cast::<[T; N]>().read();
            for (acc, next) in acc.iter_mut().zip(next) {
                *acc = combined::<T, MAX>(*acc, next.load());
            }
        }
        if ACC {
            let held = to.add(i).cast::<[T; N]>().read();
            for (acc, held) in acc.iter_mut().zip(held) {
                *acc = combined::<T, MAX>(held.load(), *acc);
            }
        }
        let mut result = [T::store(acc[0]); N];
        for (result, acc) in result.iter_mut().zip(acc) {
            *result = T::store(acc);
        }
        to.add(i).cast::<[T; N]>().write(result);
    }
}

#[inline(always)]
fn combined<T: Number, const MAX: bool>(a: T::Acc, b: T::Acc) -> T::Acc {
    if MAX { T::max(a, b) } else { T::add(a, b) }
}
