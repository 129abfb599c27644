//! The transport of ranks that see each other's memory: threads of one process, or processes of one
//! machine. The protocol is the same; only where its words and the ranks' data lie differs (`wall`).

mod board;
mod endpoint;
mod entries;
mod head;
mod idle;
mod launcher;
mod movement;
mod options;
mod progress;
mod room;
mod shared_world;
mod staging;
mod wall;
mod world;

pub use launcher::Threads;
pub(crate) use options::ArenaLife;
pub use options::{Options, Waiting};
pub use shared_world::SharedWorld;
