//! Small models, layouts on them, and what their scripts say.

use std::sync::Arc;

use phalanx_call::traffic::of_program;
use phalanx_config::{Config, Loaded, Sources};
use phalanx_error::Result;
use phalanx_inspect::verify::{Verified, verify_as};
use phalanx_ir::Program;
use phalanx_script::{Action, Kind, MemoryPlan, Moved, Part, Script, plan};
use phalanx_session::host;
use phalanx_session::network::Network;
use phalanx_session::{Lowered, Models, Parallel, Settings, SharedStrategy, TrainPlan};
use phalanx_spmd::Strategy;

/// Two layers with grouped heads; vocabulary and inner width divide by nothing.
const LLAMA: [&str; 6] = [
    "model.kind=llama",
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    "model.kv_heads=2",
    "model.ffn=26",
];

/// Two layers with biases and a tied head.
const GPT: [&str; 6] = [
    "model.kind=gpt2",
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=64",
];

/// Two blocks of an encoder and two of a decoder that reads it.
const T5: [&str; 6] = [
    "model.kind=t5",
    "model.layers=2",
    "model.width=16",
    "model.heads=4",
    // The preset has fewer key heads than heads.
    "model.kv_heads=4",
    "model.ffn=26",
];

/// In f64, so that what agrees agrees to ten digits.
const BOTH: [&str; 8] = [
    "model.vocab=29",
    "model.init_std=0.3",
    "train.batch_size=8",
    "train.seq_len=8",
    "optim.lr=0.01",
    "optim.clip=1.0",
    "precision.compute=f64",
    "run.threads=1",
];

/// The network of images, whose sizes are fixed.
const CNN: [&str; 4] =
    ["optim.kind=sgd", "train.batch_size=8", "precision.compute=f64", "run.threads=1"];

pub(crate) fn llama(sets: &[&str]) -> Loaded {
    load(&LLAMA, sets)
}

pub(crate) fn gpt(sets: &[&str]) -> Loaded {
    load(&GPT, sets)
}

pub(crate) fn t5(sets: &[&str]) -> Loaded {
    load(&T5, sets)
}

/// The same; a refusal is an answer.
pub(crate) fn try_llama(sets: &[&str]) -> Result<Loaded> {
    try_load(&LLAMA, sets)
}

pub(crate) fn try_gpt(sets: &[&str]) -> Result<Loaded> {
    try_load(&GPT, sets)
}

pub(crate) fn try_t5(sets: &[&str]) -> Result<Loaded> {
    try_load(&T5, sets)
}

pub(crate) fn try_cnn(sets: &[&str]) -> Result<Loaded> {
    from_preset("mnist-cnn", &CNN, sets)
}

fn load(model: &[&str], sets: &[&str]) -> Loaded {
    try_load(model, sets).unwrap_or_else(|error| panic!("{error}"))
}

fn try_load(model: &[&str], sets: &[&str]) -> Result<Loaded> {
    // Without a moment at which all gradients exist there is nothing to clip to.
    let unclipped = sets.contains(&"parallel.schedule=pipedream");
    let both = BOTH.iter().filter(|set| !unclipped || !set.starts_with("optim.clip")).copied();
    let own: Vec<&str> = model.iter().copied().chain(both).collect();
    from_preset("tiny", &own, sets)
}

fn from_preset(preset: &str, own: &[&str], sets: &[&str]) -> Result<Loaded> {
    Config::load(&sources(preset, own, sets))
}

fn sources(preset: &str, own: &[&str], sets: &[&str]) -> Sources {
    own.iter().chain(sets).fold(Sources::default().preset(preset), |s, set| s.set(*set))
}

/// What a small model's configuration is read from.
pub(crate) fn llama_sources(sets: &[&str]) -> Sources {
    let own: Vec<&str> = LLAMA.iter().chain(&BOTH).copied().collect();
    sources("tiny", &own, sets)
}

pub(crate) fn shared(strategy: impl Strategy + Send + Sync + 'static) -> SharedStrategy {
    Arc::new(strategy)
}

/// Strategies on a mesh such as `dp=2 tp=2`.
pub(crate) fn on(mesh: &str, strategies: impl Into<Vec<SharedStrategy>>) -> Parallel {
    let mesh = mesh.parse().unwrap_or_else(|error| panic!("{mesh}: {error}"));
    Parallel { mesh, strategies: strategies.into(), ..Parallel::default() }
}

pub(crate) fn models(loaded: &Loaded) -> Models {
    Network::new(loaded).unwrap().models(&loaded.config, false).unwrap()
}

/// The settings of a configuration, on these ranks instead of its own.
pub(crate) fn settings(loaded: &Loaded, parallel: Option<Parallel>) -> Settings {
    let own = Settings::new(&loaded.config).unwrap();
    let Some(parallel) = parallel else { return own };
    let unclipped = parallel.pipeline.name() == "pipedream";
    Settings { clip: own.clip.filter(|_| !unclipped), parallel, ..own }
}

/// A model on ranks; nothing runs.
pub(crate) struct Laid {
    pub(crate) lowered: Lowered,
    pub(crate) plan: TrainPlan,
    pub(crate) memory: MemoryPlan,
    models: Models,
}

pub(crate) fn laid(loaded: &Loaded, parallel: Option<Parallel>) -> Laid {
    let models = models(loaded);
    let lowered = Lowered::new(&models, settings(loaded, parallel)).unwrap();
    let made = lowered.plan(0).unwrap();
    phalanx_script::check(&made.script).unwrap();
    let memory = plan(&made.script).unwrap();
    Laid { lowered, plan: made, memory, models }
}

impl Laid {
    pub(crate) fn script(&self) -> &Script {
        &self.plan.script
    }

    /// Elements of all units on one rank, padding included.
    pub(crate) fn elements(&self) -> u64 {
        self.plan.units.iter().map(|u| u.elements as u64).sum()
    }

    /// Elements that units of one segment instance each have when every member starts on a line of
    /// 32 elements and every one of `shards` shards does.
    pub(crate) fn padded(&self, shards: usize) -> Vec<usize> {
        let model = &self.models.train;
        let mut seen = vec![false; model.params().len()];
        let own = model.instances().iter().map(|instance| {
            let params =
                instance.params.values().filter(|&&p| !std::mem::replace(&mut seen[p], true));
            let lines: usize = params.map(|&p| model.params()[p].elements().div_ceil(32)).sum();
            lines.next_multiple_of(shards) * 32
        });
        own.filter(|&elements| elements > 0).collect()
    }

    /// What the first rank moves in some actions by one op, over all axes.
    pub(crate) fn moved(&self, op: &str, chosen: impl Fn(&Action) -> bool) -> Moved {
        let mut total = Moved::default();
        for action in self.script().actions.iter().filter(|a| chosen(a)) {
            let Some(run) = action.run() else { continue };
            let program = self.script().programs[run.program.0].program();
            for (route, moved) in of_program(program, 0) {
                if route.op == op {
                    total.calls += moved.calls;
                    total.bytes += moved.bytes;
                }
            }
        }
        total
    }

    /// What one rank moves in a part of a segment, as (op over axes, calls, bytes).
    pub(crate) fn in_segment(&self, segment: usize, part: Part) -> Vec<(String, u64, u64)> {
        let program = self.lowered.compiled().program(segment, part);
        let rows = of_program(program, 0).into_iter();
        rows.map(|(route, moved)| {
            let axes: Vec<String> = route.axes.iter().map(|a| a.to_string()).collect();
            (format!("{}<{}>", route.op, axes.join(",")), moved.calls, moved.bytes)
        })
        .collect()
    }

    /// Bytes that one rank moves in a segment's forward and backward.
    pub(crate) fn segment_bytes(&self, segment: usize) -> u64 {
        let rows = [Part::F, Part::BW].map(|part| self.in_segment(segment, part));
        rows.iter().flatten().map(|(_, _, bytes)| bytes).sum()
    }
}

pub(crate) fn is_reduce(action: &Action) -> bool {
    matches!(action.kind, Kind::Reduce { .. })
}

pub(crate) fn is_gather(action: &Action) -> bool {
    matches!(action.kind, Kind::Gather(_))
}

/// Two steps beside one rank.
pub(crate) fn verified(loaded: &Loaded, parallel: Option<Parallel>) -> Verified {
    let settings = settings(loaded, parallel);
    verify_as(loaded, settings, 2, &*host::threads()).unwrap_or_else(|error| panic!("{error}"))
}

/// Fails unless many ranks do what one does, with the bytes and memory that were predicted.
pub(crate) fn agrees(what: &str, loaded: &Loaded, parallel: Option<Parallel>) -> Verified {
    let found = verified(loaded, parallel);
    assert!(found.ok, "{what}: {found:#?}");
    found
}

/// Bytes of operands of products and of attention, no vectors, that other ranks sent and that a rank has at the same time.
pub(crate) fn foreign_at_once(program: &Program) -> usize {
    phalanx_call::foreign_at_once(program, |ty| ty.shape.len() >= 2)
}
