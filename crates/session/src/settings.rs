//! What a session needs to know of a configuration.

use std::sync::Arc;

use phalanx_autodiff::Recompute;
use phalanx_ir::{DType, Model};
use phalanx_script::{
    Category, Controller, EveryStep, LossScaling, MemoryPlan, Optimizer, Precision, ScaleRule,
};
use phalanx_sys::memory::Machine;

use super::parallel::Parallel;
use super::pipeline::{InstanceCosts, Pipeline, PipelineOrder, StageSplit};
use super::replicas::BatchShare;
use super::{Models, asynchronous, host, measure};
use crate::host::GpuFacts;
use phalanx_config::{Config, CpuUnits, DeviceKind, FloatKind, LossScale, MasterKind, OptimKind};
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
    /// How the loss is scaled, if it is.
    pub scaling: Option<LossScaling>,
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
    /// Whether products of f32 may round their operands to TF32.
    pub tf32: bool,
    /// Which units of a processor products may use.
    pub units: CpuUnits,
    /// Threads of each rank.
    pub threads: usize,
    /// Which scripts a step runs.
    pub controller: Arc<dyn Controller>,
    /// The share of each batch that these ranks take; replicas take shares of it.
    pub share: BatchShare,
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
    /// A GPU, with the memory that is free now, and how many ranks share it at most.
    Gpu(Machine, usize),
}

impl MemoryLimit {
    /// The free memory of where the programs of this many ranks run. Refused if there is no such device.
    pub fn of(device: DeviceKind, ranks: usize) -> Result<Option<Self>> {
        Ok(match device {
            DeviceKind::Cpu => Self::of_machine(),
            DeviceKind::Cuda => {
                let GpuFacts { free, total, .. } = host::gpu()?;
                let memory = Machine { total: total as u64, available: free as u64 };
                Some(MemoryLimit::Gpu(memory, host::gpus(ranks)?.1))
            }
        })
    }

    /// The memory limit of a rank in bytes, if the configuration sets one.
    pub fn asked(self) -> Option<usize> {
        match self {
            MemoryLimit::Asked(bytes) => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
            MemoryLimit::Machine(_) | MemoryLimit::Gpu(..) => None,
        }
    }

    /// The limit of this machine.
    pub fn of_machine() -> Option<Self> {
        phalanx_sys::memory::machine().map(MemoryLimit::Machine)
    }

    /// How a plan exceeds the limit, if it does: the largest rank takes `rank` bytes, all together
    /// `all`, of which each rank's engine keeps `beside` outside of its arena. A limit that was asked for holds for each rank, the machine's for all of them, and a GPU's for
    /// those that share it.
    pub fn over(
        self,
        (rank, all): (usize, usize),
        memory: &MemoryPlan,
        beside: usize,
    ) -> Option<MemoryExcess> {
        let over = MemoryExcess { limit: self, rank, all, peaks: memory.peaks.clone(), beside };
        (!self.allows(rank, all)).then_some(over)
    }

    /// Whether a plan fits.
    pub fn allows(self, rank: usize, all: usize) -> bool {
        self.counted(rank, all) as u64
            <= match self {
                MemoryLimit::Asked(limit) => limit,
                MemoryLimit::Machine(Machine { available, .. })
                | MemoryLimit::Gpu(Machine { available, .. }, _) => available,
            }
    }

    /// Which bytes of a plan the limit is compared with.
    pub fn counted(self, rank: usize, all: usize) -> usize {
        match self {
            MemoryLimit::Asked(_) => rank,
            MemoryLimit::Machine(_) => all,
            MemoryLimit::Gpu(_, sharing) => rank.saturating_mul(sharing).min(all),
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
    /// Bytes of a rank that are workspaces of libraries and the next batch, outside of its arena.
    pub beside: usize,
}

impl MemoryExcess {
    /// The error, with remedies that suit any plan.
    pub fn problem(&self) -> Problem {
        let less = "more train.microbatches, train.recompute = \"full\", a shorter train.seq_len or a \
                    smaller model";
        let fix = match self.limit {
            MemoryLimit::Machine(machine) | MemoryLimit::Gpu(machine, _)
                if self.counted() as u64 <= machine.total =>
            {
                format!(
                    "end other programs; or {less}; to try anyway, --set run.memory_limit={}",
                    self.rank
                )
            }
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
            MemoryLimit::Machine(memory) => self.beside("this machine", memory, ranks),
            MemoryLimit::Gpu(memory, sharing) => self.beside("the GPU", memory, ranks.min(sharing)),
        };
        let problem = Problem::new(message).because(self.categories(whose));
        let users = match self.limit {
            MemoryLimit::Gpu(..) => host::gpu_users(),
            _ => None,
        };
        let problem = match users {
            Some(users) => problem.because(format!("the GPU is also used by {users}")),
            None => problem,
        };
        match (self.limit, phalanx_sys::memory::address_space()) {
            (MemoryLimit::Machine(machine), Some(own)) if machine.total == own.total => problem
                .because(format!(
                    "this process may use {} of addresses, for code and stacks too: ulimit -v",
                    bytes(own.total)
                )),
            _ => problem,
        }
    }

    /// The plan of some ranks beside the memory that they share.
    fn beside(&self, place: &str, Machine { total, available }: Machine, ranks: usize) -> String {
        let exact = |amount: u64| format!("{amount} bytes ({})", bytes(amount));
        let whose = if ranks > 1 { format!(" of {ranks} ranks") } else { String::new() };
        let plan = format!("the plan{whose} takes {}", exact(self.counted() as u64));
        match self.counted() as u64 <= total {
            true => format!(
                "{plan}; of the {} that {place} has, {} are free",
                bytes(total),
                exact(available)
            ),
            false => {
                format!("{plan}; {place} has {}, {} of them free", exact(total), bytes(available))
            }
        }
    }

    fn counted(&self) -> usize {
        self.limit.counted(self.rank, self.all)
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
        let beside = match self.beside {
            0 => String::new(),
            beside => format!(
                "; workspaces of libraries and the next batch take {}",
                bytes(beside as u64)
            ),
        };
        format!("most memory{whose} goes to {largest}: {}{beside}", each.join(", "))
    }
}

impl Settings {
    /// The settings of a model that one rank evaluates, without training.
    pub(crate) fn forward(weights: DType, microbatches: usize, threads: usize) -> Self {
        Settings {
            precision: Precision { weights, grads: weights, state: weights, split: false },
            optimizer: Optimizer::sgd(0.0),
            clip: None,
            scaling: None,
            microbatches,
            recompute: Recompute::None,
            seed: 0,
            memory_limit: None,
            parallel: Parallel::default(),
            device: DeviceKind::Cpu,
            tf32: false,
            units: CpuUnits::Auto,
            threads,
            controller: Arc::new(EveryStep),
            share: BatchShare::WHOLE,
            saves: false,
        }
    }

    /// What one rank does instead of these: the same training without a layout. It updates when the stages of a pipeline
    /// without a flush would, from gradients that are as late.
    pub fn on_one_rank(&self, model: &Model) -> Result<Parallel> {
        let groups = self.parallel.stage_groups()?.len();
        let delayed = self.parallel.pipeline.updates(model, groups, self.microbatches)?;
        asynchronous::check(self, model, delayed.as_ref())?;
        let pipeline = Pipeline { delayed, ..Pipeline::default() };
        Ok(Parallel { pipeline, ..Parallel::default() })
    }

    /// The same settings; if stages are split by measured costs, or a schedule is searched for them, the
    /// costs are measured now. Two measurements are never equal, so this makes all users of these settings split the
    /// model at the same places.
    pub fn measured(mut self, models: &Models) -> Result<Self> {
        let pipeline = &self.parallel.pipeline;
        let splits = pipeline.split == StageSplit::Measured;
        let searches = pipeline.is_searched() && pipeline.costs.is_none();
        if !splits && !searches {
            return Ok(self);
        }
        // What is measured reads zeros, of which all tokens take the same experts.
        let costs = measure::costs_of_job(&models.with_all_room(), &self, &Parallel::default())?;
        let pipeline = &mut self.parallel.pipeline;
        if splits {
            pipeline.split = StageSplit::Costs(costs.iter().map(InstanceCosts::seconds).collect());
        }
        pipeline.costs = searches.then_some(costs).or(pipeline.costs.take());
        Ok(self)
    }

    /// The settings that a configuration asks for.
    pub fn new(config: &Config) -> Result<Self> {
        let optim = &config.optim;
        let [beta1, beta2] = optim.betas.map(|beta| beta.get());
        let (eps, decay) = (optim.eps.get(), optim.weight_decay.get());
        let optimizer = match optim.kind {
            OptimKind::AdamW => Optimizer::AdamW { beta1, beta2, eps, decay },
            OptimKind::Adam => Optimizer::Adam { beta1, beta2, eps, decay },
            OptimKind::Sgd => {
                Optimizer::Sgd { momentum: optim.momentum.get(), nesterov: optim.nesterov, decay }
            }
            OptimKind::Lamb => Optimizer::Lamb { beta1, beta2, eps, decay },
            OptimKind::Lion => Optimizer::Lion { beta1, beta2, decay },
            OptimKind::Adafactor => Optimizer::Adafactor { eps, least: 1e-3, longest: 1.0, decay },
        };
        host::require(config.run.device)?;
        host::require_units(config.run.cpu_units)?;
        let mut parallel = Parallel::new(config)?;
        parallel.pipeline.rematerialise =
            config.train.recompute == phalanx_config::RecomputeKind::Stage;
        if let PipelineOrder::Own(table) = &parallel.pipeline.order {
            config.check_read(table).map_err(Error::refused)?;
        }
        Ok(Settings {
            precision: precision(&config.precision),
            optimizer,
            clip: optim.clip.0.map(|norm| norm.get()),
            scaling: scaling(&config.precision),
            microbatches: config.microbatches(),
            recompute: config.train.recompute.in_segments(),
            seed: config.run.seed,
            memory_limit: match config.run.memory_limit {
                Some(limit) => Some(MemoryLimit::Asked(limit.0)),
                None => MemoryLimit::of(config.run.device, config.parallel.ranks().get())?,
            },
            controller: match parallel.replicas {
                Some(replicas) => Arc::new(replicas),
                None => Arc::new(EveryStep),
            },
            share: BatchShare::WHOLE,
            parallel,
            device: config.run.device,
            tf32: config.precision.tf32,
            units: config.run.cpu_units,
            threads: config.run.threads.get(),
            saves: config.run.saves() || config.run.copy_every > 0,
        })
    }
}

fn precision(config: &phalanx_config::PrecisionConfig) -> Precision {
    Precision {
        weights: DType::from(config.weights),
        grads: DType::from(config.grads),
        state: config.state(),
        split: config.masters == MasterKind::Split,
    }
}

/// How the loss is scaled, if programs compute in f16.
fn scaling(config: &phalanx_config::PrecisionConfig) -> Option<LossScaling> {
    if config.compute != FloatKind::F16 {
        return None;
    }
    Some(match config.loss_scale {
        LossScale::Fixed(scale) => LossScaling { initial: scale.get(), rule: None },
        LossScale::Dynamic => LossScaling {
            initial: 2f64.powi(config.initial_scale_power as i32),
            rule: Some(ScaleRule {
                window: config.loss_scale_window.get() as u64,
                hysteresis: config.hysteresis.get() as u64,
                least: config.min_loss_scale.get(),
            }),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of one rank with some weights and more optimizer state.
    fn over(limit: MemoryLimit, ranks: usize, rank: usize) -> Option<MemoryExcess> {
        let peaks = vec![(Category::Weights, rank / 4), (Category::Optimizer, rank / 2)];
        let memory = MemoryPlan { arena: rank, peaks, ..MemoryPlan::default() };
        limit.over((rank, ranks * rank), &memory, 0)
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
        let gpu = MemoryLimit::Gpu(Machine { total: 8 << 30, available: 2 << 30 }, 2);
        assert_eq!(over(gpu, 8, 1 << 30), None);
        let told = over(gpu, 8, 3 << 29).unwrap().problem().to_string();
        assert!(told.contains("the plan of 2 ranks takes 3221225472 bytes (3.0 GiB); of the 8.0 GiB that the GPU has"), "{told}");
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
