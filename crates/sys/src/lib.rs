//! The few system facilities that need unsafe code or system calls: file maps, arenas, allocation
//! counting, memory readings, memory that processes share, libraries that are opened at run time,
//! signals, waiting for streams and for words of memory, and files that are replaced atomically.
//! Interfaces are safe where that is possible, so that the crates above can forbid unsafe code.

pub mod arena;
mod cores;
pub mod count_alloc;
mod diagnostic;
pub mod disk;
mod error;
pub mod futex;
pub mod interrupt;
pub mod memory;
pub mod mmap;
mod poll;
pub mod process;
mod read;
mod shared_library;
pub mod shared_memory;
mod stand_in;
mod time;

pub use arena::Arena;
pub use cores::{LogicalCore, Topology, allowed_cores, bind_thread, computing_cores};
pub use count_alloc::CountingAllocator;
pub use diagnostic::Diagnostic;
pub use disk::{Staged, write_atomic};
pub use error::{SysError, remedy};
pub use mmap::FileMap;
pub use poll::Poll;
pub use read::{open_regular, read_regular, read_stream, read_text};
pub use shared_library::SharedLibrary;
pub use shared_memory::SharedMemory;
pub use stand_in::StandIn;
pub use time::{machine_nanos, thread_cpu_time};
