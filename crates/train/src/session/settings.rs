//! What a session needs to know of a configuration.

use phalanx_autodiff::Recompute;
use phalanx_ir::DType;
use phalanx_script::{Optimizer, Precision};

use crate::config::{self, Config, OptimKind};

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
    pub memory_limit: Option<u64>,
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
            OptimKind::Sgd => Optimizer::Sgd {
                momentum: optim.momentum.get(),
                nesterov: optim.nesterov,
                decay,
            },
        };
        Settings {
            precision: precision(&config.precision),
            optimizer,
            clip: optim.clip.0.map(|norm| norm.get()),
            microbatches: config.train.microbatches.get(),
            recompute: match config.train.recompute {
                config::Recompute::None => Recompute::None,
                config::Recompute::Selective => Recompute::Selective,
                config::Recompute::Full => Recompute::Full,
            },
            seed: config.run.seed,
            memory_limit: config.run.memory_limit.map(|bytes| bytes.0),
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
