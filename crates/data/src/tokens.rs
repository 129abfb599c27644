//! Flat files of token ids, little-endian, two or four bytes each, mapped into memory.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use phalanx_sys::{FileMap, StandIn};

use crate::corpus::checked_range;
use crate::{Corpus, DataError};

/// Files up to this size are checked whole when they are opened, so that a bad token is refused
/// before anything starts; for larger files that would take too long, so their tokens are checked
/// when they are read.
const CHECKED_AT_OPENING: usize = 1 << 30;

/// How many bytes a token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// The width given by a file's name: `.u16` or `.u32`.
    pub fn of_name(path: &Path) -> Result<Self, DataError> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension
            .and_then(|extension| extension.parse().ok())
            .ok_or_else(|| DataError::UnknownWidth { path: path.to_path_buf() })
    }

    fn bytes(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

impl fmt::Display for TokenWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
        })
    }
}

impl FromStr for TokenWidth {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self, DataError> {
        match name {
            "u16" => Ok(Self::U16),
            "u32" => Ok(Self::U32),
            _ => Err(DataError::BadWidth { found: name.into() }),
        }
    }
}

/// A memory-mapped file of token ids.
#[derive(Debug)]
pub struct TokenFile {
    map: FileMap,
    width: TokenWidth,
    vocab: usize,
}

impl TokenFile {
    /// Opens `path` for a model with `vocab` token ids; the width comes from the name unless it
    /// is given. A width that contradicts the name is refused: every id would be wrong, and all
    /// might still lie in the vocabulary.
    pub fn open(path: &Path, width: Option<TokenWidth>, vocab: usize) -> Result<Self, DataError> {
        let width = match (TokenWidth::of_name(path), width) {
            (Ok(named), Some(asked)) if named != asked => {
                return Err(DataError::OtherWidth { path: path.to_path_buf(), named, asked });
            }
            (_, Some(asked)) => asked,
            (named, None) => named?,
        };
        let map = FileMap::open(path)?;
        if map.is_empty() {
            return Err(DataError::Empty { path: path.to_path_buf() });
        }
        if let Some(found @ (StandIn::GitLfs | StandIn::Html)) = StandIn::of(&map) {
            return Err(found.error(path).into());
        }
        if map.len() % width.bytes() != 0 {
            return Err(DataError::Truncated {
                path: path.to_path_buf(),
                bytes: map.len() as u64,
                width: width.bytes() as u64,
            });
        }
        // Ids are passed on as `i32`, so a vocabulary cannot be larger than that allows.
        let file = Self { map, width, vocab: vocab.min(i32::MAX as usize) };
        if file.map.len() <= CHECKED_AT_OPENING {
            file.check(0, &file.map)?;
        }
        Ok(file)
    }

    /// The largest token.
    fn largest(&self, bytes: &[u8]) -> u64 {
        let largest = match self.width {
            TokenWidth::U16 => bytes.chunks_exact(2).map(u16_at).max(),
            TokenWidth::U32 => bytes.chunks_exact(4).map(u32_at).max(),
        };
        largest.unwrap_or(0) as u64
    }

    /// Fails at the first token of `bytes`, which start at token `at`, that is out of vocabulary.
    fn check(&self, at: u64, bytes: &[u8]) -> Result<(), DataError> {
        let bad = match self.width {
            TokenWidth::U16 => bytes.chunks_exact(2).position(|pair| u16_at(pair) >= self.vocab),
            TokenWidth::U32 => bytes.chunks_exact(4).position(|quad| u32_at(quad) >= self.vocab),
        };
        let Some(bad) = bad else { return Ok(()) };
        let position = at + bad as u64;
        let width = self.width.bytes();
        let raw = &bytes[bad * width..][..width];
        Err(DataError::TokenOutOfVocabulary {
            path: self.map.path().to_path_buf(),
            position,
            byte: position * width as u64,
            token: if width == 2 { u16_at(raw) } else { u32_at(raw) } as u64,
            largest: self.largest(bytes),
            vocab: self.vocab,
        })
    }
}

impl Corpus for TokenFile {
    fn len_tokens(&self) -> u64 {
        (self.map.len() / self.width.bytes()) as u64
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError> {
        let range = checked_range(self, at, out.len())?;
        self.map.check_unchanged()?;
        let width = self.width.bytes();
        let bytes = &self.map[range.start * width..range.end * width];
        // Again, also for a file checked at opening: another program may have rewritten it.
        self.check(at, bytes)?;
        let raw = out.iter_mut().zip(bytes.chunks_exact(width));
        match self.width {
            TokenWidth::U16 => raw.for_each(|(token, pair)| *token = u16_at(pair) as i32),
            TokenWidth::U32 => raw.for_each(|(token, quad)| *token = u32_at(quad) as i32),
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let width = 8 * self.width.bytes();
        format!(
            "token file {} ({} tokens of {width} bits)",
            self.map.path().display(),
            self.len_tokens()
        )
    }
}

fn u16_at(pair: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([pair[0], pair[1]]))
}

fn u32_at(quad: &[u8]) -> usize {
    u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]) as usize
}
