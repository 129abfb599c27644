//! One block of memory for everything a step needs, divided by a plan instead of an allocator.
//!
//! The block comes directly from the system: page-aligned, zero until written, and not resident
//! until touched. If the system refuses, that is an error with the size, never an abort, because
//! the caller can still say what would need less.

use std::fmt;

use memmap2::{MmapMut, MmapRaw};

use crate::SysError;

/// Page-aligned memory, zero at the start, freed on drop.
///
/// Its pages are ordinary ones: on the training step transparent huge pages changed nothing beyond
/// noise and cost over 100 MB of resident memory.
#[derive(Debug)]
pub struct Arena(Memory);

#[derive(Debug)]
enum Memory {
    /// A mapping of no bytes does not exist, so an empty arena holds none.
    Nothing,
    Own(MmapRaw),
    Lent(Lent),
}

/// A part of memory that its owner manages elsewhere.
struct Lent {
    base: *mut u8,
    bytes: usize,
    /// Takes the memory back when it is dropped.
    _owner: Box<dyn Send + Sync>,
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("base", &self.base).field("bytes", &self.bytes).finish()
    }
}

// SAFETY: the memory is not bound to a thread, and neither is its owner; the address alone is
// given out, as for a mapping.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

impl Arena {
    /// Reserves `bytes` bytes.
    pub fn new(bytes: usize) -> Result<Self, SysError> {
        if bytes == 0 {
            return Ok(Self(Memory::Nothing));
        }
        let map =
            MmapMut::map_anon(bytes).map_err(|source| SysError::OutOfMemory { bytes, source })?;
        Ok(Self(Memory::Own(map.into())))
    }

    /// An arena in memory that `owner` manages, and takes back when the arena drops it.
    ///
    /// # Safety
    /// The memory is page-aligned, initialised, and valid for `bytes` bytes until the owner is
    /// dropped; nothing else in this process uses it meanwhile, except as raw pointers into an
    /// arena may be used.
    pub unsafe fn lent(base: *mut u8, bytes: usize, owner: Box<dyn Send + Sync>) -> Self {
        Self(Memory::Lent(Lent { base, bytes, _owner: owner }))
    }

    /// The first byte. Dangling, but aligned to 4096, when the arena is empty.
    ///
    /// Code that writes through the pointer must prevent data races: the arena only keeps the
    /// memory alive.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.0 {
            Memory::Own(map) => map.as_mut_ptr(),
            Memory::Lent(lent) => lent.base,
            Memory::Nothing => std::ptr::without_provenance_mut(4096),
        }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        match &self.0 {
            Memory::Own(map) => map.len(),
            Memory::Lent(lent) => lent.bytes,
            Memory::Nothing => 0,
        }
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes; the exclusive borrow of the arena rules out races with other users of this
    /// method, and callers that hold raw pointers must not use them meanwhile.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the pointer is valid for `len` bytes as long as `self` lives (a mapping,
        // lent memory, or dangling with length 0), the bytes are initialised (the system zeroes
        // them, or the lender guarantees it), and the exclusive borrow prevents other safe uses.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zero_and_writable() {
        let mut arena = Arena::new(3 << 20).unwrap();
        assert_eq!(arena.len(), 3 << 20);
        assert_eq!(arena.as_ptr() as usize % 4096, 0);
        assert!(arena.as_mut_slice().iter().all(|&byte| byte == 0));
        arena.as_mut_slice().fill(7);
        // SAFETY: the last byte lies inside the arena and was written just above.
        assert_eq!(unsafe { *arena.as_ptr().add(arena.len() - 1) }, 7);
    }

    #[test]
    fn nothing_is_a_valid_size() {
        let mut arena = Arena::new(0).unwrap();
        assert!(arena.is_empty() && arena.as_mut_slice().is_empty());
    }

    #[test]
    fn lent_memory_goes_back_to_its_owner() {
        let owner = std::sync::Arc::new(());
        let mut own = Arena::new(4096).unwrap();
        // SAFETY: the memory lives longer than the arena, and is used only through it meanwhile.
        let mut lent = unsafe { Arena::lent(own.as_ptr(), 4096, Box::new(owner.clone())) };
        lent.as_mut_slice().fill(7);
        assert_eq!((lent.len(), std::sync::Arc::strong_count(&owner)), (4096, 2));
        drop(lent);
        assert_eq!((own.as_mut_slice()[4095], std::sync::Arc::strong_count(&owner)), (7, 1));
    }

    #[test]
    fn an_impossible_size_is_an_error_that_names_it() {
        // Beyond the address space of every 64-bit processor.
        let error = Arena::new(1 << 60).unwrap_err().to_string();
        assert!(error.contains(&(1usize << 60).to_string()), "{error}");
    }
}
