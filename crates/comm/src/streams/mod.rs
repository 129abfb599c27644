//! The transport whose ranks share no memory: every rank has a byte stream to every other.
//!
//! A call has two steps. First every member announces its call to all others; a member that has all
//! announcements compares them, so a mismatch is found before any block is written. Then data follow,
//! directly from the sender's blocks into the receiver's: a sender knows that the receiver has made
//! the call, so there is always memory for what arrives, and reading from a stream never blocks. So
//! members may wait in different orders, and only reductions need staging buffers. A small block goes
//! right behind the announcement, and is kept aside if others have not announced the call yet: one way less.
//!
//! Part `i` of a reduction goes to rank `i`, which adds in the order of the group with the same
//! kernel as threads: the bits are the same. For an `all_reduce` the results are sent back.
//!
//! Nothing here depends on where the other rank is. The launcher here makes socket pairs inside a
//! process; processes on one or several hosts bring their own connections, and the test of random
//! schedules has its own streams.

mod calls;
mod computing;
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
pub(crate) use launcher::over_streams;
pub(crate) use wire::Stream;
