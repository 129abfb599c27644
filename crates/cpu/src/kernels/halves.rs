//! Masters in two halves of 16 bits ([`phalanx_ir::halves`]), slice by slice.

use phalanx_ir::halves;

use super::inlined::inlined;
use crate::element::vectorized;

/// Puts halves together.
///
/// # Panics
/// If the slices have different lengths.
pub fn join(upper: &[u16], lower: &[u16], full: &mut [f32]) {
    assert_eq!([upper.len(), lower.len()], [full.len(); 2]);
    vectorized(inlined!(|| {
        for ((full, upper), lower) in full.iter_mut().zip(upper).zip(lower) {
            *full = halves::join(*upper, *lower);
        }
    }));
}

/// Takes numbers apart.
///
/// # Panics
/// If the slices have different lengths.
pub fn split(full: &[f32], upper: &mut [u16], lower: &mut [u16]) {
    assert_eq!([upper.len(), lower.len()], [full.len(); 2]);
    vectorized(inlined!(|| {
        for ((full, upper), lower) in full.iter().zip(upper.iter_mut()).zip(lower.iter_mut()) {
            (*upper, *lower) = halves::split(*full);
        }
    }));
}
