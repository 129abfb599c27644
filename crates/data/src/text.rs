//! Any file as text, one token per byte: no tokenizer, a vocabulary of 256, nothing to prepare.

use std::path::Path;

use phalanx_sys::{FileMap, StandIn};

use crate::corpus::checked_range;
use crate::{Corpus, DataError};

/// A memory-mapped file whose bytes are the tokens.
#[derive(Debug)]
pub struct TextFile {
    map: FileMap,
}

impl TextFile {
    /// Opens `path`; an empty file is refused.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let map = FileMap::open(path)?;
        if map.is_empty() {
            return Err(DataError::Empty { path: path.to_path_buf() });
        }
        // Other stand-ins are texts that someone may want to train on.
        match StandIn::of(&map) {
            Some(found @ StandIn::GitLfs) => Err(found.error(path).into()),
            _ => Ok(Self { map }),
        }
    }
}

impl Corpus for TextFile {
    fn len_tokens(&self) -> u64 {
        self.map.len() as u64
    }

    fn vocab(&self) -> usize {
        256
    }

    fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError> {
        let range = checked_range(self, at, out.len())?;
        self.map.check_unchanged()?;
        for (token, &byte) in out.iter_mut().zip(&self.map[range]) {
            *token = i32::from(byte);
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let (path, bytes) = (self.map.path().display(), self.map.len());
        format!("text file {path} ({bytes} byte{})", if bytes == 1 { "" } else { "s" })
    }
}
