//! How fast a step is on a GPU.

use std::time::Instant;

use serde::Serialize;

use crate::step::{TIMED, WARM_UP, random_batch};
use phalanx_config::Loaded;
use phalanx_error::Result;
use phalanx_ir::DType;
use phalanx_session::network::Network;
use phalanx_session::products::median;
use phalanx_session::rate::LearningRate;
use phalanx_session::{Lowered, OwnedStep, Prepared, Settings, corpus, host, job};

/// The result of `bench step` on a GPU.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct GpuStepBench {
    /// The GPU.
    pub gpu: String,
    /// The median time of a step.
    pub median_ms: f64,
    /// The shortest time of a step.
    pub best_ms: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// FLOPs of the programs of a step, per second at the median, in units of 10¹².
    pub tflops: f64,
    /// The same as a share of the GPU's peak rate, if that is known and programs compute in bf16.
    pub mfu: Option<f64>,
    /// Bytes that the driver gave to this run: arenas, the libraries' workspaces, kernels.
    pub peak_device_bytes: u64,
    /// Bytes of arenas and workspaces as they were planned before any rank began.
    pub planned_device_bytes: u64,
    /// Seconds until the first step had ended, compilation included.
    pub start_s: f64,
    /// How many ranks there were.
    pub ranks: usize,
}

/// Times full steps, clipping and optimizer included, on random tokens.
pub fn gpu_step(loaded: &Loaded) -> Result<GpuStepBench> {
    let begun = Instant::now();
    let (config, before) = (&loaded.config, host::gpu()?);
    job::fits(config.parallel.ranks().get())?;
    let network = Network::new(loaded)?;
    let lowered = Lowered::new(&network.models(config, false)?, Settings::new(config)?)?;
    let backend = host::own_machine(config.run.device);
    let mut session = Prepared::of(&lowered, &*backend)?.start_from(&*network.source())?;
    let rate = LearningRate::new(config);
    let (mut times, mut start_s) = (Vec::new(), 0.0);
    // As in training: the next batch is there when a step begins.
    let own = |step: usize| {
        let batch = random_batch(config, step as u64);
        corpus::with_step_data(&batch, OwnedStep::new)
    };
    let mut next = own(1);
    for step in 1..=WARM_UP + TIMED {
        let batch = std::mem::replace(&mut next, own(step + 1));
        let ahead = session.looks_ahead().then_some((&next, rate.at(step + 1)));
        let from = Instant::now();
        batch.with(|data| session.step_before(data, rate.at(step), ahead))?;
        match step {
            1 => start_s = begun.elapsed().as_secs_f64(),
            _ if step > WARM_UP => times.push(from.elapsed().as_secs_f64()),
            _ => {}
        }
    }
    let after = host::gpu()?;
    let ranks = lowered.ranks();
    let median = median(&mut times);
    let flops = session.flops_per_step() as f64 / median;
    let bf16 = DType::from(config.precision.compute) == DType::Bf16;
    Ok(GpuStepBench {
        gpu: after.name,
        median_ms: 1e3 * median,
        best_ms: 1e3 * times[0],
        tokens_per_s: config.train.tokens_per_step() as f64 / median,
        tflops: flops / 1e12,
        mfu: after.bf16_rate.filter(|_| bf16).map(|peak| flops / peak),
        peak_device_bytes: before.free.saturating_sub(after.free) as u64,
        planned_device_bytes: session.planned_bytes(ranks) as u64,
        start_s,
        ranks,
    })
}
