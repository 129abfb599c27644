//! The types that scripts and engines share.
//!
//! A script makes calls to an engine; this crate has the types of such a call and nothing else: the
//! [`Lane`] it is issued on, the [`Tier`] and the [`MemoryKind`] of memory it touches, the
//! [`Slots`] of a program's values and the memory that an engine needs besides them
//! ([`Requirements`]), the [`Message`]s between ranks, and what a program moves between them
//! ([`traffic`]) and holds of others ([`foreign_at_once`]). It depends on no compiler and no machine, so an engine has few dependencies.
#![forbid(unsafe_code)]

mod foreign;
mod lane;
mod message;
mod requirements;
mod slots;
pub mod traffic;

pub use foreign::foreign_at_once;
pub use lane::{Lane, MemoryKind, Tier};
pub use message::{Block, Message, Value};
pub use requirements::{NoScratch, Requirements};
pub use slots::{ALIGN, LiveRange, Slot, Slots};
pub use traffic::{Moved, MovedRows, Route};
