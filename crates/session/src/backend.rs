//! Where the ranks of a session run: an engine for each, and how they communicate.

use std::sync::Arc;
use std::time::Instant;

use phalanx_call::Requirements;
use phalanx_comm::{Communicator, Launcher, PoolFailure, RankPool};
use phalanx_engine::{Counters, Engine};
use phalanx_ir::DType;

use super::codec::{decoded, encoded};
use super::command::{Command, LocalRanks, Reply};
use super::planner::Planner;
use super::worker::RankWorker;
use super::{Lowered, Settings, job, lost};
use crate::products::{Limits, ProductRounds, TimedProduct, time_products};
use phalanx_config::CpuUnits;
use phalanx_error::{Error, Problem, Result};

/// An engine and a transport: what the command and the library train on.
pub trait Backend: Send + Sync {
    /// The memory that its engines need besides the values of programs, if products use these units.
    fn requirements(&self, units: CpuUnits) -> Arc<dyn Requirements>;

    /// Starts the ranks of this process, each with its scripts loaded. They allocate no memory yet.
    fn launch(&self, planner: &Planner<'_>) -> Result<Box<dyn LocalRanks>>;

    /// Times products on all ranks at once; gives the rounds by local rank and product.
    fn time_products(&self, size: Size, products: &Timing<'_>) -> Result<Vec<Vec<ProductRounds>>>;
}

/// How many ranks there are, and how many messages they may have in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Size {
    /// The ranks of the world.
    pub ranks: usize,
    /// Threads of each.
    pub threads: usize,
    /// The most messages that a step has in flight on one channel, if it sends any: senders do not
    /// wait for receivers.
    pub depth: Option<usize>,
    /// Whether ranks keep state there, which may outlive their processes.
    pub keeps: bool,
    /// Whether products of f32 may round their operands to TF32.
    pub tf32: bool,
    /// Which units of a processor products may use.
    pub units: CpuUnits,
    /// Whether exchanges go before other calls that can move.
    pub exchanges_first: bool,
}

impl Size {
    /// Refuses more threads than a process can have.
    pub fn check(self) -> Result<()> {
        let Self { ranks, threads, .. } = self;
        let all = ranks.saturating_mul(threads.max(1));
        if all <= MOST_THREADS {
            return Ok(());
        }
        let problem = Problem::new(format!("{ranks} ranks of {threads} threads are too many"))
            .because(format!("ranks are threads of one process, which has at most {MOST_THREADS}"));
        let most = MOST_THREADS / threads.max(1);
        Err(Error::refused(match most {
            0 => problem.nearest("run.threads = 1"),
            most => problem.nearest(format!("{most} ranks, or fewer")),
        }))
    }

    /// The size of a session.
    pub fn of(lowered: &Lowered) -> Self {
        let settings = &lowered.settings;
        // What is kept of a micro-batch may be parked, value by value.
        let kept = if lowered.moves.is_empty() { 0 } else { lowered.kept_values() };
        let messages = settings.microbatches * (4 * lowered.chunks()).max(kept);
        let depth = lowered.is_pipeline().then_some(messages);
        let Settings { threads, tf32, units, .. } = *settings;
        let exchanges_first = settings.parallel.exchanges_first;
        Self { ranks: lowered.ranks(), threads, depth, keeps: false, tf32, units, exchanges_first }
    }
}

/// The most threads that all ranks of a process have together. Far more than any machine has cores;
/// with tens of thousands the system would end the process instead of refusing a thread.
const MOST_THREADS: usize = 1024;

/// Products to be timed.
#[derive(Clone, Copy, Debug)]
pub struct Timing<'a> {
    /// The products.
    pub products: &'a [TimedProduct],
    /// The element types of operands and of gradients.
    pub types: [DType; 2],
    /// How long they are timed.
    pub limits: Limits,
}

/// Ranks that a launcher starts, all with the same kind of engine.
pub struct EngineBackend<L, M> {
    /// Makes the launcher of a world of a given size.
    pub launcher: L,
    /// Makes a rank's engine for a world of this size, from its end of the transport.
    pub engine: M,
    /// The memory that such engines need besides the values of programs, if products use some units.
    pub requirements: Box<dyn Fn(CpuUnits) -> Arc<dyn Requirements> + Send + Sync>,
}

impl<L, M> EngineBackend<L, M> {
    fn pool<E, S>(
        &self,
        size: Size,
        make: impl Fn(usize, E) -> Result<S> + Sync,
    ) -> Result<RankPool<S>>
    where
        L: Fn(Size) -> Box<dyn Launcher>,
        M: Fn(Size, Box<dyn Communicator>) -> Result<E> + Sync,
        S: Send,
    {
        size.check()?;
        let engine = &self.engine;
        let make = |endpoint: Box<dyn Communicator>| {
            let rank = endpoint.rank();
            make(rank, engine(size, endpoint)?)
        };
        let launcher = (self.launcher)(size);
        RankPool::new(&*launcher, make)
            .map_err(|failed: PoolFailure<Error>| lost(failed, size.ranks))
    }
}

impl<L, M, E> Backend for EngineBackend<L, M>
where
    L: Fn(Size) -> Box<dyn Launcher> + Send + Sync,
    M: Fn(Size, Box<dyn Communicator>) -> Result<E> + Send + Sync,
    E: Engine + Counters + Send + 'static,
{
    fn requirements(&self, units: CpuUnits) -> Arc<dyn Requirements> {
        (self.requirements)(units)
    }

    fn launch(&self, planner: &Planner<'_>) -> Result<Box<dyn LocalRanks>> {
        let load = |rank, engine: E| RankWorker::load(engine, planner, rank);
        let size = Size { keeps: planner.lowered.trains, ..Size::of(planner.lowered) };
        Ok(Box::new(self.pool(size, load)?))
    }

    fn time_products(&self, size: Size, timing: &Timing<'_>) -> Result<Vec<Vec<ProductRounds>>> {
        let Timing { products, types, limits } = *timing;
        let mut pool = self.pool(size, |_, engine: E| Ok(engine))?;
        let timed =
            pool.run(|_, engine| time_products(engine, products, types, limits, size.ranks));
        timed.map_err(|failed: PoolFailure<Error>| lost(failed, size.ranks))
    }
}

impl<E: Engine + Counters + Send> LocalRanks for RankPool<RankWorker<E>> {
    fn world(&self) -> usize {
        self.ranks()
    }

    fn local(&self) -> &[usize] {
        RankPool::local(self)
    }

    fn ask(&mut self, mut command: Command<'_>) -> Result<Vec<Reply>> {
        let ranks = self.ranks();
        if let Command::Steps { trace: Some((_, origin)), .. } = &mut command {
            // Processes leave the exchange together, and count from there.
            if LocalRanks::exchange(self, &[])?.is_some() {
                *origin = Instant::now();
            }
        }
        let answers = self.run(|_, worker| worker.answer(command));
        let answers = answers.map_err(|failed: PoolFailure<Error>| lost(failed, ranks))?;
        if !command.is_for_all() || answers.len() == ranks {
            return Ok(answers);
        }
        let own = answers.first().map(encoded).unwrap_or_default();
        let Some(all) = LocalRanks::exchange(self, &own)? else { return Ok(answers) };
        let broken = || Error::failed(Problem::new("a rank sent an answer that cannot be read"));
        all.iter().map(|bytes| decoded(bytes).ok_or_else(broken)).collect()
    }

    fn exchange(&mut self, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let ranks = self.ranks();
        let all = self.local().len() < ranks;
        let words = job::recorder().zip(self.local().first()).filter(|_| all);
        let words = words.map(|(recorder, &rank)| recorder.rank(rank));
        words.iter().for_each(|words| words.set_meets(true));
        let told = RankPool::exchange(self, own);
        words.iter().for_each(|words| words.set_meets(false));
        told.map_err(|failed: PoolFailure<Error>| lost(failed, ranks))
    }
}
