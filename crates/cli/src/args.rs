//! What can be written on the command line.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use phalanx::config::{self, Sources};
use phalanx::pipeline::plan::PlannerName;
use phalanx::pipeline::{RoundConcat, Warmup};
use phalanx::session::hosts::REMOTE_SHELL;
use phalanx::session::job;
use phalanx::train::eval::ModelSource;

use crate::arg_values::{Dtype, Ids, Meet, PartArg, count, whole};

/// The version, with facts of the build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("PHALANX_BUILD"), ")");

/// What the less usual parts of a step line mean.
const STEP_LINES: &str = "\
Step lines:
  (-1.2z)           distance from the mean of the last 128 steps, in their standard deviations
  % of GEMM rate    time of the step's matrix products alone, measured at the start, as a share of the step
  moe max/mean      load of the busiest expert of any layer, as a multiple of an even share
  mem X (plan Y)    memory of the process, and what the plans of its ranks take of it
docs/running.md explains all parts.";

/// What can be launched, and what else starts ranks.
const LAUNCHED: &str = "\
Examples:
  phalanx launch -n 2 -- train --preset tiny --set parallel.dp=2
  phalanx launch -n 4 --exec ./my-program --its-option
  phalanx launch -n 8 --hosts FILE -- train --preset tiny --set parallel.dp=8
torchrun --no-python, srun, and RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand work too: \
docs/processes.md.";

/// How agents are started.
const AGENTS: &str = "\
Examples:
  srun --ntasks-per-node=1 phalanx agent -n 4 -- train CONFIG.toml
  phalanx agent -n 2 --first 2 --ranks 4 --meet host-a:29500 -- train CONFIG.toml
PHALANX_TOKEN, the same for all, keeps other jobs out: docs/processes.md.";

/// Trains large models on many ranks, and plans every step before it runs.
///
/// `phalanx train` without arguments trains a small model on a built-in corpus in under a minute.
/// `phalanx config` lists every setting.
#[derive(Parser, Debug)]
#[command(name = "phalanx", version, long_version = VERSION, propagate_version = true)]
#[command(max_term_width = 80)]
pub(crate) struct Args {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Trains a model and leaves a folder with its weights, metrics and loss curve.
    #[command(after_long_help = STEP_LINES)]
    Train {
        #[command(flatten)]
        settings: Settings,
        /// Measures one step, after three warm-up steps, and writes what every rank did and when: a
        /// trace for ui.perfetto.dev or chrome://tracing, and next to it a drawing (FILE with .svg
        /// instead of .json) of the measured timeline above the predicted one.
        #[arg(long, value_name = "FILE")]
        trace: Option<PathBuf>,
        /// Goes on with a run from its newest whole checkpoint, or from a checkpoint's folder; `latest`:
        /// the run that saved last. The layout may be another one. Settings that are given here
        /// win over those of the run.
        #[arg(long, value_name = "DIR|latest", num_args = 0..=1, default_missing_value = "latest")]
        resume: Option<PathBuf>,
    },
    /// Trains a few steps on one rank and in the chosen layout, and compares numbers, bytes and memory.
    Verify {
        #[command(flatten)]
        settings: Settings,
        /// How many steps.
        #[arg(long, value_name = "N", default_value = "3", value_parser = count)]
        #[arg(allow_negative_numbers = true)]
        steps: NonZeroUsize,
    },
    /// Starts ranks as processes, all with the same command: on this host, or on those of a file.
    ///
    /// Each process gets RANK, WORLD_SIZE and LOCAL_RANK; they meet at a socket of their own, and
    /// rank 0 alone writes results. The layout must have N ranks. If one process dies, it is named, and
    /// training goes on with new processes, run.restarts times at most.
    #[command(after_long_help = LAUNCHED)]
    Launch {
        /// How many processes.
        #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = count)]
        #[arg(allow_negative_numbers = true)]
        ranks: NonZeroUsize,
        /// Hosts for the ranks, one on each line: `name slots=4`. They need this program and this
        /// folder under the same paths, and a remote shell that asks for no password.
        #[arg(long, value_name = "FILE")]
        hosts: Option<PathBuf>,
        /// The remote shell and its options; it gets the host and a command.
        #[arg(long, value_name = "PROGRAM", env = "PHALANX_RSH", default_value = REMOTE_SHELL)]
        rsh: String,
        /// The command is another program, such as your own that uses the library.
        #[arg(long)]
        exec: bool,
        /// A command of phalanx with its arguments, or another program with --exec.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        #[arg(value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Starts the ranks of one host of several: as a task of srun, one on each host.
    ///
    /// Under srun all that is needed besides -n follows from its variables. `phalanx launch --hosts`
    /// starts agents by itself.
    #[command(after_long_help = AGENTS)]
    Agent {
        /// How many ranks this host has.
        #[arg(short = 'n', value_name = "N", value_parser = count)]
        #[arg(allow_negative_numbers = true, required_unless_present = "led")]
        count: Option<NonZeroUsize>,
        /// The first of them, if srun does not say it.
        #[arg(long, value_name = "R", requires_all = ["ranks", "meet"], value_parser = whole)]
        first: Option<usize>,
        /// How many ranks there are on all hosts.
        #[arg(long, value_name = "N", requires = "first", value_parser = count)]
        ranks: Option<NonZeroUsize>,
        /// Where agents and ranks meet: the host of rank 0, and the first of 80 ports that it may use.
        #[arg(long, value_name = "HOST:PORT", requires = "first")]
        meet: Option<Meet>,
        /// A launcher speaks to the agent over its standard input.
        #[arg(long, conflicts_with = "first", hide = true)]
        led: bool,
        /// The command is another program.
        #[arg(long)]
        exec: bool,
        /// A command of phalanx with its arguments, or another program with --exec.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        #[arg(value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Evaluates a model: on given tokens, or on held-out data.
    Eval {
        #[command(flatten)]
        settings: Settings,
        /// The model: hf:DIR, a Hugging Face folder, or run:DIR, the folder of a run.
        #[arg(long, value_name = "hf:DIR|run:DIR")]
        model: ModelSource,
        /// Token ids, separated by commas; without them, held-out data is evaluated.
        #[arg(long, value_name = "5,17,…", allow_negative_numbers = true)]
        ids: Option<Ids>,
    },
    /// Writes the model of a run as a Hugging Face folder.
    Export {
        /// The folder of a run.
        #[arg(long, value_name = "DIR")]
        run: PathBuf,
        #[command(flatten)]
        to: HfFolder,
    },
    /// Shows, checks or converts the checkpoints of runs.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Says what is the matter with a run: which rank the others wait for, and what it was doing.
    ///
    /// Works while the run is alive, if phalanx launch or run.ranks = "processes" has started it, and
    /// after it died.
    Doctor {
        /// The folder of the run.
        run: PathBuf,
        /// Prints JSON: one compact object.
        #[arg(long)]
        json: bool,
    },
    /// Shows a training step before it runs: its typed programs, its script, its memory.
    Explain {
        #[command(flatten)]
        settings: Settings,
        /// Shows only the programs of this segment, such as `block`.
        #[arg(long, value_name = "NAME")]
        segment: Option<String>,
        /// Shows only this part of each segment.
        #[arg(long, value_enum, ignore_case = true)]
        part: Option<PartArg>,
        /// The rank whose script is shown.
        #[arg(long, value_name = "R", default_value = "0", value_parser = whole)]
        #[arg(allow_negative_numbers = true)]
        rank: usize,
        /// Shows the grid of ranks and which ranks communicate, instead of programs and script.
        #[arg(long, conflicts_with_all = ["segment", "part"])]
        ranks: bool,
        /// Draws what each rank holds of layers, weights, gradients, optimizer state and tokens.
        #[arg(long, value_name = "FILE", requires = "ranks")]
        svg: Option<PathBuf>,
        /// Draws the work of causal attention by rank and step of a ring (parallel.cp_kind = "ring"), contiguous
        /// blocks of the sequence above parallel.cp_order.
        #[arg(long, value_name = "FILE")]
        ring_svg: Option<PathBuf>,
        /// Draws the step as its scripts say: when which rank does what, by the work of each action on this kind of
        /// host, with gathers, sums, messages and updates below the turns.
        #[arg(long, value_name = "FILE")]
        step_svg: Option<PathBuf>,
    },
    /// Measures how fast this machine trains, communicates and plans.
    #[command(subcommand)]
    Bench(Bench),
    /// Shows a pipeline schedule: what runs where and when, how long it takes, how much is kept.
    Schedule(Schedule),
    /// Lists every configuration key with its default and meaning.
    #[command(after_long_help = config::listing())]
    Config,
    /// Prints a script that completes arguments in a shell.
    ///
    /// For bash: phalanx completions bash > ~/.local/share/bash-completion/completions/phalanx
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page of phalanx, or of one of its commands.
    ///
    /// To read it: phalanx man train | man -l -
    Man {
        /// The command, such as `train` or `bench step`.
        command: Vec<String>,
    },
}

#[derive(Subcommand, Debug)]
pub(crate) enum CheckpointCommand {
    /// Shows what a checkpoint holds.
    Show {
        /// The folder of a run, for its newest whole checkpoint, or of a checkpoint.
        dir: PathBuf,
        /// Prints JSON: one compact object.
        #[arg(long)]
        json: bool,
    },
    /// Reads all of a checkpoint: every byte has the hash that was recorded, and every value is there
    /// once.
    Check {
        /// The folder of a run, for its newest whole checkpoint, or of a checkpoint.
        dir: PathBuf,
        /// Prints JSON: one compact object.
        #[arg(long)]
        json: bool,
    },
    /// Writes the weights of a checkpoint as a Hugging Face folder.
    Convert {
        /// The folder of a run, for its newest whole checkpoint, or of a checkpoint.
        dir: PathBuf,
        #[command(flatten)]
        to: HfFolder,
    },
}

/// A Hugging Face folder to write.
#[derive(clap::Args, Debug)]
pub(crate) struct HfFolder {
    /// The folder to write; it is created if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// The element type to store weights in.
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: Dtype,
    /// Prints JSON: one compact object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Bench {
    /// Times full training steps on random tokens, and compares them with their matrix products
    /// alone.
    Step(Settings),
    /// Times the matrix products of the layers alone, and compares them with the peak of the unit that
    /// multiplies.
    Products(Settings),
    /// Times collectives between ranks, and compares them with copying the same number of bytes.
    Collectives {
        #[command(flatten)]
        settings: Settings,
        /// How many ranks. Default: as many as the configuration has, or 2 if it has only one.
        #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
        ranks: Option<NonZeroUsize>,
    },
    /// Times planning: from a configuration to partitioned programs and the script of one rank.
    Partition {
        #[command(flatten)]
        settings: Settings,
        /// How many layers the model has, instead of model.layers.
        #[arg(long, value_name = "L", value_parser = count, allow_negative_numbers = true)]
        layers: Option<NonZeroUsize>,
    },
}

/// A pipeline schedule, and the times that it is simulated with.
#[derive(clap::Args, Debug)]
pub(crate) struct Schedule {
    /// naive, gpipe, vectorised, 1f1b, interleaved, breadth-first, zb-h1, zb-h2,
    /// zb-v, bpipe, zb-auto, v-half, v-min, chimera, dualpipe, pipedream, pipedream-2bw, or csv:FILE.
    #[arg(required_unless_present_any = ["compare", "plan"])]
    pub(crate) name: Option<String>,
    /// Stage groups of the pipeline: groups of ranks that hold different layers (parallel.pp).
    #[arg(long, value_name = "p", value_parser = whole, allow_negative_numbers = true)]
    pub(crate) stages: Option<usize>,
    /// Micro-batches of a step. Of pipedream-2bw three steps are shown, and --csv writes one.
    #[arg(long, value_name = "m", value_parser = whole, allow_negative_numbers = true)]
    pub(crate) microbatches: Option<usize>,
    /// Chunks of layers in a stage group. Default: 2 for interleaved, breadth-first, zb-v,
    /// v-half and v-min, else 1.
    #[arg(long, value_name = "v", value_parser = whole, allow_negative_numbers = true)]
    pub(crate) chunks: Option<usize>,
    /// How many forwards 1f1b starts with.
    #[arg(long, value_parser = words(&Warmup::ALL, Warmup::name), default_value = "pa")]
    pub(crate) warmup: Warmup,
    /// Memory of zb-auto in shares: 1 is what the first stage group of 1f1b keeps.
    #[arg(long, value_name = "SHARES", default_value = "1", allow_negative_numbers = true)]
    pub(crate) memory: f64,
    /// What a micro-batch keeps between B and W, as a part of what it keeps between F and B,
    /// for zb-auto.
    #[arg(long, value_name = "RATIO", default_value = "1", allow_negative_numbers = true)]
    pub(crate) mw: f64,
    /// Pipelines in each direction of chimera.
    #[arg(long, value_name = "f", value_parser = whole, default_value = "1", allow_negative_numbers = true)]
    pub(crate) pairs: usize,
    /// How chimera runs more micro-batches than stages.
    #[arg(long, value_parser = words(&RoundConcat::ALL, RoundConcat::name), default_value = "direct")]
    pub(crate) concat: RoundConcat,
    /// Whether a micro-batch of pipedream reads the same version of the weights on all stages.
    #[arg(long)]
    pub(crate) vertical_sync: bool,
    /// How many stage groups hold each stage of pipedream and take micro-batches in turn, such as 2-1-1. A stage takes as
    /// many times as long as it has holders.
    #[arg(long, value_name = "k-k…", value_delimiter = '-', value_parser = whole)]
    pub(crate) holders: Vec<usize>,
    /// Time of a forward: one micro-batch through all layers of one stage group.
    #[arg(long, value_name = "TIME", default_value = "1", allow_negative_numbers = true)]
    pub(crate) tf: f64,
    /// Time of the gradient of the inputs.
    #[arg(long, value_name = "TIME", default_value = "1", allow_negative_numbers = true)]
    pub(crate) tb: f64,
    /// Time of the gradient of the weights; tb + tw is a whole backward.
    #[arg(long, value_name = "TIME", default_value = "1", allow_negative_numbers = true)]
    pub(crate) tw: f64,
    /// Time of a message from one stage group to another.
    #[arg(long, value_name = "TIME", default_value = "0", allow_negative_numbers = true)]
    pub(crate) hop: f64,
    /// Other schedules for the same stage groups and micro-batches, drawn to the same time scale.
    #[arg(long, value_name = "NAME,NAME…", value_delimiter = ',')]
    pub(crate) compare: Vec<String>,
    /// Writes a drawing to this SVG file.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Writes the schedule as a table to this CSV file; csv:FILE reads it back.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Prints JSON: one compact object per schedule.
    #[arg(long)]
    pub(crate) json: bool,
    /// Instead of a schedule: which stages to make of a model whose layers are measured here, and
    /// on how many devices each.
    #[arg(
        long,
        value_parser = words(&PlannerName::ALL, PlannerName::name),
        conflicts_with_all = [
            "name", "compare", "svg", "csv", "stages", "microbatches", "chunks", "holders"
        ]
    )]
    pub(crate) plan: Option<PlannerName>,
    /// For --plan: devices of each machine.
    #[arg(long, value_name = "N,N…", value_delimiter = ',', value_parser = whole, requires = "plan")]
    pub(crate) devices: Vec<usize>,
    /// For --plan: bytes per second within a machine, and between machines. Default: links take
    /// no time.
    #[arg(
        long,
        value_name = "RATE,RATE",
        value_delimiter = ',',
        requires = "plan",
        allow_negative_numbers = true
    )]
    pub(crate) bandwidth: Vec<f64>,
    /// For --plan: an embedded configuration to start from.
    #[arg(long, value_name = "NAME", requires = "plan")]
    preset: Option<String>,
    /// For --plan: changes one setting; may be repeated.
    #[arg(long, value_name = "key=value", requires = "plan")]
    set: Vec<String>,
}

impl Schedule {
    /// The configuration of the model that is planned.
    pub(crate) fn sources(&self) -> Sources {
        let preset = self.preset.iter().fold(Sources::default(), |s, name| s.preset(name));
        self.set.iter().fold(preset, |sources, set| sources.set(set))
    }
}

/// The words of a choice that the library has, each with its value.
fn words<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let named = move |word: String| {
        let found = all.iter().copied().find(|choice| name(*choice) == word);
        found.ok_or("not one of the words")
    };
    PossibleValuesParser::new(all.iter().map(|choice| name(*choice))).try_map(named)
}

/// Where a configuration comes from; later sources override earlier ones.
#[derive(clap::Args, Debug)]
pub(crate) struct Settings {
    /// A configuration file.
    #[arg(value_name = "CONFIG.toml")]
    config: Option<PathBuf>,
    /// Starts from an embedded configuration: default, tiny, tiny-moe, bench-13m, bench-moe, gpt2-124m,
    /// llama-0.95b, mnist-cnn.
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Changes one setting, such as train.steps=100; may be repeated.
    #[arg(long, value_name = "key=value")]
    set: Vec<String>,
    /// Prints JSON on standard output, one compact object per line; other text goes to standard
    /// error.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Settings {
    /// The sources in the library's form.
    pub(crate) fn sources(&self) -> Sources {
        // Ranks of a host share its cores, not those of all hosts.
        let cores = NonZeroUsize::new(job::cores()).unwrap_or(NonZeroUsize::MIN);
        let mut sources = Sources::default().cores(cores);
        if let Some(preset) = &self.preset {
            sources = sources.preset(preset);
        }
        if let Some(path) = &self.config {
            sources = sources.file(path);
        }
        self.set.iter().fold(sources, |sources, set| sources.set(set))
    }
}
