//! How fast a step is, and how fast it could be.
//!
//! The floor is the time of the linear layers' and the head's matrix products alone: for each its
//! forward, the gradient of its input and the gradient of its weight, at the rate that products of
//! just these shapes reach on this machine, in the same run.

use std::time::Instant;

use phalanx_data::Batch;
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Model};
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
    let (mut times, gemm_seconds) = steps(config, &network, &model)?;
    // The steps' memory is free again by now, so the products do not add to the peak.
    let floor = floor_seconds(config, &model.train)?;
    let total: f64 = times.iter().sum();
    let median = median(&mut times);
    Ok(StepBench {
        median_ms: 1e3 * median,
        best_ms: 1e3 * times[0],
        tokens_per_s: config.train.tokens_per_step() as f64 / median,
        peak_rss_bytes: phalanx_sys::memory::peak_resident_bytes(),
        gemm_fraction: gemm_seconds / total,
        floor_ms: 1e3 * floor,
        floor_fraction: floor / median,
    })
}

/// The FLOP/s of the product that a model spends most on, on one that is cut to a size that takes
/// milliseconds: what the step line compares with.
pub fn gemm_rate(config: &Config, model: &Model) -> Result<Option<f64>> {
    let work = |(product, count): &(Product, usize)| product.flops() * *count as u64;
    let Some((largest, _)) = products(model).into_iter().max_by_key(work) else {
        return Ok(None);
    };
    let cut = Product {
        rows: largest.rows.min(1024),
        from: largest.from.min(2048),
        to: largest.to.min(2048),
        ..largest
    };
    let mut engine = host_engine(config.run.threads.get())?;
    let seconds = time_products(&mut engine, &[cut], types(config), ROUNDS)?;
    Ok(seconds.first().map(|s| cut.flops() as f64 / s.best))
}

/// The time of each step, and seconds inside matmul calls over all of them.
fn steps(config: &Config, network: &Network, models: &Models) -> Result<(Vec<f64>, f64)> {
    let engine = host_engine(config.run.threads.get())?;
    let settings = Settings::new(config);
    let mut session = Session::new(engine, models, settings, &mut *network.start())?;
    let rate = LearningRate::new(config);
    let (mut times, mut before) = (Vec::new(), 0.0);
    for step in 1..=WARM_UP + TIMED {
        if step == WARM_UP + 1 {
            before = session.engine().matmul_seconds();
        }
        let batch = random_batch(config, step as u64);
        let begun = Instant::now();
        corpus::with_step_data(&batch, |data| session.step(data, rate.at(step)))?;
        if step > WARM_UP {
            times.push(begun.elapsed().as_secs_f64());
        }
    }
    Ok((times, session.engine().matmul_seconds() - before))
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
