//! How fast a step is, and how fast it could be.
//!
//! The floor is the time of the linear layers' and the head's matrix products alone: for each its
//! forward, the gradient of its input and the gradient of its weight, at the rate that products of
//! just these shapes reach on this machine, in the same run.

use std::time::Instant;

use phalanx_data::Batch;
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Model};
use phalanx_sys::count_alloc::{Counts, counts};
use serde::Serialize;

use crate::config::{Config, Loaded};
use crate::corpus;
use crate::error::Result;
use crate::host::host_engine;
use crate::network::Network;
use crate::products::{Product, median, products, time_products};
use crate::schedule::LearningRate;
use crate::session::{Models, Session, Settings};

/// Steps before the clock starts.
const WARM_UP: usize = 3;
/// Steps that are timed.
const TIMED: usize = 12;
/// Rounds of each product.
const ROUNDS: usize = 7;
/// Rounds of each product where only a rough answer is wanted.
const SHORT_ROUNDS: usize = 4;

/// What `bench step` tells.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepBench {
    /// The median time of a step.
    pub median_ms: f64,
    /// The shortest time of a step.
    pub best_ms: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// The most memory that the process held, as far as the system says.
    pub peak_rss_bytes: Option<u64>,
    /// Memory beside the plan that kernels use while they run, over all threads.
    pub kernel_scratch_bytes: u64,
    /// The largest block that the matrix library packed operands into. Known where the counting
    /// allocator is the global one, as in the command.
    pub gemm_packing_bytes: Option<u64>,
    /// What it allocated for that in a warm step altogether, block after block; known likewise.
    /// Blocks that it keeps from one step to the next are not among them.
    pub gemm_packing_bytes_per_step: Option<u64>,
    /// The share of the steps' time inside matmul calls.
    pub gemm_fraction: f64,
    /// Time of the linear layers and the head at the measured GEMM rate.
    pub floor_ms: f64,
    /// The floor as a share of the median.
    pub floor_fraction: f64,
}

/// Times full steps, clipping and optimizer included, on random tokens.
pub fn step(loaded: &Loaded) -> Result<StepBench> {
    let config = &loaded.config;
    let network = Network::new(loaded)?;
    let model = network.models(config, false)?;
    let Timed { mut times, gemm_seconds, kernel_scratch, packed } =
        steps(config, &network, &model)?;
    // The steps' memory is free again by now, so the products do not add to the peak.
    let floor = floor_seconds(config, &model.train)?;
    let total: f64 = times.iter().sum();
    let median = median(&mut times);
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
    })
}

/// FLOPs of a product at a size that is measured before a run, where nobody wants to wait.
const SHORT_WORK: u64 = 2_000_000_000;

/// Seconds that the products of one step would take by themselves, all at the best rate that their
/// shapes reach: what the step line compares with. Large products are measured in part. `None` for a
/// model without products.
pub fn gemm_seconds(config: &Config, model: &Model) -> Result<Option<f64>> {
    let (whole, counts): (Vec<Product>, Vec<usize>) = products(model).into_iter().unzip();
    if whole.is_empty() {
        return Ok(None);
    }
    let cut: Vec<Product> = whole.iter().map(|p| p.cut(SHORT_WORK)).collect();
    let mut engine = host_engine(threads_of_all_ranks(config))?;
    let seconds = time_products(&mut engine, &cut, types(config), SHORT_ROUNDS)?;
    let each = whole.iter().zip(&cut).zip(&counts).zip(seconds);
    let microbatch: f64 = each
        .map(|(((whole, cut), &count), seconds)| {
            seconds.best * count as f64 * whole.flops() as f64 / cut.flops() as f64
        })
        .sum();
    Ok(Some(microbatch * config.train.microbatches.get() as f64))
}

/// Threads that can work at a time: those of all ranks, as far as there are cores.
fn threads_of_all_ranks(config: &Config) -> usize {
    let threads = config.run.threads.get();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    threads.saturating_mul(config.parallel.ranks().get()).min(cores.max(threads))
}

/// What was measured of the timed steps.
struct Timed {
    /// The time of each.
    times: Vec<f64>,
    /// Seconds inside matmul calls over all of them.
    gemm_seconds: f64,
    /// Bytes of the kernels' scratch memory.
    kernel_scratch: usize,
    /// What they allocated, if that is counted; inside matrix products only packing allocates.
    packed: Option<Counts>,
}

fn steps(config: &Config, network: &Network, models: &Models) -> Result<Timed> {
    let mut session = Session::new(models, Settings::new(config)?, &*network.start())?;
    let rate = LearningRate::new(config);
    let (mut times, mut before, mut allocated) = (Vec::new(), 0.0, counts());
    for step in 1..=WARM_UP + TIMED {
        if step == WARM_UP + 1 {
            before = matmul_seconds(&mut session)?;
            allocated = counts();
        }
        let batch = random_batch(config, step as u64);
        let begun = Instant::now();
        corpus::with_step_data(&batch, |data| session.step(data, rate.at(step)))?;
        if step > WARM_UP {
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    let counted = allocated != Counts::default();
    let packed = counted.then(|| counts() - allocated);
    let scratch = session.on_ranks(|_, rank| Ok(rank.engine().scratch_bytes()))?;
    Ok(Timed {
        times,
        gemm_seconds: matmul_seconds(&mut session)? - before,
        kernel_scratch: scratch.iter().sum(),
        packed,
    })
}

/// Seconds that the ranks spent in matrix products so far, in the mean.
fn matmul_seconds(session: &mut Session) -> Result<f64> {
    let seconds = session.on_ranks(|_, rank| Ok(rank.engine().matmul_seconds()))?;
    Ok(seconds.iter().sum::<f64>() / seconds.len() as f64)
}

fn floor_seconds(config: &Config, model: &Model) -> Result<f64> {
    let (products, counts): (Vec<Product>, Vec<usize>) = products(model).into_iter().unzip();
    let mut engine = host_engine(config.run.threads.get())?;
    let seconds = time_products(&mut engine, &products, types(config), ROUNDS)?;
    let each = seconds.iter().zip(counts);
    let microbatch: f64 = each.map(|(s, count)| s.median * count as f64).sum();
    Ok(microbatch * config.train.microbatches.get() as f64)
}

/// The types of a product's operands, and of a weight's gradient.
fn types(config: &Config) -> [DType; 2] {
    [config.precision.compute.into(), config.precision.grads.into()]
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
        valid_tokens: tokens as u64,
    }
}
