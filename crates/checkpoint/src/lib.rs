//! Checkpoints: the whole state of a training run on disk, whatever its layout was.
//!
//! A checkpoint is a folder, `step-00000120`. Every rank that writes has one file in it, in the
//! safetensors format: its buffers as they lie in memory. The header of a file says for each piece
//! which [`SavedEntry`] it is: a range of a block of a parameter, with the parameter's own global shape.
//! So a reader asks for global ranges ([`Checkpoint::read`]) and needs to know nothing of the ranks
//! that wrote. The [`Manifest`] says how far the run was, and has a hash of every 16 MiB, so that a
//! part of a file can be checked without the rest.
//!
//! A checkpoint is written to `step-00000120.tmp` and renamed when everything is on the disk
//! ([`Folder::commit`]): a run that is killed at any moment leaves its last whole checkpoint.
#![forbid(unsafe_code)]

mod entry;
mod folder;
mod header;
mod manifest;
mod past_cache;
mod reader;
mod storage;
mod writer;

pub use entry::{FULL, LOWER, ParamBlock, SavedEntry, StoredRun, UPPER};
pub use folder::{CONFIG, Folder, LATEST, MANIFEST, newest, newest_and_damaged};
pub use header::{Header, PlacedEntry};
pub use manifest::{FORMAT, FileSummary, Manifest, Piece, SavedExperts, SavedRecord};
pub use reader::{Checked, Checkpoint};
pub use storage::{FileSink, FileSource};
pub use writer::{FileWriter, PIECE_BYTES};
