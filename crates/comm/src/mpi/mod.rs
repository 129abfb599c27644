//! The transport whose bytes go through an MPI library.
//!
//! Phalanx is built without MPI. A small C file, `tools/mpi/shim.c`, is the only one that knows it: the
//! `mpicc` of the machine builds it at its first use ([`find_shim`]), and it is opened at run time. So
//! one program runs over any MPI library. The shim moves bytes between two ranks; on top of that lies
//! the transport of byte streams, as over TCP: reductions are ours, in the order of ranks, and the bits
//! are the same as on threads.
//!
//! Bytes are copied once on each side, into pieces that belong to this module: so the buffers of a call
//! are free when it has failed, whatever the library still does.

mod flow;
mod library;
mod shim;
mod stream;

pub use library::Mpi;
pub use shim::find_shim;
pub(crate) use stream::MpiStream;
