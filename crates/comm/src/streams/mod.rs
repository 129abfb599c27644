//! The transport whose ranks share no memory: every rank has a byte stream to every other.
//!
//! A call goes in two steps. First every member tells all others what it calls; whoever has heard
//! from all compares, so a mismatch is found before any data are sent. Then data follow, straight
//! from the giver's blocks into the taker's: since a giver has heard that the taker called, there
//! is always a place for what arrives, and reading from a stream never has to wait for this rank.
//! So members may wait in different orders, and nothing but reductions is staged.
//!
//! Part `i` of a reduction goes to rank `i`, which adds in the order of the group with the kernel
//! that threads use: the bits are the same. Of an `all_reduce` the results go back.
//!
//! Nothing here knows where the other rank is. Socket pairs inside a process are what the launcher
//! makes today; connections between hosts are streams just as well, and the test of random
//! schedules has streams of its own.

mod calls;
mod endpoint;
mod frame;
mod idle;
mod lane;
mod launcher;
mod link;
mod plan;
mod progress;
mod region;
mod wire;

pub use launcher::Streams;
