//! Streaming stores: writing results into other ranks' memory without this core's caches.
//!
//! An ordinary store to a cache line that another core holds must first move the line here, and its
//! owner must later fetch it back. Streaming stores need neither: between two virtual cores
//! `all_reduce` of 1 MiB took 77 instead of 310 µs.

/// Writes `values` to another rank's memory.
///
/// # Safety
/// The memory may be written, by this thread alone. Readers may be notified only after [`settle`]
/// was called here.
#[inline(always)]
pub(super) unsafe fn stream_store<T: Copy, const N: usize>(to: *mut [T; N], values: &[T; N]) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<[T; N]>().is_multiple_of(WIDTH) && to.addr().is_multiple_of(WIDTH) {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let (from, to) = (std::ptr::from_ref(values).cast::<__m128i>(), to.cast::<__m128i>());
        for k in 0..size_of::<[T; N]>() / WIDTH {
            // SAFETY: both sides are as long as the array, the target is aligned, and every
            // processor of this kind has these instructions.
            unsafe { _mm_stream_si128(to.add(k), _mm_loadu_si128(from.add(k))) };
        }
        return;
    }
    // SAFETY: the caller guarantees the memory.
    unsafe { to.write(*values) };
}

/// Orders earlier streaming stores before all later stores of this thread.
#[inline(always)]
pub(super) fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Bytes of the widest streaming store that every processor of this kind has.
#[cfg(target_arch = "x86_64")]
const WIDTH: usize = 16;
