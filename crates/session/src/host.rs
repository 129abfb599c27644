//! The default backends of the command and the library: ranks are threads on this machine's cores, or
//! the processes of a job. Only this file names an engine and a transport.

use std::sync::Arc;
use std::time::Duration;

use phalanx_call::Requirements;
use phalanx_comm::{Communicator, Launcher, Options, Processes, StateMemory, Threads};
use phalanx_cpu::{CpuEngine, CpuRequirements};

use crate::{Backend, EngineBackend, Size, again, job};
use phalanx_error::Result;

/// The memory that this machine's engine needs besides the values of programs.
pub fn requirements() -> Arc<dyn Requirements> {
    Arc::new(CpuRequirements)
}

/// The processes of the job that this process has joined, each with one rank, if a session has as
/// many ranks; otherwise threads.
pub fn ranks() -> Box<dyn Backend> {
    Box::new(backend(|_| Options::default()))
}

/// Ranks as threads.
pub fn threads() -> Box<dyn Backend> {
    threads_with(Options::default())
}

/// The same as [`ranks`], for a program that has the machine to itself: each rank is bound to its own
/// core if there are enough cores.
pub fn own_machine() -> Box<dyn Backend> {
    Box::new(backend(|size| Options { bind: size.ranks > 1, ..Options::default() }))
}

/// Ranks as threads that wait for each other as `options` say.
pub fn threads_with(options: Options) -> Box<dyn Backend> {
    let launcher = |size: Size, options| -> Box<dyn Launcher> {
        Box::new(Threads { ranks: size.ranks, options })
    };
    Box::new(over(launcher, move |_| options.clone()))
}

fn backend(options: impl Fn(Size) -> Options + Send + Sync) -> impl Backend {
    over(job_or_threads, options)
}

/// Ranks in the processes of a job, if there is one of this size, and otherwise threads.
fn job_or_threads(size: Size, options: Options) -> Box<dyn Launcher> {
    let ranks = size.ranks;
    match job::joined().filter(|job| job.ranks() == ranks) {
        None => Box::new(Threads { ranks, options }),
        Some(job) => {
            let recorder = job::recorder().filter(|_| size.keeps).cloned();
            let memory = if size.keeps { again::memory() } else { StateMemory::Own };
            // Where the launcher ends ranks that hang, it does so before others lose patience.
            let more = if memory == StateMemory::Own { Duration::ZERO } else { job::LONGER };
            let options = Options { timeout: job.wait() + more, ..options };
            Box::new(Processes { job: job.clone(), options, recorder, memory })
        }
    }
}

fn over(
    launcher: impl Fn(Size, Options) -> Box<dyn Launcher> + Send + Sync,
    options: impl Fn(Size) -> Options + Send + Sync,
) -> impl Backend {
    EngineBackend {
        launcher: move |size: Size| -> Box<dyn Launcher> {
            let options = options(size);
            let depth = options.depth.max(size.depth.unwrap_or(0));
            launcher(size, Options { threads_per_rank: size.threads, depth, ..options })
        },
        engine: rank_engine,
        requirements: requirements(),
    }
}

/// The launcher of such ranks for benchmarks of the transport alone, with one thread each.
pub fn launcher(ranks: usize) -> Box<dyn Launcher> {
    let size = Size { ranks, threads: 1, depth: None, keeps: false };
    job_or_threads(size, Options { bind: ranks > 1, ..Options::default() })
}

/// One rank's engine, with its endpoint to the others.
pub fn rank_engine(threads: usize, endpoint: Box<dyn Communicator>) -> Result<CpuEngine> {
    Ok(CpuEngine::on_rank(threads, endpoint)?)
}
