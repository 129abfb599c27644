//! How fast a step is, and how fast it could be.
//!
//! The floor is the time of the linear layers' and the head's matrix products alone ([`floor`]),
//! measured in the same run.

use std::time::Instant;

use phalanx_data::Batch;
use phalanx_ir::random::Stream;
use phalanx_sys::count_alloc::{Counts, counts};
use serde::Serialize;

use crate::floor::{self, Effort};
use phalanx_config::{Config, Loaded};
use phalanx_error::Result;
use phalanx_session::corpus;
use phalanx_session::host;
use phalanx_session::job;
use phalanx_session::network::Network;
use phalanx_session::products::median;
use phalanx_session::rate::LearningRate;
use phalanx_session::{Lowered, OwnedStep, Prepared, Session, Settings};

/// Steps before the clock starts.
pub(crate) const WARM_UP: usize = 3;
/// Steps that are timed.
pub(crate) const TIMED: usize = 12;

/// The result of `bench step`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepBench {
    /// The median time of a step.
    pub median_ms: f64,
    /// The shortest time of a step.
    pub best_ms: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// The peak memory of the process, if the system reports it.
    pub peak_rss_bytes: Option<u64>,
    /// Memory outside the plan that kernels use while they run, over all threads.
    pub kernel_scratch_bytes: u64,
    /// The largest block into which the matrix library packed operands. Known only where the
    /// counting allocator is the global allocator, as in the command.
    pub gemm_packing_bytes: Option<u64>,
    /// All bytes that it allocated for packing in one step after the warm-up; known under the same
    /// condition. Blocks that it keeps between steps are not counted.
    pub gemm_packing_bytes_per_step: Option<u64>,
    /// The share of the step time spent in matmul calls.
    pub gemm_fraction: f64,
    /// Time of the linear layers and the head at the measured GEMM rate.
    pub floor_ms: f64,
    /// The floor as a share of the median.
    pub floor_fraction: f64,
    /// How many ranks there were.
    pub ranks: usize,
    /// Processor time of a step, summed over ranks and averaged over steps; time spent waiting is
    /// not counted. Known where each rank has one thread.
    pub busy_ms: Option<f64>,
    /// The same as a share of the processor time of the cores that ranks can use.
    pub busy_fraction: Option<f64>,
    /// Processor time of a step on the rank that needs most.
    pub busiest_ms: Option<f64>,
}

/// Times full steps, clipping and optimizer included, on random tokens.
pub fn step(loaded: &Loaded) -> Result<StepBench> {
    let config = &loaded.config;
    job::fits(config.parallel.ranks().get())?;
    let network = Network::new(loaded)?;
    let lowered = Lowered::new(&network.models(config, false)?, Settings::new(config)?)?;
    let Timed { mut times, gemm_seconds, busy_seconds, kernel_scratch, packed } =
        steps(config, &network, &lowered)?;
    // The steps' memory is free again by now, so the products do not add to the peak.
    let (compute, device) = (config.precision.compute.into(), config.run.device);
    let floor = floor::seconds(&lowered, &*host::own_machine(device), compute, Effort::CAREFUL)?
        .unwrap_or(0.0);
    let total: f64 = times.iter().sum();
    let ranks = lowered.ranks();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get()).min(ranks);
    let median = median(&mut times);
    let busy = busy_seconds.as_ref().map(|ranks| ranks.iter().sum::<f64>());
    let busiest = busy_seconds.map(|ranks| ranks.into_iter().fold(0.0, f64::max));
    Ok(StepBench {
        median_ms: 1e3 * median,
        best_ms: 1e3 * times[0],
        tokens_per_s: config.train.tokens_per_step() as f64 / median,
        peak_rss_bytes: phalanx_sys::memory::peak_resident_bytes(),
        kernel_scratch_bytes: kernel_scratch as u64,
        gemm_packing_bytes: packed.map(|counts| counts.exempt_largest),
        gemm_packing_bytes_per_step: packed.map(|counts| counts.exempt_bytes / TIMED as u64),
        gemm_fraction: gemm_seconds / total,
        floor_ms: 1e3 * floor,
        floor_fraction: floor / median,
        ranks,
        busy_ms: busy.map(|busy| 1e3 * busy / TIMED as f64),
        busy_fraction: busy.map(|busy| busy / (total * cores as f64)),
        busiest_ms: busiest.map(|busiest| 1e3 * busiest / TIMED as f64),
    })
}

/// Measurements of the timed steps.
struct Timed {
    /// The time of each step.
    times: Vec<f64>,
    /// Seconds inside matmul calls, over all steps.
    gemm_seconds: f64,
    /// Processor seconds of each rank over all steps, if each has only one thread.
    busy_seconds: Option<Vec<f64>>,
    /// Bytes of the kernels' scratch memory.
    kernel_scratch: usize,
    /// Allocations of the steps, if counted; inside matrix products only packing allocates.
    packed: Option<Counts>,
}

fn steps(config: &Config, network: &Network, lowered: &Lowered) -> Result<Timed> {
    let threads = config.run.threads.get();
    let mut session = Prepared::of(lowered, &*host::own_machine(config.run.device))?
        .start_from(&*network.source())?;
    let rate = LearningRate::new(config);
    let (mut times, mut before, mut allocated) = (Vec::new(), Usage::default(), counts());
    let own = |step: usize| {
        let batch = random_batch(config, step as u64);
        corpus::with_step_data(&batch, OwnedStep::new)
    };
    let mut next = own(1);
    for step in 1..=WARM_UP + TIMED {
        if step == WARM_UP + 1 {
            before = Usage::of(&mut session)?;
            allocated = counts();
        }
        let batch = std::mem::replace(&mut next, own(step + 1));
        let ahead = session.looks_ahead().then_some((&next, rate.at(step + 1)));
        let begun = Instant::now();
        batch.with(|data| session.step_before(data, rate.at(step), ahead))?;
        if step > WARM_UP {
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    let counted = allocated != Counts::default();
    let packed = counted.then(|| counts() - allocated);
    let after = Usage::of(&mut session)?;
    Ok(Timed {
        times,
        gemm_seconds: after.gemm - before.gemm,
        busy_seconds: (threads == 1)
            .then(|| after.busy.iter().zip(&before.busy).map(|(after, before)| after - before))
            .map(Iterator::collect),
        kernel_scratch: after.beside,
        packed,
    })
}

/// Time and memory that ranks have used so far.
#[derive(Clone, Default)]
struct Usage {
    /// Wall-clock seconds inside matrix products, averaged over ranks.
    gemm: f64,
    /// By rank: processor seconds of its own thread, without time spent waiting.
    busy: Vec<f64>,
    /// Bytes outside the plan, over all ranks.
    beside: usize,
}

impl Usage {
    fn of(session: &mut Session) -> Result<Self> {
        let ranks = session.measure()?;
        let gemm: f64 = ranks.iter().map(|rank| rank.product_seconds).sum();
        Ok(Self {
            gemm: gemm / ranks.len() as f64,
            busy: ranks.iter().filter_map(|rank| rank.busy_seconds).collect(),
            beside: ranks.iter().map(|rank| rank.scratch_bytes).sum(),
        })
    }
}

/// A batch of random tokens, the same for the same step.
pub fn random_batch(config: &Config, step: u64) -> Batch {
    let tokens = config.train.tokens_per_step();
    let vocab = config.model.vocab.get() as u64;
    let stream = Stream::named(config.run.seed, "bench tokens");
    let row = |purpose: u64| -> Vec<i32> {
        let first = (2 * step + purpose) * tokens as u64;
        (0..tokens as u64).map(|i| stream.below(first + i, vocab) as i32).collect()
    };
    Batch {
        step: step - 1,
        first_sample: (step - 1) * config.train.batch_size.get() as u64,
        ids: row(0),
        targets: row(1),
        pixels: Vec::new(),
        valid_tokens: tokens as u64,
    }
}
