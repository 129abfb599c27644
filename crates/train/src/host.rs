//! The engine that the command and the library train with on this machine.

use phalanx_comm::{Communicator, Launcher, Options, Threads};
use phalanx_cpu::CpuEngine;

use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = CpuEngine;

/// An engine with this many threads.
pub fn host_engine(threads: usize) -> Result<HostEngine> {
    Ok(CpuEngine::new(threads)?)
}

/// One rank's engine, with its endpoint to the others.
pub fn rank_engine(threads: usize, endpoint: Box<dyn Communicator>) -> Result<HostEngine> {
    Ok(CpuEngine::on_rank(threads, endpoint)?)
}

/// What brings up the ranks of a world on this machine.
pub fn launcher(ranks: usize, options: Options) -> impl Launcher {
    Threads { ranks, options }
}

/// How ranks wait for each other in a program that has the machine to itself: several are bound to
/// cores of their own where there are enough, so that no two are put on the same one.
pub fn own_machine(ranks: usize, threads: usize) -> Options {
    Options { threads_per_rank: threads, bind: ranks > 1, ..Options::default() }
}
