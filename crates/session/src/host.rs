//! The default backend of the command and the library: ranks are threads on this machine's cores.
//! Only this file names an engine and a transport.

use std::sync::Arc;

use phalanx_call::Requirements;
use phalanx_comm::{Communicator, Launcher, Options, Threads};
use phalanx_cpu::{CpuEngine, CpuRequirements};

use crate::{Backend, EngineBackend, Size};
use phalanx_error::Result;

/// The memory that this machine's engine needs besides the values of programs.
pub fn requirements() -> Arc<dyn Requirements> {
    Arc::new(CpuRequirements)
}

/// Ranks as threads: the default.
pub fn threads() -> Box<dyn Backend> {
    threads_with(Options::default())
}

/// Ranks as threads of a program that has the machine to itself: each is bound to its own core if
/// there are enough cores.
pub fn own_machine() -> Box<dyn Backend> {
    Box::new(backend(|size| Options { bind: size.ranks > 1, ..Options::default() }))
}

/// Ranks as threads that wait for each other as `options` say.
pub fn threads_with(options: Options) -> Box<dyn Backend> {
    Box::new(backend(move |_| options.clone()))
}

fn backend(options: impl Fn(Size) -> Options + Send + Sync) -> impl Backend {
    EngineBackend {
        launcher: move |size: Size| -> Box<dyn Launcher> {
            let options = options(size);
            let depth = options.depth.max(size.depth.unwrap_or(0));
            let options = Options { threads_per_rank: size.threads, depth, ..options };
            Box::new(Threads { ranks: size.ranks, options })
        },
        engine: rank_engine,
        requirements: requirements(),
    }
}

/// The launcher of such ranks for benchmarks of the transport alone, with one thread each.
pub fn launcher(ranks: usize) -> Box<dyn Launcher> {
    let options = Options { bind: ranks > 1, ..Options::default() };
    Box::new(Threads { ranks, options })
}

/// One rank's engine, with its endpoint to the others.
pub fn rank_engine(threads: usize, endpoint: Box<dyn Communicator>) -> Result<CpuEngine> {
    Ok(CpuEngine::on_rank(threads, endpoint)?)
}
