//! How fast a step is, and how fast it could be.
//!
//! The floor is the time of the linear layers' and the head's matrix products alone: for each its
//! forward, the gradient of its input and the gradient of its weight, at the rate that products of
//! just these shapes reach on this machine, in the same run.

use std::collections::BTreeMap;
use std::time::Instant;

use phalanx_data::{Batch, IGNORED};
use phalanx_ir::random::Stream;
use phalanx_ir::{Model, Op, Program, Role, ValueId};
use serde::Serialize;

use crate::config::{Config, Loaded};
use crate::corpus;
use crate::error::Result;
use crate::host::{self, host_engine};
use crate::network::Network;
use crate::schedule::LearningRate;
use crate::session::{Session, Settings};

/// Steps before the clock starts.
const WARM_UP: usize = 3;
/// Steps that are timed.
const TIMED: usize = 12;

/// What `bench step` tells. What this machine's engine cannot measure is absent.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct StepBench {
    /// The median time of a step.
    pub median_ms: f64,
    /// The shortest time of a step.
    pub best_ms: f64,
    /// Tokens per second at the median.
    pub tokens_per_s: f64,
    /// The most memory that the process held.
    pub peak_rss_bytes: Option<u64>,
    /// The share of the steps' time inside matmul calls.
    pub gemm_fraction: Option<f64>,
    /// Time of the linear layers and the head at the measured GEMM rate.
    pub floor_ms: Option<f64>,
    /// The floor as a share of the median.
    pub floor_fraction: Option<f64>,
}

/// Times full steps, clipping and optimizer included, on random tokens.
pub fn step(loaded: &Loaded) -> Result<StepBench> {
    let config = &loaded.config;
    let network = Network::new(loaded)?;
    let models = network.models(config, false)?;
    let engine = host_engine(config.run.threads.get())?;
    let settings = Settings::new(config);
    let mut session = Session::new(engine, &models, settings, &mut *network.start())?;
    let rate = LearningRate::new(config);
    let (mut times, mut in_products) = (Vec::new(), 0.0);
    for step in 1..=WARM_UP + TIMED {
        let batch = random_batch(config, step as u64);
        let before = host::product_seconds(session.engine());
        let begun = Instant::now();
        corpus::with_step_data(&batch, |data| session.step(data, rate.at(step)))?;
        if step > WARM_UP {
            times.push(begun.elapsed().as_secs_f64());
            let after = host::product_seconds(session.engine());
            in_products += after.zip(before).map_or(f64::NAN, |(a, b)| a - b);
        }
    }
    let peak_rss_bytes = phalanx_sys::memory::peak_resident_bytes();
    let floor = floor_seconds(&models.train, config.train.microbatches.get(), |product| {
        host::time_product(session.engine_mut(), product)
    });
    let total: f64 = times.iter().sum();
    times.sort_by(f64::total_cmp);
    let median = (times[(TIMED - 1) / 2] + times[TIMED / 2]) / 2.0;
    Ok(StepBench {
        median_ms: 1e3 * median,
        best_ms: 1e3 * times[0],
        tokens_per_s: config.train.tokens_per_step() as f64 / median,
        peak_rss_bytes,
        gemm_fraction: Some(in_products / total).filter(|share| share.is_finite()),
        floor_ms: floor.map(|seconds| 1e3 * seconds),
        floor_fraction: floor.map(|seconds| seconds / median),
    })
}

/// Which product of a linear layer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Pass {
    /// `y = x·w`: `[rows, from] · [from, to]`.
    Forward,
    /// `dx = dy·wᵀ`: `[rows, to] · [to, from]`.
    InputGradient,
    /// `dw = xᵀ·dy`: `[from, rows] · [rows, to]`.
    WeightGradient,
}

/// A product of a linear layer of this shape.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Product {
    /// Which.
    pub pass: Pass,
    /// Rows of the layer's input: the tokens of a micro-batch.
    pub rows: usize,
    /// Width of its input.
    pub from: usize,
    /// Width of its output.
    pub to: usize,
    /// Whether the weight is stored as `[to, from]`, as a tied head's is.
    pub transposed: bool,
}

impl Product {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        2 * (self.rows * self.from * self.to) as u64
    }
}

/// The products of a model's linear layers and head in one step of one micro-batch, each with how
/// often it occurs. Attention's own products are not among them.
pub fn products(model: &Model) -> BTreeMap<Product, usize> {
    let mut products = BTreeMap::new();
    for instance in model.instances() {
        for product in segment_products(&model.segments()[instance.segment]) {
            *products.entry(product).or_default() += 1;
        }
    }
    products
}

/// Seconds that all products take, each distinct one timed once.
fn floor_seconds(
    model: &Model,
    microbatches: usize,
    mut time: impl FnMut(&Product) -> Option<f64>,
) -> Option<f64> {
    let mut total = 0.0;
    for (product, count) in products(model) {
        total += (count * microbatches) as f64 * time(&product)?;
    }
    Some(total)
}

fn segment_products(forward: &Program) -> Vec<Product> {
    let is_param = |value: ValueId| {
        forward
            .inputs_with(Role::Param)
            .any(|port| port.value == value)
    };
    // What depends on data alone has no gradient.
    let mut differentiated = vec![false; forward.values().len()];
    for port in forward.inputs() {
        differentiated[port.value.index()] = matches!(port.role, Role::Param | Role::Boundary);
    }
    let mut products = Vec::new();
    for instr in forward.instrs() {
        let wanted = instr.inputs.iter().any(|v| differentiated[v.index()]);
        for value in &instr.outputs {
            differentiated[value.index()] = wanted;
        }
        let (Op::Matmul(op), [x, w, ..]) = (&instr.op, &instr.inputs[..]) else {
            continue;
        };
        if !is_param(*w) || forward.ty(*w).shape.len() != 2 {
            continue;
        }
        let weight = &forward.ty(*w).shape;
        let [_, letters, out] = op.spec.letters();
        let transposed = letters.chars().next() == out.chars().last();
        let (from, to) = match transposed {
            true => (weight[1], weight[0]),
            false => (weight[0], weight[1]),
        };
        let rows = forward.ty(*x).shape.iter().product::<usize>() / from;
        let product = |pass| Product {
            pass,
            rows,
            from,
            to,
            transposed,
        };
        products.extend([Pass::Forward, Pass::WeightGradient].map(product));
        if differentiated[x.index()] {
            products.push(product(Pass::InputGradient));
        }
    }
    products
}

/// A batch of random tokens, the same for the same step.
pub fn random_batch(config: &Config, step: u64) -> Batch {
    let tokens = config.train.tokens_per_step();
    let vocab = config.model.vocab.get() as u64;
    let stream = Stream::named(config.run.seed, "bench tokens");
    let row = |purpose: u64| -> Vec<i32> {
        let first = (2 * step + purpose) * tokens as u64;
        (0..tokens as u64)
            .map(|i| stream.below(first + i, vocab) as i32)
            .collect()
    };
    let (ids, targets) = (row(0), row(1));
    debug_assert!(!targets.contains(&IGNORED));
    Batch {
        step: step - 1,
        first_sample: (step - 1) * config.train.batch_size.get() as u64,
        ids,
        targets,
        valid_tokens: tokens as u64,
    }
}
