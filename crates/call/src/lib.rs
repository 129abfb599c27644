//! What scripts and engines both speak of.
//!
//! A script asks an engine for calls; this crate has the words of such a call and nothing else: the
//! [`Lane`] it is issued on, the [`Tier`] and the [`MemoryKind`] of memory it touches, the [`Slots`] of
//! a program's values and what an engine needs beside them ([`Requirements`]), the [`Message`]s between
//! ranks, and what a program moves between them ([`traffic`]). It knows no
//! compiler and no machine, so an engine depends on little.
#![forbid(unsafe_code)]

mod lane;
mod message;
mod requirements;
mod slots;
pub mod traffic;

pub use lane::{Lane, MemoryKind, Tier};
pub use message::{Block, Message, Value};
pub use requirements::{NoScratch, Requirements};
pub use slots::{ALIGN, Life, Slot, Slots};
pub use traffic::{Moved, Route};
