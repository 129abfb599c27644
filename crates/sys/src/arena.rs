//! One block of memory for everything a step needs, divided by a plan instead of an allocator.
//!
//! The block comes directly from the system: page-aligned, zero until written, and not resident
//! until touched. If the system refuses, that is an error with the size, never an abort, because
//! the caller can still say what would need less.

use memmap2::{MmapMut, MmapRaw};

use crate::SysError;

/// Page-aligned memory, zero at the start, freed on drop.
///
/// Its pages are ordinary ones: on the training step transparent huge pages changed nothing beyond
/// noise and cost over 100 MB of resident memory.
#[derive(Debug)]
pub struct Arena {
    // A mapping of no bytes does not exist, so an empty arena holds none.
    map: Option<MmapRaw>,
}

impl Arena {
    /// Reserves `bytes` bytes.
    pub fn new(bytes: usize) -> Result<Self, SysError> {
        if bytes == 0 {
            return Ok(Self { map: None });
        }
        let map =
            MmapMut::map_anon(bytes).map_err(|source| SysError::OutOfMemory { bytes, source })?;
        Ok(Self { map: Some(map.into()) })
    }

    /// The first byte. Dangling, but aligned to 4096, when the arena is empty.
    ///
    /// Code that writes through the pointer must prevent data races: the arena only keeps the
    /// memory alive.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.map {
            Some(map) => map.as_mut_ptr(),
            None => std::ptr::without_provenance_mut(4096),
        }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.map.as_ref().map_or(0, MmapRaw::len)
    }

    /// Whether there are no bytes at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes; the exclusive borrow of the arena rules out races with other users of this
    /// method, and callers that hold raw pointers must not use them meanwhile.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the pointer is valid for `len` bytes as long as `self` lives (a mapping, or
        // dangling with length 0), the bytes are initialised (the system zeroes them), and the
        // exclusive borrow prevents other safe uses.
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
    fn an_impossible_size_is_an_error_that_names_it() {
        // Beyond the address space of every 64-bit processor.
        let error = Arena::new(1 << 60).unwrap_err().to_string();
        assert!(error.contains(&(1usize << 60).to_string()), "{error}");
    }
}
