//! Where the bytes of a file of a checkpoint lie: on a disk, or in the memory of another host.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Takes the bytes of a file, in any order. Where nothing is written, there are zeros.
pub trait FileSink: Send + Sync + Debug {
    /// Writes bytes at a place.
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;

    /// Waits until all that was written would outlive this process.
    fn finish(&self) -> io::Result<()>;
}

/// Gives the bytes of a file.
pub trait FileSource: Send + Sync + Debug {
    /// Reads bytes from a place.
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()>;
}

impl FileSink for File {
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, at)
    }

    fn finish(&self) -> io::Result<()> {
        self.sync_all()
    }
}

impl FileSource for File {
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, out, at)
    }
}

/// Reads a source from its beginning.
pub(crate) struct FromStart<'a> {
    pub(crate) source: &'a dyn FileSource,
    pub(crate) at: u64,
    pub(crate) end: u64,
}

impl io::Read for FromStart<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = out.len().min((self.end - self.at) as usize);
        self.source.read_exact_at(&mut out[..count], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
