//! What a checkpoint says of the run, and of its own files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The version of the format that this program writes.
pub const FORMAT: u32 = 1;

/// The manifest of a checkpoint.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the format.
    pub format: u32,
    /// Steps taken.
    pub step: u64,
    /// Training samples that were given out: all of the loader's state.
    pub samples: u64,
    /// The seed of initial weights and random masks.
    pub seed: u64,
    /// The data, in words and numbers that another corpus would not share.
    pub corpus: String,
    /// The model, in the form of a `config.json`, if it has one.
    pub model: Option<String>,
    /// The ranks and their layout, for people.
    pub layout: String,
    /// What multiplied matrices, if the last bits depend on it.
    #[serde(default)]
    pub products: String,
    /// Scalars of the state by name, besides step and samples.
    #[serde(default)]
    pub scalars: BTreeMap<String, f64>,
    /// The latest outcomes of steps, which the rule that chooses scripts looks at.
    #[serde(default)]
    pub records: Vec<SavedRecord>,
    /// What the step has logged of its experts, if steps choose how they read them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<SavedExperts>,
    /// The kinds of entries that the files hold, with the number of elements of each.
    pub kinds: BTreeMap<String, u64>,
    /// The files.
    pub files: Vec<FileSummary>,
}

/// The outcome of a step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedRecord {
    /// The step, counted from 1.
    pub step: u64,
    /// How it ended.
    pub outcome: String,
}

/// What a step has logged of its experts.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SavedExperts {
    /// How it read them.
    pub layout: String,
    /// For each layer with experts: how many tokens chose each of them.
    pub chosen: Vec<Vec<u64>>,
}

/// A file of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileSummary {
    /// Its name in the folder.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Its pieces; together they are the whole file.
    pub pieces: Vec<Piece>,
}

/// A piece of a file, with its hash.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Piece {
    /// Its first byte.
    pub at: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The xxh3 hash of them, in hexadecimal.
    pub hash: String,
}

impl Piece {
    /// A piece with these contents.
    pub(crate) fn of(at: u64, contents: &[u8]) -> Self {
        let hash = xxhash_rust::xxh3::xxh3_64(contents);
        Self { at, bytes: contents.len() as u64, hash: format!("{hash:016x}") }
    }
}

impl FileSummary {
    /// The first byte that is in no piece, or in two.
    pub(crate) fn gap(&self) -> Option<u64> {
        let mut at = 0;
        for piece in &self.pieces {
            if piece.at != at {
                return Some(at);
            }
            at = at.checked_add(piece.bytes)?;
        }
        (at != self.bytes).then_some(at)
    }
}
