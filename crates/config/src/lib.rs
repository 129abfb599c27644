//! The configuration of a run: read from several sources, resolved into typed values.
//!
//! Keys are declared once, in the file of their section (see [`Key`]). [`Config::load`] merges the
//! [`Sources`] and gives either a [`Config`] in which every value is legal, or an error that lists
//! everything that is wrong, with file and line.

#![forbid(unsafe_code)]

mod absent;
mod context;
mod data;
mod derived;
mod expert_policy;
mod experts;
mod fits;
mod holders;
mod idle;
mod key;
mod listing;
mod model;
mod optim;
mod parallel;
mod precision;
pub mod preset;
mod run;
mod setting;
mod shrink;
mod sources;
mod stages;
mod suggest;
mod sync;
mod tensor;
mod train;
mod values;

use std::collections::BTreeMap;

pub use context::{CpKind, CpOrder};
pub use data::{DataConfig, DataKind};
pub use expert_policy::PolicyKind;
pub use experts::{
    AuxScopeKind, CapacityKind, CommPriority, ExchangeKind, PlacementKind, RouterKind,
};
pub use holders::{PipelineSplit, PlanKind, StageCounts};
pub use key::Key;
pub use listing::listing;
pub use model::{ModelConfig, ModelKind, Origin};
pub use optim::{Clip, LrSchedule, OptimConfig, OptimKind};
pub use parallel::{
    AxisOrder, LayoutKind, ParallelAxis, ParallelConfig, PipelineSchedule, TensorRules, TpKind,
    ZeroStage,
};
pub use precision::{FloatKind, LossScale, MasterKind, PrecisionConfig};
pub use run::{CpuUnitKind, CpuUnits, DeviceKind, RankKind, RunConfig, RunName};
pub use setting::{Bytes, Count, Fraction, NonNegative, Positive, Ratio, Setting};
pub use sources::Sources;
pub use suggest::closest;
pub use sync::{SyncKind, SyncMomentum};
pub use tensor::TensorShape;
pub use train::{RecomputeKind, TrainConfig};

use phalanx_error::{Error, Location, Problem, Result};
use values::{Given, Values};

/// The sections, in the order of the documentation.
pub const SECTIONS: [&str; 7] = ["model", "data", "train", "optim", "precision", "parallel", "run"];

/// Every key, in the order of the documentation.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    [
        ModelConfig::KEYS,
        DataConfig::KEYS,
        TrainConfig::KEYS,
        OptimConfig::KEYS,
        PrecisionConfig::KEYS,
        ParallelConfig::KEYS,
        RunConfig::KEYS,
    ]
    .into_iter()
    .flatten()
}

/// A resolved configuration: every key has a value, and every value is legal.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// What is trained.
    pub model: ModelConfig,
    /// What it is trained on.
    pub data: DataConfig,
    /// Steps and batches.
    pub train: TrainConfig,
    /// How weights are updated.
    pub optim: OptimConfig,
    /// Number formats.
    pub precision: PrecisionConfig,
    /// How the work is divided among ranks.
    pub parallel: ParallelConfig,
    /// Where results go, and limits on threads and memory.
    pub run: RunConfig,
}

/// A configuration together with where it came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// The name of a run that was not given one: the file's or the preset's name.
    pub label: String,
    /// The preset that the user's values override, if there is one.
    pub preset: Option<String>,
    /// Whether neither a file nor a preset was given: the run that a newcomer starts.
    pub is_default_run: bool,
    /// What the user should know although nothing is wrong, a line each.
    pub notes: Vec<String>,
    given: BTreeMap<&'static str, Given>,
}

impl Loaded {
    /// Where the value of `key` was written; `None` for a default. So a problem that is found
    /// later, such as a missing data file, can be reported with file and line.
    pub fn place(&self, key: &str) -> Option<&Location> {
        self.given.get(key).map(|given| &given.place)
    }

    /// The name of the configuration, and the preset or the defaults that it changes.
    pub fn origin(&self) -> String {
        match &self.preset {
            Some(preset) if *preset == self.label => format!("preset {preset}"),
            Some(preset) => format!("{}, based on preset {preset}", self.label),
            None => format!("{}, based on the defaults of `phalanx config`", self.label),
        }
    }

    /// Whether the user wrote the value of `key`, in a file or on the command line.
    pub fn by_user(&self, key: &str) -> bool {
        self.given.get(key).is_some_and(|given| given.by_user)
    }

    /// The configuration as a run's folder keeps it: paths are absolute, and what ranks are is left out
    /// where nobody asked for it, because whatever starts the run again says it.
    pub fn to_keep(&self) -> String {
        let open = self.config.run.ranks == RankKind::Threads && !self.by_user("run.ranks");
        self.config.anchored().toml_of(|key| !(open && key == "run.ranks"))
    }

    /// A problem with the value of `key`, and the place where it was written.
    pub fn problem(&self, key: &str, message: impl Into<String>) -> Problem {
        self.located(key, Problem::new(message))
    }

    /// Adds the place where the value of `key` was written.
    pub fn located(&self, key: &str, problem: Problem) -> Problem {
        match self.place(key) {
            Some(place) => problem.at(place.clone()),
            None => problem,
        }
    }
}

impl Config {
    /// Reads and resolves a configuration. All independent problems are reported together.
    pub fn load(sources: &Sources) -> Result<Loaded> {
        let mut values = sources.gather()?;
        let config = Config::resolve(&mut values, sources.core_count());
        if !values.problems.is_empty() {
            return Err(Error::Refused(values.problems));
        }
        let Values { given, preset, notes, .. } = values;
        let (label, is_default_run) = (sources.label(), sources.are_empty());
        Ok(Loaded { config, label, preset, is_default_run, notes, given })
    }

    /// The configuration as TOML, every key included. It parses back to the same configuration.
    pub fn to_toml(&self) -> String {
        self.toml_of(|_| true)
    }

    fn toml_of(&self, keeps: impl Fn(&str) -> bool) -> String {
        let (mut text, mut last) = (String::new(), "");
        for (key, value) in self.written().into_iter().filter(|(key, _)| keeps(key)) {
            let (section, field) = key.split_once('.').unwrap_or(("", key));
            if section != last {
                let gap = if text.is_empty() { "" } else { "\n" };
                text += &format!("{gap}[{section}]\n");
                last = section;
            }
            text += &format!("{field} = {value}\n");
        }
        text
    }

    /// Every key with its value as TOML.
    pub(crate) fn written(&self) -> Vec<(&'static str, String)> {
        let sections = [
            self.model.write(),
            self.data.write(),
            self.train.write(),
            self.optim.write(),
            self.precision.write(),
            self.parallel.write(),
            self.run.write(),
        ];
        sections.concat()
    }

    /// The same configuration with absolute paths of what it reads, so that it means the same in any
    /// folder.
    pub fn anchored(&self) -> Config {
        let absolute = |path: &std::path::Path| {
            std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
        };
        let mut config = self.clone();
        config.data.path = self.data.path.as_deref().map(absolute);
        config.model.from = self.model.from.as_ref().map(|from| match from {
            Origin::HuggingFace(dir) => Origin::HuggingFace(absolute(dir)),
            Origin::Run(dir) => Origin::Run(absolute(dir)),
        });
        if let PipelineSchedule::Csv(file) = &self.parallel.schedule {
            config.parallel.schedule = PipelineSchedule::Csv(absolute(file));
        }
        config
    }

    /// Whether all rules between keys accept the values; each value alone is already legal.
    pub fn is_legal(&self) -> bool {
        let mut values = Values::default();
        self.clone().check(&mut values);
        values.problems.is_empty()
    }

    /// Reads the sections in the order in which defaults depend on one another.
    fn resolve(values: &mut Values, cores: Count) -> Config {
        stages::drop_unused_preset(values);
        optim::drop_unused_preset(values);
        let parallel = ParallelConfig::read(values);
        let run = RunConfig::read(values, cores, parallel.ranks());
        let data = DataConfig::read(values, run.seed);
        let mut train = TrainConfig::read(values);
        let model = ModelConfig::read(values, train.seq_len, parallel.cp_kind);
        // The sequence length of a preset or of the defaults is for their model, not for this one.
        if !values.by_user("train.seq_len") && train.seq_len > model.context {
            let (context, asked) = (model.context, train.seq_len);
            values.notes.push(format!(
                "train.seq_len = {context}, the model's context, instead of {asked}"
            ));
            train.seq_len = context;
        }
        let optim = OptimConfig::read(values, train.steps, Clip::usual(parallel.has_norm()));
        if model.from.is_some() && !values.by_user("optim.lr") {
            values.notes.push(format!(
                "optim.lr = {} is meant for untrained weights; for those of model.from 1e-5 is usual: \
                 --set optim.lr=1e-5",
                optim.lr.get()
            ));
        }
        let precision = PrecisionConfig::read(values);
        let mut config = Config { model, data, train, optim, precision, parallel, run };
        config.check(values);
        config.note_idle(values);
        config
    }

    fn check(&mut self, values: &mut Values) {
        self.model.check(values);
        self.data.check(&self.model, values);
        self.train.check(self.parallel.dp, values);
        self.optim.check(self.train.steps, values);
        self.precision.settle(values);
        self.parallel.check_built(values);
        self.run.check(values);
        self.precision.check_tf32(self.run.device, values);
        self.precision.check_residual(self.model.kind.has_wide_residual(), values);
        self.precision.check_masters(self.optim.kind, self.parallel.sync, values);
        self.check_across(values);
        self.check_groups(values);
        self.check_fits(values);
    }

    /// Rules between sections.
    fn check_across(&self, values: &mut Values) {
        let (seq_len, context) = (self.train.seq_len, self.model.context);
        let fits = seq_len <= context || !self.model.kind.is_language();
        values.rule(&["train.seq_len", "model.context"], fits, || {
            Problem::new(format!(
                "train.seq_len = {seq_len} is longer than model.context = {context}"
            ))
            .because("the model has no positions beyond its context")
            .nearest(match self.model.from {
                // The folder's context is as fixed as its weights.
                Some(_) => format!("train.seq_len = {context}"),
                None => format!("train.seq_len = {context}, or model.context = {seq_len}"),
            })
        });
        let held_out = self.data.kind.has_held_out() || self.data.val_fraction.get() > 0.0;
        let possible = held_out || self.train.eval_every == 0;
        values.rule(&["train.eval_every", "data.val_fraction"], possible, || {
            let every = self.train.eval_every;
            Problem::new(format!(
                "train.eval_every = {every} does not work with data.val_fraction = 0.0"
            ))
            .because("no part of the file is kept for evaluation")
            .fix(format!(
                "data.val_fraction = {}, or train.eval_every = 0",
                phalanx_data::DEFAULT_VAL_FRACTION
            ))
        });
    }
}
