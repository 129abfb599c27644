//! What a session needs to know of a configuration.

use phalanx_autodiff::Recompute;
use phalanx_ir::DType;
use phalanx_script::{Optimizer, Precision};
use phalanx_sys::memory::Machine;

use super::parallel::Parallel;
use crate::config::{self, Config, OptimKind};
use crate::error::{Error, Problem, Result};
use crate::metrics::bytes;

/// How a model is trained, apart from the model and the data.
#[derive(Clone, Debug)]
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
    /// The ranks, and how they divide the work.
    pub parallel: Parallel,
    /// Threads of each rank.
    pub threads: usize,
}

/// How many bytes a plan may take, and who says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryLimit {
    /// The configuration, with `run.memory_limit`.
    Asked(u64),
    /// The machine, which has no more at present.
    Machine(Machine),
}

impl MemoryLimit {
    /// What this machine has.
    pub fn of_machine() -> Option<Self> {
        phalanx_sys::memory::machine().map(MemoryLimit::Machine)
    }

    /// Refuses a plan of so many ranks that takes more. Who asks for a limit speaks of a rank, a
    /// machine has all of them.
    pub(crate) fn check(self, arena: usize, ranks: usize) -> Result<()> {
        let (taken, limit) = match self {
            MemoryLimit::Asked(limit) => (arena, limit),
            MemoryLimit::Machine(machine) => (arena * ranks, machine.available),
        };
        match taken as u64 <= limit {
            true => Ok(()),
            false => Err(Error::refused(self.problem(taken))),
        }
    }

    fn problem(self, arena: usize) -> Problem {
        let exact = |amount: u64| format!("{amount} bytes ({})", bytes(amount));
        let less = "more train.microbatches, train.recompute = \"full\", a shorter train.seq_len or a \
                    smaller model";
        let (than, fix) = match self {
            MemoryLimit::Asked(limit) => {
                (format!("run.memory_limit allows {}", exact(limit)), less.to_owned())
            }
            MemoryLimit::Machine(Machine { total, available }) if arena as u64 <= total => (
                format!(
                    "of the {} that this machine has, {} are free",
                    bytes(total),
                    exact(available)
                ),
                format!(
                    "end other programs; or {less}; to try all the same, --set run.memory_limit={arena}"
                ),
            ),
            MemoryLimit::Machine(Machine { total, available }) => (
                format!("this machine has {}, {} of them free", exact(total), bytes(available)),
                less.to_owned(),
            ),
        };
        Problem::new(format!("the plan takes {}; {than}", exact(arena as u64)))
            .because("weights, gradients, optimizer state and the activations of one micro-batch")
            .fix(fix)
    }
}

impl Settings {
    /// The settings that a configuration asks for.
    pub fn new(config: &Config) -> Result<Self> {
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
        Ok(Settings {
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
            parallel: Parallel::new(&config.parallel)?,
            threads: config.run.threads.get(),
        })
    }
}

fn precision(config: &config::Precision) -> Precision {
    Precision {
        weights: DType::from(config.weights),
        grads: DType::from(config.grads),
        state: config.state(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_counts_and_both_amounts_are_told() {
        let machine = MemoryLimit::Machine(Machine { total: 8 << 30, available: 2 << 30 });
        assert_eq!(machine.check(2 << 30, 1), Ok(()));
        let busy = machine.check(3 << 30, 1).unwrap_err();
        assert_eq!(busy.exit_code(), 2);
        assert_eq!(
            busy.to_string().lines().next(),
            Some(
                "error: the plan takes 3221225472 bytes (3.0 GiB); of the 8.0 GiB that this \
                 machine has, 2147483648 bytes (2.0 GiB) are free"
            )
        );
        assert!(busy.to_string().contains("end other programs"), "{busy}");
        let large = machine.check(9 << 30, 1).unwrap_err().to_string();
        assert!(large.contains("this machine has 8589934592 bytes (8.0 GiB), 2.0 GiB"), "{large}");
        assert!(!large.contains("run.memory_limit"), "{large}");
        // Who sets a limit has decided.
        assert_eq!(MemoryLimit::Asked(9 << 30).check(9 << 30, 8), Ok(()));
    }
}
