//! Files that are written past the system's cache, where the file system has such a way: steps beside which
//! a checkpoint is written were shorter so (docs/checkpoints.md).
//!
//! Such writes begin and end at blocks. So the blocks of a write go past the cache, by way of memory that is
//! aligned as they are, and what is left before and behind them goes through it. The two never touch the same
//! block.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use phalanx_sys::Arena;
use phalanx_sys::disk::open_past_cache;

use crate::storage::FileSink;

/// A block: at least as large as that of any disk, and as a page of any machine's memory.
const BLOCK: usize = 64 << 10;

/// Bytes that go to the disk at once.
const STAGED: usize = 4 << 20;

/// Shorter files go through the cache.
const SHORT: usize = 1 << 20;

/// Writes this file of so many bytes past the cache; as ever if it is short, or if the file system refuses
/// (tmpfs does).
pub(crate) fn past_cache(file: File, path: &Path, bytes: usize) -> io::Result<Box<dyn FileSink>> {
    let direct = if bytes < SHORT { None } else { open_past_cache(path)? };
    let Some(direct) = direct else { return Ok(Box::new(file)) };
    let staged = Mutex::new(Arena::new(STAGED).map_err(io::Error::other)?);
    Ok(Box::new(PastCache { cached: file, direct, staged }))
}

#[derive(Debug)]
struct PastCache {
    cached: File,
    direct: File,
    staged: Mutex<Arena>,
}

impl PastCache {
    /// Writes whole blocks.
    fn write_blocks(&self, bytes: &[u8], mut at: u64) -> io::Result<()> {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        for piece in bytes.chunks(STAGED) {
            let aligned = &mut staged.as_mut_slice()[..piece.len()];
            aligned.copy_from_slice(piece);
            match self.direct.write_all_at(aligned, at) {
                // Some file systems say only now that they cannot.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    self.cached.write_all_at(piece, at)?;
                }
                written => written?,
            }
            at += piece.len() as u64;
        }
        Ok(())
    }
}

impl FileSink for PastCache {
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let before = (at.next_multiple_of(BLOCK as u64) - at) as usize;
        let (before, rest) = bytes.split_at(before.min(bytes.len()));
        let (blocks, behind) = rest.split_at(rest.len() / BLOCK * BLOCK);
        let first = at + before.len() as u64;
        self.cached.write_all_at(before, at)?;
        self.write_blocks(blocks, first)?;
        self.cached.write_all_at(behind, first + blocks.len() as u64)
    }

    fn finish(&self) -> io::Result<()> {
        // Blocks are in the disk's own cache, and the file system's lists in memory.
        self.cached.sync_all()
    }
}
