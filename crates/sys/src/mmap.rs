//! A file seen as a slice of bytes, without reading it into memory first.
//!
//! The system brings in pages when they are touched and may drop them again, so a corpus larger
//! than memory costs no more than the pages in use.
//!
//! What this cannot guarantee: if another program shortens the file while it is mapped, touching a
//! page beyond the new end ends the process (SIGBUS), and if it rewrites the file, the bytes change
//! while they are read. No portable call prevents either, so the caller must not change data files.
//! What can be checked is checked: the path must be a regular file, its length must be the same
//! before and after mapping, and [`FileMap::check_unchanged`] compares the length again whenever
//! the caller wants to (a loader does so at every pass over the data).

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::SysError;
use crate::read::open_regular;

/// A read-only map of a whole file.
#[derive(Debug)]
pub struct FileMap {
    map: Mmap,
    file: File,
    path: PathBuf,
}

impl FileMap {
    /// Maps the whole of `path`. An empty file gives an empty slice.
    pub fn open(path: &Path) -> Result<Self, SysError> {
        let fail = |doing| move |source| SysError::on_file(path, doing, source);
        let file = open_regular(path)?;
        // SAFETY: the map is read-only and only borrowed as `&[u8]`, and every bit pattern is a
        // valid byte. The caller must make sure that nothing shortens or rewrites the file
        // meanwhile, as stated in the module's documentation; the length is checked.
        let map = unsafe { Mmap::map(&file) }.map_err(fail("mapping it into memory"))?;
        let map = Self { map, file, path: path.to_path_buf() };
        map.check_unchanged()?;
        Ok(map)
    }

    /// The path the file was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails if the file no longer has the length it was mapped with.
    pub fn check_unchanged(&self) -> Result<(), SysError> {
        let metadata = self
            .file
            .metadata()
            .map_err(|source| SysError::on_file(&self.path, "asking for its length", source))?;
        let (mapped, now) = (self.map.len() as u64, metadata.len());
        if mapped != now {
            return Err(SysError::Changed { path: self.path.clone(), mapped, now });
        }
        Ok(())
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
