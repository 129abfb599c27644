//! What a session needs to know of a configuration.

use std::sync::Arc;

use phalanx_autodiff::Recompute;
use phalanx_ir::DType;
use phalanx_script::{Category, Controller, EveryStep, MemoryPlan, Optimizer, Precision};
use phalanx_sys::memory::Machine;

use super::parallel::Parallel;
use super::pipeline::{PipelineOrder, StageSplit};
use super::{Models, host, measure};
use crate::host::GpuFacts;
use phalanx_config::{Config, DeviceKind, OptimKind};
use phalanx_error::bytes;
use phalanx_error::{Error, Problem, Result};

/// How a model is trained, apart from the model and the data.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Element types of weights, gradients and optimizer state.
    pub precision: Precision,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The largest gradient norm, if there is a limit.
    pub clip: Option<f64>,
    /// The micro-batches of a batch.
    pub microbatches: usize,
    /// What the backward recomputes.
    pub recompute: Recompute,
    /// The seed of random masks.
    pub seed: u64,
    /// Bytes that the plan may take, if there is a limit.
    pub memory_limit: Option<MemoryLimit>,
    /// The ranks, and how they divide the work.
    pub parallel: Parallel,
    /// Where programs run.
    pub device: DeviceKind,
    /// Threads of each rank.
    pub threads: usize,
    /// Which scripts a step runs.
    pub controller: Arc<dyn Controller>,
    /// Whether the state can be saved.
    pub saves: bool,
}

/// How many bytes a plan may take, and who says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryLimit {
    /// The configuration, with `run.memory_limit`.
    Asked(u64),
    /// The machine, with the memory that is free now.
    Machine(Machine),
}

impl MemoryLimit {
    /// The free memory of where programs run. Refused if there is no such device.
    pub fn of(device: DeviceKind) -> Result<Option<Self>> {
        Ok(match device {
            DeviceKind::Cpu => Self::of_machine(),
            DeviceKind::Cuda => {
                let GpuFacts { free, total, .. } = host::gpu()?;
                let machine = Machine { total: total as u64, available: free as u64 };
                Some(MemoryLimit::Machine(machine))
            }
        })
    }

    /// The memory limit of a rank in bytes, if the configuration sets one.
    pub fn asked(self) -> Option<usize> {
        match self {
            MemoryLimit::Asked(bytes) => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
            MemoryLimit::Machine(_) => None,
        }
    }

    /// The limit of this machine.
    pub fn of_machine() -> Option<Self> {
        phalanx_sys::memory::machine().map(MemoryLimit::Machine)
    }

    /// How a plan exceeds the limit, if it does: the largest rank takes `rank` bytes, all together
    /// `all`. A limit that was asked for holds for each rank, the machine's for all of them.
    pub fn over(self, rank: usize, all: usize, memory: &MemoryPlan) -> Option<MemoryExcess> {
        let over = MemoryExcess { limit: self, rank, all, peaks: memory.peaks.clone() };
        (!self.allows(rank, all)).then_some(over)
    }

    /// Whether a plan fits.
    pub fn allows(self, rank: usize, all: usize) -> bool {
        match self {
            MemoryLimit::Asked(limit) => rank as u64 <= limit,
            MemoryLimit::Machine(machine) => all as u64 <= machine.available,
        }
    }
}

/// A plan that takes more memory than it may.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryExcess {
    /// What it may take.
    pub limit: MemoryLimit,
    /// Bytes of the largest rank.
    pub rank: usize,
    /// Bytes of all ranks.
    pub all: usize,
    /// For each category: the peak on a rank.
    pub peaks: Vec<(Category, usize)>,
}

impl MemoryExcess {
    /// The error, with remedies that suit any plan.
    pub fn problem(&self) -> Problem {
        let less = "more train.microbatches, train.recompute = \"full\", a shorter train.seq_len or a \
                    smaller model";
        let fix = match self.limit {
            MemoryLimit::Machine(machine) if self.all as u64 <= machine.total => format!(
                "end other programs; or {less}; to try anyway, --set run.memory_limit={}",
                self.rank
            ),
            _ => less.to_owned(),
        };
        self.diagnostic().fix(fix)
    }

    /// The same without remedies.
    pub fn diagnostic(&self) -> Problem {
        let exact = |amount: u64| format!("{amount} bytes ({})", bytes(amount));
        let ranks = self.all.div_ceil(self.rank.max(1));
        let whose = if ranks > 1 { " of a rank" } else { "" };
        let message = match self.limit {
            MemoryLimit::Asked(limit) => format!(
                "the plan{whose} takes {}; run.memory_limit allows {}",
                exact(self.rank as u64),
                exact(limit)
            ),
            MemoryLimit::Machine(Machine { total, available }) => {
                let whose = if ranks > 1 { format!(" of {ranks} ranks") } else { String::new() };
                let plan = format!("the plan{whose} takes {}", exact(self.all as u64));
                match self.all as u64 <= total {
                    true => format!(
                        "{plan}; of the {} that this machine has, {} are free",
                        bytes(total),
                        exact(available)
                    ),
                    false => format!(
                        "{plan}; this machine has {}, {} of them free",
                        exact(total),
                        bytes(available)
                    ),
                }
            }
        };
        let problem = Problem::new(message).because(self.categories(whose));
        match (self.limit, phalanx_sys::memory::address_space()) {
            (MemoryLimit::Machine(machine), Some(own)) if machine.total == own.total => problem
                .because(format!(
                    "this process may use {} of addresses, for code and stacks too: ulimit -v",
                    bytes(own.total)
                )),
            _ => problem,
        }
    }

    /// The categories, the largest first.
    fn categories(&self, whose: &str) -> String {
        let mut peaks: Vec<(Category, usize)> =
            self.peaks.iter().copied().filter(|(_, bytes)| *bytes > 0).collect();
        peaks.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        let each: Vec<String> = peaks
            .iter()
            .map(|(category, peak)| format!("{category} {}", bytes(*peak as u64)))
            .collect();
        let largest = peaks.first().map_or("nothing", |(category, _)| category.name());
        format!("most memory{whose} goes to {largest}: {}", each.join(", "))
    }
}

impl Settings {
    /// The settings of a model that one rank evaluates, without training.
    pub(crate) fn forward(weights: DType, microbatches: usize, threads: usize) -> Self {
        Settings {
            precision: Precision { weights, grads: weights, state: weights },
            optimizer: Optimizer::sgd(0.0),
            clip: None,
            microbatches,
            recompute: Recompute::None,
            seed: 0,
            memory_limit: None,
            parallel: Parallel::default(),
            device: DeviceKind::Cpu,
            threads,
            controller: Arc::new(EveryStep),
            saves: false,
        }
    }

    /// The same settings; if stages are split by measured costs, the costs are measured now. Two
    /// measurements are never equal, so this makes all users of these settings split the model at
    /// the same places.
    pub fn measured(mut self, models: &Models) -> Result<Self> {
        if self.parallel.pipeline.split == StageSplit::Measured {
            self.parallel.pipeline.split = StageSplit::Costs(measure::costs_of_job(models, &self)?);
        }
        Ok(self)
    }

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
        host::require(config.run.device)?;
        let mut parallel = Parallel::new(&config.parallel)?;
        parallel.pipeline.rematerialise =
            config.train.recompute == phalanx_config::RecomputeKind::Stage;
        if let PipelineOrder::Own(table) = &parallel.pipeline.order {
            config.check_read(table).map_err(Error::refused)?;
        }
        Ok(Settings {
            precision: precision(&config.precision),
            optimizer,
            clip: optim.clip.0.map(|norm| norm.get()),
            microbatches: config.microbatches(),
            recompute: config.train.recompute.in_segments(),
            seed: config.run.seed,
            memory_limit: match config.run.memory_limit {
                Some(limit) => Some(MemoryLimit::Asked(limit.0)),
                None => MemoryLimit::of(config.run.device)?,
            },
            parallel,
            device: config.run.device,
            threads: config.run.threads.get(),
            controller: Arc::new(EveryStep),
            saves: config.run.saves(),
        })
    }
}

fn precision(config: &phalanx_config::PrecisionConfig) -> Precision {
    Precision {
        weights: DType::from(config.weights),
        grads: DType::from(config.grads),
        state: config.state(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of one rank with some weights and more optimizer state.
    fn over(limit: MemoryLimit, ranks: usize, rank: usize) -> Option<MemoryExcess> {
        let peaks = vec![(Category::Weights, rank / 4), (Category::Optimizer, rank / 2)];
        let memory = MemoryPlan { arena: rank, peaks, ..MemoryPlan::default() };
        limit.over(rank, ranks * rank, &memory)
    }

    #[test]
    fn what_is_free_counts_and_both_amounts_are_told() {
        let machine = MemoryLimit::Machine(Machine { total: 8 << 30, available: 2 << 30 });
        assert_eq!(over(machine, 1, 2 << 30), None);
        let busy = over(machine, 1, 3 << 30).unwrap().problem().to_string();
        assert_eq!(
            busy.lines().next(),
            Some(
                "error: the plan takes 3221225472 bytes (3.0 GiB); of the 8.0 GiB that this \
                 machine has, 2147483648 bytes (2.0 GiB) are free"
            )
        );
        assert!(busy.contains("end other programs"), "{busy}");
        assert!(
            busy.contains("most memory goes to optimizer: optimizer 1.5 GiB, weights 768"),
            "{busy}"
        );
        let large = over(machine, 1, 9 << 30).unwrap().problem().to_string();
        assert!(large.contains("this machine has 8589934592 bytes (8.0 GiB), 2.0 GiB"), "{large}");
        assert!(!large.contains("run.memory_limit"), "{large}");
        // With a limit of the user's, the machine's free memory does not count.
        assert_eq!(over(MemoryLimit::Asked(9 << 30), 1, 9 << 30), None);
    }

    #[test]
    fn the_machine_holds_all_ranks_and_a_limit_each_of_them() {
        let machine = MemoryLimit::Machine(Machine { total: 8 << 30, available: 2 << 30 });
        let told = over(machine, 4, 1 << 30).unwrap().problem().to_string();
        assert!(told.contains("the plan of 4 ranks takes 4294967296 bytes"), "{told}");
        assert_eq!(over(MemoryLimit::Asked(1 << 30), 4, 1 << 30), None);
        let told = over(MemoryLimit::Asked(1 << 29), 4, 1 << 30).unwrap().problem().to_string();
        assert!(told.contains("the plan of a rank takes 1073741824 bytes"), "{told}");
    }
}
