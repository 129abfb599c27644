//! What a session needs to know of a configuration.

use phalanx_autodiff::Recompute;
use phalanx_ir::DType;
use phalanx_script::{Optimizer, Precision};

use crate::config::{self, Config, OptimKind};
use crate::error::{Error, Problem, Result};
use crate::metrics::bytes;

/// How a model is trained, apart from the model and the data.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Element types of weights, gradients and optimizer state.
    pub precision: Precision,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The largest gradient norm, if there is a limit.
    pub clip: Option<f64>,
    /// Parts that a batch is taken in.
    pub microbatches: usize,
    /// What the backward makes again.
    pub recompute: Recompute,
    /// The seed of random masks.
    pub seed: u64,
    /// Bytes that the plan may take, if there is a limit.
    pub memory_limit: Option<MemoryLimit>,
}

/// How many bytes a plan may take, and who says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryLimit {
    /// The configuration, with `run.memory_limit`.
    Asked(u64),
    /// The machine, which has no more.
    Machine(u64),
}

impl MemoryLimit {
    /// What this machine has.
    pub fn of_machine() -> Option<Self> {
        phalanx_sys::memory::machine_bytes().map(MemoryLimit::Machine)
    }

    /// Refuses a plan that takes more.
    pub(crate) fn check(self, arena: usize) -> Result<()> {
        let (limit, who) = match self {
            MemoryLimit::Asked(limit) => (limit, "run.memory_limit allows"),
            MemoryLimit::Machine(limit) => (limit, "this machine has"),
        };
        if arena as u64 <= limit {
            return Ok(());
        }
        Err(Error::refused(
            Problem::new(format!(
                "the plan takes {arena} bytes ({}), {who} {limit} ({})",
                bytes(arena as u64),
                bytes(limit)
            ))
            .because("weights, gradients, optimizer state and the activations of one micro-batch")
            .fix("more train.microbatches, train.recompute = \"full\", or a smaller model"),
        ))
    }
}

impl Settings {
    /// The settings that a configuration asks for.
    pub fn new(config: &Config) -> Self {
        let optim = &config.optim;
        let decay = optim.weight_decay.get();
        let optimizer = match optim.kind {
            OptimKind::AdamW => Optimizer::AdamW {
                beta1: optim.betas[0].get(),
                beta2: optim.betas[1].get(),
                eps: optim.eps.get(),
                decay,
            },
            OptimKind::Sgd => {
                Optimizer::Sgd { momentum: optim.momentum.get(), nesterov: optim.nesterov, decay }
            }
        };
        Settings {
            precision: precision(&config.precision),
            optimizer,
            clip: optim.clip.0.map(|norm| norm.get()),
            microbatches: config.train.microbatches.get(),
            recompute: config.train.recompute,
            seed: config.run.seed,
            memory_limit: match config.run.memory_limit {
                Some(limit) => Some(MemoryLimit::Asked(limit.0)),
                None => MemoryLimit::of_machine(),
            },
        }
    }
}

fn precision(config: &config::Precision) -> Precision {
    Precision {
        weights: DType::from(config.weights),
        grads: DType::from(config.grads),
        state: config.state(),
    }
}
