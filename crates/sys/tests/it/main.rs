//! The system facilities, as their users see them.

mod disk;
mod mmap;
mod read;
mod scratch;
