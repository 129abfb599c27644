//! `[run]`: where results go, and limits on threads and memory.

use std::path::PathBuf;

use toml_edit::Value;

use super::key::{default_value, section};
use super::setting::{Bytes, Count, Setting, choice, quoted};
use super::sources::Sources;
use super::values::Values;
use phalanx_error::{Error, Problem, Result};

section! {
    /// `[run]`: results, seed, threads and memory.
    pub struct RunConfig in "run" (cores: Count, ranks: Count) {
        /// Folder in which each run makes its own folder.
        dir: PathBuf = "runs/"; aka "save" "output_dir" "dump_folder" "out_dir" "log_dir",
        /// Name of the run's folder; "none": the time and the preset.
        name: Option<RunName> = "none"; aka "run_name" "exp_name" "experiment_name" "job_name",
        /// Seed of initial weights and dropout, and of the data unless data.seed is set.
        seed: u64 = "0"; aka "random_seed",
        /// Threads of each rank; with 1 there is no thread pool.
        threads: Count = "physical cores ÷ ranks, from 1 to 256" => threads_per_rank(cores, ranks);
            aka "num_threads" "n_threads" "omp_num_threads" "nproc",
        /// Steps between checkpoints; 0: none. With checkpoints there is one at the end, too.
        checkpoint_every: usize = "0"; aka "checkpoint_interval" "save_interval" "save_steps" "save_every" "ckpt",
        /// Minutes between checkpoints, besides checkpoint_every; 0: none.
        checkpoint_minutes: usize = "0",
        /// Steps between copies of the state in the memory of hosts, from which a run goes on when a host
        /// is lost; 0: none. They need ranks on several hosts, and two to four times the memory of the state.
        copy_every: usize = "0"; aka "buddy_every" "replicate_every",
        /// How many checkpoints are kept.
        keep: Count = "3"; aka "save_total_limit" "keep_latest_k" "keep_checkpoints",
        /// Memory that the plan of a rank may take; "none": the free memory of the machine.
        memory_limit: Option<Bytes> = "none"; aka "max_memory" "memory_budget",
        /// How many times ranks that are processes are started again after one was lost; 0: never.
        restarts: usize = "10"; aka "max_restarts",
        /// The fewest ranks to go on with if one cannot be started again: the nearest layout that fits
        /// continues from the newest checkpoint or copy, with the same batch.
        min_ranks: Count = "as many as the layout has" => ranks; aka "min_nodes" "elastic_min",
        /// What ranks are: threads of this process, processes that it starts, processes that another
        /// program has started (env: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or Slurm's), or those
        /// of mpirun, whose bytes go through the MPI library (mpi).
        ranks: RankKind = "threads"; aka "backend" "launcher" "distributed_backend",
        /// Where programs run: on the processor's cores, or on a GPU.
        device: DeviceKind = "cpu"; aka "accelerator",
        /// Which units of a processor multiply matrices. auto: the fastest for each type, or a library where it
        /// is faster; a list such as ["avx512", "avx512-bf16"]: these, and the library for other types; []: the
        /// library alone. The last bits of a run depend on it.
        cpu_units: CpuUnits = "auto"; aka "max_cpu_isa" "cpu_isa",
        /// Seconds that a rank waits for another, if ranks are processes.
        timeout_s: Count = "100"; aka "timeout" "dist_timeout" "init_timeout_seconds",
    }
}

impl Sources {
    /// The folder of all runs, which is known before everything else is resolved.
    pub fn run_dir(&self) -> Result<PathBuf> {
        let mut values = self.gather()?;
        let Some(key) = RunConfig::KEYS.iter().find(|key| key.field() == "dir") else {
            unreachable!("the section has this key")
        };
        let given = values.given.contains_key(key.name);
        match (values.read(key), values.problems.pop()) {
            (Some(dir), _) => Ok(dir),
            (None, Some(problem)) if given => Err(Error::refused(problem)),
            (None, _) => Ok(default_value(key.default)),
        }
    }
}

choice! {
    /// What ranks are.
    pub enum RankKind {
        /// Threads of one process.
        Threads = "threads",
        /// Processes that the command starts.
        Processes = "processes",
        /// Processes of an MPI job.
        Mpi = "mpi",
        /// The name of processes over TCP in other systems.
        Gloo = "gloo" later,
        /// The name of processes with GPUs in other systems.
        Nccl = "nccl" later,
        /// Processes that another program has started.
        Env = "env",
    }
}

choice! {
    /// Where programs run.
    pub enum DeviceKind {
        /// The processor's cores.
        Cpu = "cpu",
        /// An NVIDIA GPU.
        Cuda = "cuda",
    }
}

choice! {
    /// A unit of a processor that multiplies matrices.
    pub enum CpuUnitKind {
        /// Fused multiply-add on 256 bits.
        Avx2 = "avx2",
        /// Fused multiply-add on 512 bits.
        Avx512 = "avx512",
        /// Dot products of pairs of bf16 on 512 bits.
        Avx512Bf16 = "avx512-bf16",
        /// Tiles of 16 × 64 bytes.
        Amx = "amx",
    }
}

/// Which units of a processor products may use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CpuUnits {
    /// Those that are fastest.
    #[default]
    Auto,
    /// Those whose places in [`CpuUnitKind::ALL`] are marked.
    Only([bool; 4]),
}

impl CpuUnits {
    /// The units that were asked for, if they are not left to the engine.
    pub fn asked(self) -> Option<Vec<CpuUnitKind>> {
        let Self::Only(marks) = self else { return None };
        let marked = CpuUnitKind::ALL.iter().zip(marks).filter(|(_, marked)| *marked);
        Some(marked.map(|(kind, _)| *kind).collect())
    }
}

impl Setting for CpuUnits {
    fn expects() -> String {
        "\"auto\", or a list of avx2 | avx512 | avx512-bf16 | amx, each at most once".into()
    }
    fn read(value: &Value) -> Option<Self> {
        if value.as_str() == Some("auto") {
            return Some(Self::Auto);
        }
        let mut marks = [false; 4];
        for word in value.as_array()?.iter() {
            let kind = CpuUnitKind::read(word)?;
            let place = CpuUnitKind::ALL.iter().position(|known| *known == kind)?;
            if std::mem::replace(&mut marks[place], true) {
                return None;
            }
        }
        Some(Self::Only(marks))
    }
    fn write(&self) -> String {
        match self.asked() {
            None => quoted("auto"),
            Some(kinds) => {
                let words: Vec<String> = kinds.iter().map(|kind| quoted(kind.name())).collect();
                format!("[{}]", words.join(", "))
            }
        }
    }
}

/// The most threads of a rank: the CPU engine divides a call among at most this many.
const MOST_THREADS: usize = 256;

/// The name of a run's folder: one path component of safe characters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunName(String);

impl RunName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Setting for RunName {
    fn expects() -> String {
        "a name of letters, digits, `-`, `_` and `.`, starting with a letter or digit".into()
    }
    fn read(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        let fits = text.len() <= 200 && text.chars().all(plain);
        (fits && text.starts_with(char::is_alphanumeric)).then(|| RunName(text.into()))
    }
    fn write(&self) -> String {
        quoted(&self.0)
    }
}

impl RunConfig {
    /// Whether the run leaves checkpoints.
    pub fn saves(&self) -> bool {
        self.checkpoint_every > 0 || self.checkpoint_minutes > 0
    }

    pub(crate) fn check(&self, values: &mut Values) {
        let units = self.cpu_units == CpuUnits::Auto || self.device == DeviceKind::Cpu;
        values.rule(&["run.cpu_units", "run.device"], units, || {
            Problem::new(format!(
                "run.cpu_units has no effect with run.device = \"{}\"",
                self.device
            ))
            .because("it chooses what multiplies on the processor's cores")
            .nearest("run.cpu_units = \"auto\", or run.device = \"cpu\"")
        });
        let why = match self.ranks {
            RankKind::Gloo => Some("processes over sockets and TCP need no other library here"),
            RankKind::Nccl => {
                Some("ranks on GPUs find by themselves how they exchange: run.device = \"cuda\"")
            }
            RankKind::Threads | RankKind::Processes | RankKind::Mpi | RankKind::Env => None,
        };
        let kind = self.ranks;
        values.rule(&["run.ranks"], why.is_none(), || {
            Problem::new(format!("run.ranks = \"{kind}\" is not built"))
                .because(why.unwrap_or_default())
                .nearest(
                    "run.ranks = \"processes\", or \"env\" with RANK, WORLD_SIZE, MASTER_ADDR and \
                     MASTER_PORT set",
                )
        });
        let threads = self.threads.get();
        values.rule(&["run.threads"], threads <= MOST_THREADS, || {
            Problem::new(format!("run.threads = {threads} is more than a rank can use"))
                .because(format!(
                    "the CPU engine divides a call among at most {MOST_THREADS} threads"
                ))
                .nearest(format!("run.threads = {MOST_THREADS}"))
        });
    }
}

fn threads_per_rank(cores: Count, ranks: Count) -> Count {
    Count::new((cores.get() / ranks.get()).min(MOST_THREADS)).unwrap_or(Count::MIN)
}
