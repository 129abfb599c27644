//! Communication between ranks: groups, collectives over strided blocks, and asynchronous handles.
//!
//! A [`Group`] is an ordered list of ranks. Every rank holds one endpoint, a [`Communicator`]; it
//! starts calls ([`Call`] is plain data) and waits for them. A [`Launcher`] starts the ranks of
//! this process, and a [`RankPool`] runs them. With [`Threads`] every rank reads directly from the
//! others' memory, without intermediate copies; with [`SharedWorld`] ranks are processes that share
//! some of it; with [`Streams`] ranks share no memory; with [`Mpi`] the streams
//! between them go through an MPI library. With [`Processes`] the ranks are the processes
//! of a job, which use one of these. Reductions are done in the order of the group, so their
//! bits are the same on every rank and in every run. A
//! wrong, late or missing call is an error that names the ranks. See `docs/communication.md`.

mod blocking;
mod blocks;
mod call;
mod communicator;
mod device;
mod element;
mod error;
mod exchange;
mod group;
mod halo;
mod hash;
mod header;
mod kernel;
mod launch;
mod matching;
mod mpi;
mod planned;
mod processes;
mod ragged;
mod rank_pool;
mod recorder;
mod sanity;
#[cfg(test)]
mod shared_world_tests;
mod site;
mod streams;
mod sync;
mod threads;
mod traffic;
mod volume;
mod workers;

pub use blocking::Collectives;
pub use blocks::{Blocks, Strides};
pub use call::{Call, CollectiveOp, OpKind, ReduceOp};
pub use communicator::{Busy, CallWatch, Communicator, Handle, Stop};
pub use device::{CallNote, Combining, DeviceMover, Reached, StridedRows};
pub use element::Element;
pub use error::{CommError, Failure, Side};
pub use group::{Group, GroupId};
pub use halo::PlannedEdge;
pub use launch::{Launcher, LocalRank};
pub use mpi::{Mpi, find_shim};
pub use planned::{
    CallSite, CountedEndpoint, FilledRows, PlacedCall, PlannedCollective, PlannedRows,
};
pub use processes::{
    BadEnvironment, BadHostFile, Environment, HostShare, ListedHost, MeetingPoint, Membership,
    Processes, StateMemory, Token, build, fill_slots, names,
};
pub use rank_pool::{PoolFailure, RankPool, run_ranks};
pub use recorder::{
    Did, FlightRecorder, JobSnapshot, JobWords, RankSnapshot, RankWords, RecordedEvent, SeenEvent,
};
pub use site::Site;
pub use streams::Streams;
pub use threads::{Options, SharedWorld, Threads, Waiting};
pub use traffic::{Traffic, TrafficCount};
pub use volume::{Algorithm, volume};
