//! Ranks that are processes, on one host or on several.
//!
//! Every process of a job is the same program and holds one rank. [`Environment`] says which rank it
//! is and where ranks meet; [`Membership::meet`] introduces all processes to each other. From then on each
//! has a listener that the others know, and rank 0 has a line to every other: over it processes say
//! why they end, and rank 0 sends what only it has measured. A world is a set of fresh streams
//! between all ranks ([`Processes`] launches one), so a process may take part in several worlds, one
//! after the other.
//!
//! A connection begins with a hello of fixed size, whose token is compared before anything else in
//! it is read. What a stranger sends never reaches a rank.

mod addresses;
mod build_id;
mod environment;
mod hello;
mod hosts;
mod identity;
mod job;
mod launcher;
mod line;
mod meeting;
mod nodelist;
mod pace;
mod socket;
mod world;

pub use environment::{BadEnvironment, Environment, MeetingPoint, names};
pub use hello::Token;
pub use hosts::{BadHostFile, HostShare, ListedHost, fill_slots};
pub use identity::build;
pub use job::Membership;
pub use launcher::{Processes, StateMemory};
