//! The network that a configuration describes, and the weights it starts from.

mod experts;

use std::path::Path;

use phalanx_models::hf::{
    self, GptSpec, LlamaSpec, MixtralSpec, ModelSpec, RopeScaling, RopeSpec, T5Spec, Weights,
};
use phalanx_models::{Architecture, BatchShape, Cnn, Gpt, Llama, Purpose, T5};

use crate::folders::FolderKind;
use crate::restore::FromWeights;
use crate::run_weights::{WEIGHTS, open_run};
use crate::{
    ForwardModel, Models, ReadParam, Seeded, StateSource, choose, from_weights, host, initial,
    planned,
};
use phalanx_config::{Config, Loaded, ModelKind, Origin, Sources};
use phalanx_error::{Error, Result, counted, short};
use phalanx_ir::DType;

/// A network and, if it does not start from random numbers, the folder of its weights.
pub struct Network {
    /// The network.
    pub architecture: Box<dyn Architecture>,
    weights: Option<Box<dyn Weights>>,
    seed: u64,
}

/// Reads a configuration. If it starts from a model folder, that folder sets the model's shape.
pub fn load(sources: &Sources) -> Result<Loaded> {
    let Some((origin, place)) = sources.origin()? else {
        let loaded = planned::planned(Config::load(sources)?, sources)?;
        return choose::schedule(with_host_notes(loaded));
    };
    let (file, spec) = match &origin {
        Origin::HuggingFace(dir) => {
            let file = dir.join(FolderKind::HuggingFace.mark());
            (file.clone(), read_spec(dir, &file))
        }
        Origin::Run(dir) => (dir.join(WEIGHTS), open_run(dir, FOR_FOLDERS).map(|(spec, _)| spec)),
    };
    let spec = spec.map_err(|error| error.at(place))?;
    let mut shape = shape_keys(&spec);
    if matches!((&origin, &spec), (Origin::HuggingFace(_), ModelSpec::Mixtral(_))) {
        // Mixtral drops no tokens; the weights of a run may go on with any capacity.
        shape.push(("model.capacity", "0.0".to_owned()));
    }
    let pinned = sources.clone().pin(file.display().to_string(), shape);
    let mut loaded = planned::planned(Config::load(&pinned)?, &pinned)?;
    if matches!(origin, Origin::HuggingFace(_)) {
        let kept = hf::KeptKeys::read(&file)?;
        loaded.notes.extend(unused_dropout(&kept, &loaded, &file));
    }
    choose::schedule(with_host_notes(loaded))
}

/// The same with what this host has to say about it.
fn with_host_notes(mut loaded: Loaded) -> Loaded {
    let compute = DType::from(loaded.config.precision.compute);
    loaded.notes.extend(host::note(loaded.config.run.device, compute));
    loaded
}

/// What to say about the dropout of a model folder, which is not taken over.
fn unused_dropout(kept: &hf::KeptKeys, loaded: &Loaded, file: &Path) -> Option<String> {
    let (rates, same) = kept.dropout()?;
    let own = loaded.config.model.dropout.get();
    let (file, ours) = (file.display(), loaded.config.model.kind);
    if loaded.by_user("model.dropout") {
        return None;
    }
    let instead = match (ours, same) {
        (ModelKind::Gpt2 | ModelKind::T5, Some(rate)) => {
            format!("--set model.dropout={rate} trains with it")
        }
        (ModelKind::Gpt2, None) => "--set model.dropout=RATE trains with one rate".to_owned(),
        _ => format!("{ours} has no dropout here"),
    };
    Some(format!("{file} has {rates}; this run trains with dropout {own} ({instead})"))
}

/// What to write where a Hugging Face folder was given as the folder of a run.
const FOR_FOLDERS: &str = "model.from=hf:DIR";

fn read_spec(dir: &Path, file: &Path) -> Result<ModelSpec> {
    FolderKind::HuggingFace.expect(dir, "model.from=run:DIR")?;
    Ok(hf::read_config(file)?)
}

impl Network {
    /// The network of a configuration; opens the model folder if there is one.
    pub fn new(loaded: &Loaded) -> Result<Self> {
        let config = &loaded.config;
        refuse_unbuilt(loaded)?;
        let (spec, weights): (_, Option<Box<dyn Weights>>) = match &config.model.from {
            Some(Origin::HuggingFace(dir)) => {
                let folder = hf::ModelFolder::open(dir)?;
                (folder.spec().clone(), Some(Box::new(folder)))
            }
            Some(Origin::Run(dir)) => {
                let (spec, weights) = open_run(dir, FOR_FOLDERS)?;
                (spec, Some(Box::new(weights)))
            }
            None if config.model.kind == ModelKind::Cnn => {
                let architecture = Box::new(Cnn::mnist());
                return Ok(Self { architecture, weights: None, seed: config.run.seed });
            }
            None => (spec(&config.model), None),
        };
        Ok(Self { architecture: architecture(config, spec), weights, seed: config.run.seed })
    }

    /// The models of a session: for training, and for evaluation if that is wanted.
    pub fn models(&self, config: &Config, evaluate: bool) -> Result<Models> {
        let compute = config.precision.compute.into();
        let shape = BatchShape {
            // The batch of all data-parallel ranks together: programs have global shapes. Replicas
            // that train by themselves have each a model of their share.
            batch: config.train.batch_size.get()
                / config.microbatches()
                / config.parallel.separate_replicas(),
            seq: config.train.seq_len.get(),
        };
        let microbatches = config.microbatches();
        let evaluation = || {
            let model = self.architecture.build(shape, compute, Purpose::Evaluate)?;
            Ok::<_, Error>(ForwardModel { model, microbatches })
        };
        let evaluate = evaluate.then(evaluation).transpose()?;
        Ok(Models { evaluate, ..Models::of(&*self.architecture, shape, compute)? })
    }

    /// The values that each parameter starts with.
    pub fn start(&self) -> Box<ReadParam<'_>> {
        match &self.weights {
            Some(source) => Box::new(from_weights(&**source)),
            None => Box::new(initial(self.seed)),
        }
    }

    /// The same as a source of state, which engines may draw themselves.
    pub fn source(&self) -> Box<dyn StateSource + '_> {
        match &self.weights {
            Some(source) => Box::new(FromWeights(&**source)),
            None => Box::new(Seeded(self.seed)),
        }
    }

    /// One line of text about the network, which has this many parameters.
    pub fn describe(&self, config: &Config, parameters: usize) -> String {
        let weights = config.precision.weights;
        let config = &config.model;
        if config.kind == ModelKind::Cnn {
            let Cnn { image: [height, width], channels, classes, .. } = Cnn::mnist();
            let count = short(parameters as f64);
            return format!(
                "cnn of {} and {} channels, images of {height} × {width}, {classes} classes: {count} \
                 parameters in {weights}",
                channels[0], channels[1]
            );
        }
        let from = match &config.from {
            Some(Origin::HuggingFace(dir) | Origin::Run(dir)) => format!(" from {}", dir.display()),
            None => String::new(),
        };
        format!(
            "{} of {}, width {}, {}, vocabulary {}{from}: {} parameters in {weights}",
            config.kind,
            counted(config.layers.get(), "layer"),
            config.width,
            counted(config.heads.get(), "head"),
            config.vocab,
            short(parameters as f64),
        )
    }
}

/// One line of text about the size of a step.
pub fn describe_step(config: &Config) -> String {
    let train = &config.train;
    let batch = match config.model.kind {
        ModelKind::Cnn => counted(train.batch_size.get(), "image"),
        _ => format!(
            "{} of {}",
            counted(train.batch_size.get(), "sequence"),
            counted(train.seq_len.get(), "token")
        ),
    };
    format!(
        "{batch}, {}, {}",
        match config.microbatches() {
            1 => "at once".to_owned(),
            parts => format!("in {parts} micro-batches"),
        },
        match config.parallel.ranks().get() {
            1 => counted(config.run.threads.get(), "thread"),
            _ => format!("{} on each rank", counted(config.run.threads.get(), "thread")),
        },
    )
}

/// The network of a specification, with the settings that a specification does not have.
pub fn architecture(
    Config { model: config, precision, parallel, .. }: &Config,
    spec: ModelSpec,
) -> Box<dyn Architecture> {
    let (attention, init_std) = (config.attention, config.init_std.get());
    let wide_residual = precision.residual != precision.compute;
    let llama = |spec, experts| Llama { spec, attention, init_std, experts, wide_residual };
    match spec {
        ModelSpec::Llama(spec) => Box::new(llama(spec, None)),
        ModelSpec::Mixtral(spec) => {
            let experts = experts::of(config, parallel, &spec);
            Box::new(llama(spec.base, Some(experts)))
        }
        ModelSpec::Gpt(spec) => {
            let dropout = config.dropout.get();
            Box::new(Gpt { spec, attention, dropout, init_std, wide_residual })
        }
        ModelSpec::T5(spec) => Box::new(T5 { spec, dropout: config.dropout.get() }),
    }
}

/// Refuses settings that are legal, but describe a network that is not implemented.
fn refuse_unbuilt(loaded: &Loaded) -> Result<()> {
    let model = &loaded.config.model;
    let kind = model.kind;
    let mut problems = Vec::new();
    if kind == ModelKind::Mlp {
        problems.push(
            loaded
                .problem("model.kind", "model.kind = mlp: this command trains language models")
                .because("an mlp predicts numbers from numbers, and [data] holds tokens")
                .fix("model.kind = \"llama\" or \"gpt2\"; an mlp is trained from Rust, as in crates/phalanx/examples/mlp_regression.rs"),
        );
    }
    if kind == ModelKind::Llama && model.dropout.get() > 0.0 {
        let message = format!(
            "model.dropout = {} does not work with model.kind = llama",
            model.dropout.get()
        );
        problems.push(
            (loaded.problem("model.dropout", message))
                .because("llama has no dropout")
                .fix("model.dropout = 0.0, or model.kind = \"gpt2\""),
        );
    }
    let usual = kind.has_biases();
    if kind.is_language() && model.bias != usual {
        let message = format!("model.bias = {} does not work with model.kind = {kind}", model.bias);
        problems.push(
            (loaded.problem("model.bias", message))
                .because("the linear layers of llama and t5 have no biases, gpt2's all have one")
                .fix(format!("model.bias = {usual}")),
        );
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Refused(problems)),
    }
}

fn spec(config: &phalanx_config::ModelConfig) -> ModelSpec {
    let (layers, width, heads) = (config.layers.get(), config.width.get(), config.heads.get());
    let (ffn, vocab, context) = (config.ffn.get(), config.vocab.get(), config.context.get());
    let (norm_eps, tied) = (config.norm_eps.get(), config.tied);
    match config.kind {
        ModelKind::Gpt2 => {
            ModelSpec::Gpt(GptSpec { layers, width, heads, ffn, vocab, context, norm_eps, tied })
        }
        ModelKind::T5 => {
            let sizes = T5Spec::new(layers, width, heads, ffn, vocab);
            ModelSpec::T5(T5Spec { norm_eps, tied, scaled: tied, ..sizes })
        }
        ModelKind::Llama | ModelKind::Mlp | ModelKind::Cnn => experts::spec(
            config,
            LlamaSpec {
                layers,
                width,
                heads,
                kv_heads: config.kv_heads.get(),
                head_dim: config.head_size(),
                ffn,
                vocab,
                context,
                norm_eps,
                rope: RopeSpec { theta: config.rope_theta.get(), scaling: RopeScaling::None },
                tied,
            },
        ),
    }
}

/// The keys that describe a shape, with the values of a model folder.
pub fn shape_keys(spec: &ModelSpec) -> Vec<(&'static str, String)> {
    let (kind, [layers, width, heads, kv_heads, ffn], norm_eps) = match spec {
        ModelSpec::Gpt(s) => ("gpt2", [s.layers, s.width, s.heads, s.heads, s.ffn], s.norm_eps),
        ModelSpec::Llama(s) | ModelSpec::Mixtral(MixtralSpec { base: s, .. }) => {
            ("llama", [s.layers, s.width, s.heads, s.kv_heads, s.ffn], s.norm_eps)
        }
        ModelSpec::T5(s) => ("t5", [s.layers, s.width, s.heads, s.heads, s.ffn], s.norm_eps),
    };
    let mut keys: Vec<(&'static str, String)> = [
        ("model.layers", layers),
        ("model.width", width),
        ("model.heads", heads),
        ("model.kv_heads", kv_heads),
        ("model.ffn", ffn),
        ("model.vocab", spec.vocab()),
    ]
    .map(|(key, size)| (key, size.to_string()))
    .into();
    keys.extend(spec.context().map(|context| ("model.context", context.to_string())));
    keys.push(("model.kind", kind.to_owned()));
    keys.push(("model.tied", spec.tied().to_string()));
    keys.push(("model.norm_eps", format!("{norm_eps:?}")));
    if let ModelSpec::Llama(s) | ModelSpec::Mixtral(MixtralSpec { base: s, .. }) = spec {
        keys.push(("model.rope_theta", format!("{:?}", s.rope.theta)));
    }
    keys.extend(experts::shape_keys(spec));
    keys
}
