//! Combining blocks of many ranks in one pass.
//!
//! Values stay in registers while the ranks are visited in order: every element is read once per
//! rank and written once per target, and a target may also be a source.

use half::{bf16, f16};
use phalanx_ir::DType;

use super::number::Number;
use super::{Meter, Place, stream};
use crate::call::ReduceOp;

/// Elements that are combined at a time: four vectors of the widest kind for `f32`.
const LANES: usize = 64;

/// Whether values of this type can be combined.
pub(crate) fn is_reducible(dtype: DType) -> bool {
    !matches!(dtype, DType::U16 | DType::Bool)
}

/// What a reduction does, without the addresses.
#[derive(Clone, Copy)]
pub(crate) struct Combine {
    /// The type of elements.
    pub(crate) dtype: DType,
    /// How they are combined.
    pub(crate) reduction: ReduceOp,
    /// Whether the result is combined with what the target holds.
    pub(crate) accumulate: bool,
    /// Whether results for other ranks are written with streaming stores, which bypass this core's
    /// caches: good if they run on other cores, bad if they share this core.
    pub(crate) stream: bool,
}

/// The rows that are worked on. The lists are reused, so that no call allocates.
#[derive(Default)]
pub(crate) struct Pointers {
    sources: Vec<*const u8>,
    targets: Vec<*mut u8>,
    stream: bool,
}

/// Reduces blocks of `shape` (`outer`, `rows`, elements per row) in the order of `sources`, and
/// writes the result to all `targets`: first this rank's own, which may accumulate, then the
/// others.
///
/// # Safety
/// As for [`super::copy`]; targets may be sources too but may not overlap them otherwise. All
/// places are aligned for the type.
pub(crate) unsafe fn reduce(
    combine: Combine,
    shape: [usize; 3],
    sources: &[Place],
    targets: &[Place],
    pointers: &mut Pointers,
    meter: &mut Meter,
) {
    let size = combine.dtype.size();
    let bytes = [shape[0], shape[1], shape[2] * size];
    let dense = targets.iter().chain(sources).all(|place| place.is_dense(bytes));
    let [outer, rows, len] = if dense { [1, 1, shape[0] * shape[1] * shape[2]] } else { shape };
    let foreign = targets.iter().chain(sources).filter(|place| place.foreign).count();
    pointers.stream = combine.stream;
    for o in 0..outer {
        for r in 0..rows {
            pointers.sources.clear();
            pointers.sources.extend(sources.iter().map(|place| place.at(o, r).cast_const()));
            pointers.targets.clear();
            pointers.targets.extend(targets.iter().map(|place| place.at(o, r)));
            // SAFETY: the caller guarantees every row of all places.
            unsafe { row(combine, pointers, len) };
            meter.bytes += (foreign * len * size) as u64;
        }
    }
}

/// One row of known type.
///
/// # Safety
/// As for [`reduce`], for `len` elements.
unsafe fn row(combine: Combine, pointers: &Pointers, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe {
        match combine.dtype {
            DType::F64 => chosen::<f64>(combine, pointers, len),
            DType::F32 => chosen::<f32>(combine, pointers, len),
            DType::Bf16 => chosen::<bf16>(combine, pointers, len),
            DType::I32 => chosen::<i32>(combine, pointers, len),
            DType::F16 => chosen::<f16>(combine, pointers, len),
            DType::U16 | DType::Bool => unreachable!("refused when the call was started"),
        }
    }
}

/// One row, specialised at compile time for the operation and, where it matters, for this machine's instructions.
///
/// # Safety
/// As for [`row`].
unsafe fn chosen<T: Number>(combine: Combine, pointers: &Pointers, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: this processor has the instructions; the caller's promises are passed on unchanged.
        return unsafe { with_avx2::<T>(combine, pointers, len) };
    }
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe { picked::<T>(combine, pointers, len) };
}

/// The same with wider vectors. A function of its own and no closure: what is called through a closure is compiled
/// for every processor, and then takes four times as long.
///
/// # Safety
/// As for [`row`]; the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<T: Number>(combine: Combine, pointers: &Pointers, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe { picked::<T>(combine, pointers, len) };
}

/// # Safety
/// As for [`row`].
#[inline(always)]
unsafe fn picked<T: Number>(combine: Combine, pointers: &Pointers, len: usize) {
    // SAFETY: the caller's promises are passed on unchanged.
    unsafe {
        match (combine.reduction, combine.accumulate) {
            (ReduceOp::Sum, false) => lanes::<T, false, false>(pointers, len),
            (ReduceOp::Sum, true) => lanes::<T, false, true>(pointers, len),
            (ReduceOp::Max, false) => lanes::<T, true, false>(pointers, len),
            (ReduceOp::Max, true) => lanes::<T, true, true>(pointers, len),
        }
    }
}

/// A whole row: full vectors first, then single elements.
///
/// # Safety
/// As for [`row`].
#[inline(always)]
unsafe fn lanes<T: Number, const MAX: bool, const ACC: bool>(pointers: &Pointers, len: usize) {
    let whole = len - len % LANES;
    let mut i = 0;
    // SAFETY: indices stay below `len`, as the caller guarantees.
    unsafe {
        while i < whole {
            step::<T, MAX, ACC, LANES>(pointers, i);
            i += LANES;
        }
        while i < len {
            step::<T, MAX, ACC, 1>(pointers, i);
            i += 1;
        }
    }
    stream::settle();
}

/// `N` elements from index `i` on: all are read from all sources before any is written, so that a
/// target may be a source.
///
/// # Safety
/// As for [`row`], for the elements `i..i + N`.
#[inline(always)]
unsafe fn step<T: Number, const MAX: bool, const ACC: bool, const N: usize>(
    pointers: &Pointers,
    i: usize,
) {
    let Pointers { sources, targets, stream } = pointers;
    // SAFETY: the caller guarantees `N` elements from `i` on of every place.
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
            let held = targets[0].cast::<T>().add(i).cast::<[T; N]>().read();
            for (acc, held) in acc.iter_mut().zip(held) {
                *acc = combined::<T, MAX>(held.load(), *acc);
            }
        }
        let mut result = [T::store(acc[0]); N];
        for (result, acc) in result.iter_mut().zip(acc) {
            *result = T::store(acc);
        }
        targets[0].cast::<T>().add(i).cast::<[T; N]>().write(result);
        for target in &targets[1..] {
            let target = target.cast::<T>().add(i).cast::<[T; N]>();
            if *stream {
                stream::stream_store(target, &result);
            } else {
                target.write(result);
            }
        }
    }
}

#[inline(always)]
fn combined<T: Number, const MAX: bool>(a: T::Acc, b: T::Acc) -> T::Acc {
    if MAX { T::max(a, b) } else { T::add(a, b) }
}
