//! Evaluating a model from a folder: on given tokens, or on held-out data.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use phalanx_ir::DType;
use phalanx_models::hf::{self, ModelSpec, TensorInfo, Weights};
use phalanx_models::{Architecture, BatchShape, port};
use serde::Serialize;

use crate::rundir;
use crate::saved::Saved;
use phalanx_config::{Config, DataKind, Loaded, ModelKind, Sources};
use phalanx_error::counted;
use phalanx_error::{Error, Problem, Result};
use phalanx_session::corpus;
use phalanx_session::folders::FolderKind;
use phalanx_session::host;
use phalanx_session::network::{self, Network, architecture};
use phalanx_session::run_weights::WEIGHTS;
use phalanx_session::{Accuracy, Field, Forward, StepData, from_weights};

/// Where a model comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ModelSource {
    /// `hf:DIR`, a folder in Hugging Face form.
    HuggingFace(PathBuf),
    /// `run:DIR`, the folder of a run.
    Run(PathBuf),
}

impl FromStr for ModelSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("hf", dir)) if !dir.is_empty() => Ok(ModelSource::HuggingFace(dir.into())),
            Some(("run", dir)) if !dir.is_empty() => Ok(ModelSource::Run(dir.into())),
            _ => Err("write hf:DIR for a Hugging Face folder, run:DIR for a run's".into()),
        }
    }
}

/// The result of a model on some tokens.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Answer {
    /// The mean cross-entropy of each token after the first, given those before it. An encoder reads the first half
    /// of them; then it is the mean over the second half.
    pub loss: f64,
    /// The logits after the last token.
    pub logits_last: Vec<f64>,
    /// Whether tokens are bytes of text, as far as is known.
    #[serde(skip)]
    pub is_text: bool,
}

/// What a model reached on held-out data.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct HeldOut {
    /// The mean loss per valid token.
    pub loss: f64,
    /// How many tokens that is.
    pub tokens: u64,
    /// The share that was classified right, if that is what the model does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Entropy of the data's source, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_floor: Option<f64>,
}

/// What to write where the folder of a run was given as a Hugging Face folder.
const FOR_RUNS: &str = "--model run:DIR";

/// Runs a model over one row of tokens. The configuration is that of the run, changed by `sources`;
/// only its precision, attention and threads matter.
pub fn answer(source: &ModelSource, sources: &Sources, ids: &[i32]) -> Result<Answer> {
    let (config, spec, weights): (_, _, Box<dyn Weights>) = match source {
        ModelSource::Run(dir) => {
            let Saved { loaded, spec, weights } = Saved::open(dir, sources)?;
            (loaded.config, spec, Box::new(weights))
        }
        ModelSource::HuggingFace(dir) => {
            // The configuration does not take the folder's shape, only agrees with it: a model
            // that does not fit a preset's data and batch can still be evaluated.
            FolderKind::HuggingFace.expect(dir, FOR_RUNS)?;
            let weights = hf::ModelFolder::open(dir)?;
            let spec = weights.spec().clone();
            let file = dir.join(FolderKind::HuggingFace.mark());
            let shape = network::shape_keys(&spec);
            let agreed = sources.clone().agree(file.display().to_string(), shape);
            (Config::load(&agreed)?.config, spec, Box::new(weights))
        }
    };
    check_ids(ids, &spec)?;
    let compute = DType::from(config.precision.compute);
    let shape = BatchShape { batch: 1, seq: ids.len() };
    let network = architecture(&config, spec);
    let model = network.logits(shape, compute)?;
    let (stored, threads) = (config.precision.weights.into(), config.run.threads.get());
    let read = from_weights(&*weights);
    host::require(config.run.device)?;
    host::require_units(config.run.cpu_units)?;
    let backend = host::threads_of(config.run.device);
    let mut forward =
        Forward::new(&*backend, (threads, config.run.cpu_units), &model, stored, 1, &read)?;
    forward.run(&StepData {
        fields: &[(port::IDS, Field::I32(ids))],
        count: 1,
        first_sample: 0,
        scalars: &[],
    })?;
    let logits = forward.probe(port::LOGITS, 0)?;
    let ids = &ids[network.unpredicted(ids.len())..];
    let rows: Vec<&[f64]> = logits.chunks_exact(logits.len() / ids.len()).collect();
    let losses = rows.iter().zip(&ids[1..]);
    let total: f64 = losses.map(|(row, &id)| cross_entropy(row, id as usize)).sum();
    let logits = rows.last().map_or(0.0, |row| row.iter().sum());
    Ok(Answer {
        loss: finite(total / (ids.len() - 1) as f64, logits, &*weights)?,
        logits_last: rows.last().map_or(Vec::new(), |row| row.to_vec()),
        is_text: config.data.kind == DataKind::Text,
    })
}

/// Evaluates a model on held-out data: that of the run it comes from, unless `sources`, which
/// change the run's configuration, name other data.
pub fn held_out(source: &ModelSource, sources: &Sources) -> Result<HeldOut> {
    let (loaded, spec, weights): (_, _, Box<dyn Weights>) = match source {
        ModelSource::Run(dir) => {
            if let Some(loaded) = of_our_own(dir, sources)? {
                let weights = hf::Params::open(&dir.join(WEIGHTS))?;
                return evaluate(&loaded, &*Network::new(&loaded)?.architecture, &weights);
            }
            let Saved { loaded, spec, weights } = Saved::open(dir, sources)?;
            (loaded, spec, Box::new(weights))
        }
        ModelSource::HuggingFace(dir) => {
            FolderKind::HuggingFace.expect(dir, FOR_RUNS)?;
            let from = format!("model.from=hf:{}", dir.display());
            let loaded = network::load(&sources.clone().set(from))?;
            has_data(&loaded, dir)?;
            let weights = hf::ModelFolder::open(dir)?;
            (loaded, weights.spec().clone(), Box::new(weights))
        }
    };
    evaluate(&loaded, &*architecture(&loaded.config, spec), &*weights)
}

/// The configuration of a run, if it trained a network whose form at Hugging Face is not known here.
fn of_our_own(dir: &Path, sources: &Sources) -> Result<Option<Loaded>> {
    let file = dir.join(rundir::CONFIG);
    if !file.exists() {
        // Opening the folder later reports whatever else is wrong with it.
        return Ok(None);
    }
    let loaded = Config::load(&sources.clone().run(file))?;
    let kind = loaded.config.model.kind;
    Ok(Some(loaded).filter(|_| kind == ModelKind::Cnn))
}

/// A run has its own held-out data. A Hugging Face folder has none, and the default synthetic
/// corpus would say nothing about its model.
fn has_data(loaded: &Loaded, dir: &Path) -> Result<()> {
    if loaded.by_user("data.kind") {
        return Ok(());
    }
    Err(Error::refused(
        Problem::new(format!("there is no data to evaluate hf:{} on", dir.display()))
            .because("a Hugging Face folder holds weights, but no held-out data")
            .fix(
                "tokens with --ids 5,17,…; or a file with --set data.kind=tokens --set \
                 data.path=FILE (data.kind=text for bytes)",
            ),
    ))
}

fn evaluate(loaded: &Loaded, network: &dyn Architecture, weights: &dyn Weights) -> Result<HeldOut> {
    let config = &loaded.config;
    let corpus = corpus::open(loaded)?;
    let batches = corpus::held_out(loaded, &corpus)?;
    let shape = BatchShape {
        batch: config.train.batch_size.get() / config.microbatches(),
        seq: config.train.seq_len.get(),
    };
    let model = network.evaluation(shape, config.precision.compute.into())?;
    let parts = config.microbatches();
    let (stored, threads) = (config.precision.weights.into(), config.run.threads.get());
    let read = from_weights(weights);
    host::require(config.run.device)?;
    host::require_units(config.run.cpu_units)?;
    let backend = host::threads_of(config.run.device);
    let mut forward =
        Forward::new(&*backend, (threads, config.run.cpu_units), &model, stored, parts, &read)?;
    let mut right = Accuracy::default();
    let loss = corpus::mean_loss(&batches, |data| {
        forward.run(data)?;
        right.add(forward.accuracy(data, parts)?);
        Ok(forward.loss())
    })?;
    Ok(HeldOut {
        loss: finite(loss, 0.0, weights)?,
        accuracy: right.share(),
        tokens: batches.iter().map(|batch| batch.valid_tokens).sum(),
        entropy_floor: corpus.entropy_floor(),
    })
}

/// The loss, if it and the logits are finite; else an error that names weights that are not.
fn finite(loss: f64, logits: f64, weights: &dyn Weights) -> Result<f64> {
    if loss.is_finite() && logits.is_finite() {
        return Ok(loss);
    }
    let problem = Problem::new(format!("the model's result is not finite: the loss is {loss}"));
    Err(Error::failed(match broken(weights)? {
        Some(name) => problem
            .because(format!("parameter `{name}` holds values that are not finite"))
            .fix("use weights from before the training diverged"),
        None => problem
            .because("all weights are finite, so the computation overflows")
            .fix("--set precision.compute=f64"),
    }))
}

/// The first parameter that holds a value that is not finite, searched in small pieces.
fn broken(weights: &dyn Weights) -> Result<Option<String>> {
    const PIECE: usize = 1 << 18;
    for layout in weights.layouts() {
        let (TensorInfo { name, dtype, .. }, elements) = (&layout, layout.elements());
        for from in (0..elements).step_by(PIECE) {
            let piece = from..elements.min(from + PIECE);
            let len = piece.len();
            let bytes = weights.read_ranges(name, &[piece], *dtype)?;
            if !hf::WeightTensor::from_bytes([len], *dtype, &bytes).is_finite() {
                return Ok(Some(layout.name));
            }
        }
    }
    Ok(None)
}

fn check_ids(ids: &[i32], spec: &ModelSpec) -> Result<()> {
    let (vocab, context) = (spec.vocab(), spec.context());
    let refuse = |problem| Err(Error::refused(problem));
    let (why, instead) = match spec {
        ModelSpec::T5(_) => {
            ("a loss needs at least two tokens beside those that the encoder reads", "--ids 5,17,3")
        }
        _ => ("a loss needs at least two tokens", "--ids 5,17"),
    };
    if ids.len() < instead.split(',').count() {
        let found = format!("--ids has {}", counted(ids.len(), "token"));
        return refuse(Problem::new(found).because(why).fix(instead));
    }
    if let Some(context) = context.filter(|&context| ids.len() > context) {
        return refuse(
            Problem::new(format!(
                "--ids has {} tokens, but the model's context is {context}",
                ids.len()
            ))
            .fix(format!("give at most {context}")),
        );
    }
    match ids.iter().find(|&&id| id < 0 || id as usize >= vocab) {
        None => Ok(()),
        Some(id) => refuse(
            Problem::new(format!("--ids has token {id}, but the vocabulary has only {vocab}"))
                .fix(format!("give ids from 0 to {}", vocab - 1)),
        ),
    }
}

/// −log softmax(row)[target].
fn cross_entropy(row: &[f64], target: usize) -> f64 {
    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
    most + sum.ln() - row[target]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use phalanx_models::hf::WeightTensor;

    use super::*;

    #[test]
    fn a_value_that_is_not_finite_is_found_in_any_piece() {
        let len = 600_000;
        let mut tensors: BTreeMap<String, WeightTensor> = ["a", "b"]
            .map(|name| (name.to_owned(), WeightTensor::f32([len], vec![1.0; len])))
            .into();
        let told = |tensors: &BTreeMap<String, WeightTensor>| {
            finite(f64::NAN, 0.0, tensors).unwrap_err().to_string()
        };
        assert!(told(&tensors).contains("all weights are finite"));
        for at in [0, len / 2, len - 1] {
            let mut values = vec![1.0; len];
            values[at] = f32::INFINITY;
            tensors.insert("b".to_owned(), WeightTensor::f32([len], values));
            assert!(told(&tensors).contains("parameter `b` holds values that are not finite"));
        }
        assert_eq!(finite(2.0, 0.0, &tensors).unwrap(), 2.0);
    }
}
