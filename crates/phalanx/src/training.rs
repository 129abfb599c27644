//! A model in training that stays in memory.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use phalanx_config::CpuUnits;
use phalanx_data::check_vocabulary;
use phalanx_error::{Error, Problem, Result};
use phalanx_ir::{DType, Model, Param};
use phalanx_models::hf::{self, ModelSpec, WeightTensor};
use phalanx_session::{Prepared, Restored, Seeded, Session, Settings, from_weights, host};
use phalanx_train::steps::{Batches, TrainedStep, take_steps};
use phalanx_train::{Checkpoints, RunFacts, saved};

use crate::checkpoints::CheckpointPlan;
use crate::data_source::{Cutting, Data};
use crate::evaluate::{self, Evaluation};
use crate::forms::Ready;
use crate::mistake::{Mistake, check_rate};
use crate::report::Report;
use crate::table::{Rows, Table};
use crate::weights::{self, Live};
use crate::words::in_own_words;

/// A model in training: it trains, stops and goes on, evaluates, predicts, loads and saves.
///
/// [`Trainer::build`](crate::Trainer::build) makes it. Each rank keeps its part of the weights; what
/// comes in or out is whole, under every strategy.
///
/// ```
/// use phalanx::{Ddp, Megatron, Mlp, Table, Trainer};
///
/// let x: Vec<f32> = (0..16).map(|i| i as f32 / 8.0 - 1.0).collect();
/// let y: Vec<f32> = x.iter().map(|x| 3.0 * x - 1.0).collect();
/// let data = Table::new(16).input("x", x).target("y", y);
/// let mut training = Trainer::new(Mlp::regression(1, [8], 1))
///     .data(&data)
///     .batch(16)
///     .lr(0.03)
///     .mesh("dp=2 tp=2")
///     .strategy(Ddp::default())
///     .strategy(Megatron::default())
///     .threads(1)
///     .build()?;
/// training.fit(100)?;
/// let before = training.evaluate(&data)?.loss;
/// training.fit(100)?; // goes on where it stopped
/// assert!(training.evaluate(&data)?.loss < before && training.steps() == 200);
///
/// let answers = training.predict(&Table::new(1).input("x", vec![0.5]))?;
/// assert!((answers["prediction"].to_f64()[0] - 0.5).abs() < 0.3);
///
/// let bias = training.param("layers.1.bias")?; // a parameter by name, whole
/// training.set_param("layers.1.bias", &[bias.to_f32()[0] + 1.0])?;
/// let moved = training.predict(&Table::new(1).input("x", vec![0.5]))?;
/// let difference = moved["prediction"].to_f64()[0] - answers["prediction"].to_f64()[0];
/// assert!((difference - 1.0).abs() < 1e-4);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Training<'a> {
    pub(crate) session: Session,
    batches: Option<Box<dyn Batches>>,
    forms: Forms,
    cutting: Cutting,
    hooks: Hooks<'a>,
    validation: Option<Validation>,
    losses: Vec<f64>,
    saves: Saves,
}

/// The checkpoints of a training.
struct Saves {
    plan: CheckpointPlan,
    settings: Settings,
    /// The step and the samples with which it began.
    start: (u64, u64),
    open: Option<Checkpoints>,
}

/// The models that tables are checked against.
struct Forms {
    train: Model,
    predict: Option<Model>,
    spec: Option<ModelSpec>,
}

/// What a trainer was given to call.
pub(crate) struct Hooks<'a> {
    pub(crate) rate: Box<dyn Fn(usize) -> f64 + 'a>,
    pub(crate) on_step: Callback<'a, TrainedStep>,
    pub(crate) on_evaluate: Callback<'a, Evaluation>,
}

/// Gets what happened, and says whether to go on.
type Callback<'a, T> = Box<dyn FnMut(&T) -> ControlFlow<()> + 'a>;

impl Default for Hooks<'_> {
    fn default() -> Self {
        Self {
            rate: Box::new(|_| 3e-4),
            on_step: Box::new(|_| ControlFlow::Continue(())),
            on_evaluate: Box::new(|_| ControlFlow::Continue(())),
        }
    }
}

/// Data to evaluate on during training, and how often.
pub(crate) struct Validation {
    pub(crate) every: usize,
    pub(crate) data: Data,
}

impl<'a> Training<'a> {
    pub(crate) fn new(
        ready: Ready,
        settings: Settings,
        start: Option<&Path>,
        plan: CheckpointPlan,
        hooks: Hooks<'a>,
    ) -> Result<Self> {
        let Ready { models, spec, unpredicted, batch, seq_len, microbatches } = ready;
        plan.allow_restarts();
        let (found, seed) = (plan.found()?, settings.seed);
        let prepared = Prepared::new(&models, settings.clone())?;
        let taken = found.as_ref().map(|found| (found.manifest().step, found.manifest().samples));
        let session = match (&found, start) {
            (Some(found), _) => {
                let source = Restored::new(found, prepared.parameters(), &settings.optimizer, 1)?;
                prepared.resume(&source, found.manifest().step)?
            }
            (None, None) => prepared.start_from(&Seeded(seed))?,
            (None, Some(path)) => {
                let weights = weights::open(path, models.train.params())?;
                prepared.start(&from_weights(&*weights))?
            }
        };
        let saves = Saves { plan, settings, start: taken.unwrap_or_default(), open: None };
        let predict = models.predict.map(|own| own.model);
        let forms = Forms { train: models.train, predict, spec };
        let cutting = Cutting { seed, batch, seq_len, microbatches, unpredicted };
        let (batches, validation, losses) = (None, None, Vec::new());
        Ok(Self { session, batches, forms, cutting, hooks, validation, losses, saves })
    }

    pub(crate) fn with_data(
        mut self,
        data: Option<Data>,
        validation: Option<Validation>,
    ) -> Result<Self> {
        let held_out = validation.iter().map(|own| &own.data);
        for data in data.iter().chain(held_out) {
            self.check_data(data)?;
        }
        let facts = RunFacts {
            corpus: data.as_ref().map(Data::describe).unwrap_or_default(),
            model: self.forms.spec.as_ref().map(hf::config_text),
            layout: self.session.layout().to_owned(),
            products: host::multipliers(CpuUnits::Auto),
            start: self.saves.start,
            batch: self.cutting.batch as u64,
            ..RunFacts::default()
        };
        self.saves.open = self.saves.plan.open(&self.saves.settings, &self.forms.train, facts);
        let after = self.saves.start.1;
        self.batches = data.map(|data| data.open(self.cutting, after)).transpose()?;
        self.validation = validation;
        Ok(self)
    }

    /// Takes this many steps more; fewer if a callback stops it. Gives their losses.
    pub fn fit(&mut self, steps: usize) -> Result<&[f64]> {
        self.take(steps).map_err(in_own_words)
    }

    fn take(&mut self, steps: usize) -> Result<&[f64]> {
        let (before, first) = (self.losses.len(), self.steps() + 1);
        let Some(batches) = &mut self.batches else { return Err(Mistake::NoData.into()) };
        let (last, rate) = (first + steps - 1, &self.hooks.rate);
        (first..=last).try_for_each(|step| check_rate(step, rate(step)))?;
        let (on_step, on_evaluate) = (&mut self.hooks.on_step, &mut self.hooks.on_evaluate);
        let (losses, validation, cutting) = (&mut self.losses, &self.validation, self.cutting);
        let checkpoints = &mut self.saves.open;
        let observe = |session: &mut Session, taken: TrainedStep| {
            losses.push(taken.result.loss);
            let mut flow = on_step(&taken);
            if let Some(Validation { every, data }) = validation
                && taken.step.is_multiple_of(*every)
            {
                let told = on_evaluate(&evaluated(session, data, cutting)?);
                flow = if flow.is_break() { flow } else { told };
            }
            if let Some(checkpoints) = checkpoints.as_mut().filter(|_| taken.step < last) {
                checkpoints.after_step(session, taken.step as u64)?;
            }
            Ok(flow)
        };
        take_steps(&mut self.session, &mut **batches, last, rate, observe)?;
        if let Some(checkpoints) = &mut self.saves.open {
            checkpoints.at_end(&mut self.session)?;
        }
        Ok(&self.losses[before..])
    }

    /// The mean loss on data, and the accuracy if it has [labels](Table::labels). Weights do not
    /// change, and dropout is off. Of a corpus, up to 64 micro-batches of the held-out part are read.
    ///
    /// The rows of a table may be any number; the loss must be a sum over samples times
    /// `inv_tokens`, as it must be for training.
    pub fn evaluate(&mut self, data: impl Into<Data>) -> Result<Evaluation> {
        let data = data.into();
        self.check_data(&data)?;
        evaluated(&mut self.session, &data, self.cutting).map_err(in_own_words)
    }

    /// Runs the model forward on the rows of a table, and gives what it exposes for each of them, by
    /// name: `prediction` of an [`Mlp`](crate::Mlp), `logits` of a language model, or what your own
    /// model gives [`Builder::probe`](crate::Builder::probe). The first dim is that of the rows,
    /// which may be any number; what has no such dim is left out. Targets are not needed.
    pub fn predict(&mut self, inputs: &Table) -> Result<BTreeMap<String, WeightTensor>> {
        let Some(model) = &self.forms.predict else {
            return Err(Mistake::PredictsNothing { model: self.forms.train.name.clone() }.into());
        };
        inputs.check(model)?;
        let rows = self.rows();
        evaluate::predict(&mut self.session, inputs, rows).map_err(in_own_words)
    }

    /// Replaces all weights by those of a file that [`Training::save`] wrote, or of a Hugging Face
    /// folder. The optimizer's state and the number of steps stay.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let weights = weights::open(path.as_ref(), self.session.parameters())?;
        for number in 0..self.session.parameters().len() {
            let tensor = weights.read(&self.session.parameters()[number].name)?;
            self.session.set_param(number, &tensor)?;
        }
        Ok(())
    }

    /// Writes all weights as a `safetensors` file, atomically. Only one of them is in memory at a
    /// time.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let save =
            |session: &mut Session| saved::save_weights(path.as_ref(), &BTreeMap::new(), session);
        self.session.led(save)?.unwrap_or(Ok(()))
    }

    /// Writes the model as a Hugging Face folder, with weights in this element type. Works for
    /// [`Gpt`](crate::Gpt) and [`Llama`](crate::Llama).
    pub fn export(&mut self, dir: impl AsRef<Path>, dtype: DType) -> Result<()> {
        let Some(spec) = &self.forms.spec else {
            return Err(Mistake::NotExportable { model: self.forms.train.name.clone() }.into());
        };
        let save = |session: &mut Session| {
            hf::save(dir.as_ref(), spec, &Live::new(session), dtype, &hf::KeptKeys::default())
        };
        Ok(self.session.led(save)?.unwrap_or(Ok(()))?)
    }

    /// Reads a parameter by its name, whole and in full precision, even if it is sharded over ranks.
    pub fn param(&mut self, name: &str) -> Result<WeightTensor> {
        let number = weights::find(self.session.parameters(), name)?;
        self.session.param(number)
    }

    /// Writes a parameter by its name, all of its values, row after row.
    pub fn set_param(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let number = weights::find(self.session.parameters(), name)?;
        let Param { shape, .. } = self.session.parameters()[number].clone();
        if values.len() != self.session.parameters()[number].elements() {
            let (name, found) = (name.to_owned(), values.len());
            return Err(Mistake::ParamSize { name, found, shape }.into());
        }
        self.session.set_param(number, &WeightTensor::f32(shape, values.to_vec()))
    }

    /// The gradient of a parameter in the last step, by the parameter's name, before clipping.
    pub fn gradient(&mut self, name: &str) -> Result<WeightTensor> {
        let number = weights::find(self.session.parameters(), name)?;
        self.session.gradient(number)
    }

    /// The model's parameters: their names and shapes.
    pub fn params(&self) -> &[Param] {
        self.session.parameters()
    }

    /// Steps taken so far.
    pub fn steps(&self) -> usize {
        self.session.steps() as usize
    }

    /// The loss of every step that [`Training::fit`] took.
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// The ranks and how they divide the work, in one line.
    pub fn layout(&self) -> &str {
        self.session.layout()
    }

    /// Bytes that the ranks have exchanged so far, all together, as the transport counted them.
    pub fn moved(&mut self) -> Result<u64> {
        let counted = self.session.measure()?;
        let routes = counted.iter().flat_map(|rank| rank.moved.values());
        Ok(routes.map(|moved| moved.bytes).sum())
    }

    /// Ends the training, and keeps its losses and weights.
    pub fn into_report(self) -> Report {
        Report::new(self.losses, self.session)
    }

    /// The mean loss of a table that is one micro-batch.
    pub(crate) fn loss(&mut self, microbatch: &Table) -> Result<f64> {
        let mut rows = Rows::new(microbatch);
        (0..microbatch.samples()).for_each(|row| rows.push(microbatch, row));
        let loss = rows.with(0, rows.count().max(1), |data| self.session.evaluate(data));
        loss.map_err(in_own_words)
    }

    /// Samples of a micro-batch.
    pub(crate) fn rows(&self) -> usize {
        self.cutting.batch / self.cutting.microbatches
    }

    /// Micro-batches of a step.
    pub(crate) fn microbatches(&self) -> usize {
        self.cutting.microbatches
    }

    /// Refuses data that the model cannot read.
    fn check_data(&self, data: &Data) -> Result<()> {
        match (data, &self.forms.spec) {
            (Data::Table(table), _) => Ok(table.check(&self.forms.train)?),
            (Data::Tokens(corpus), Some(spec)) => {
                let known = check_vocabulary(&**corpus, spec.vocab());
                known.map_err(|e| Error::refused(Problem::from(e.diagnostic()).caused_by(e)))
            }
            (Data::Tokens(_), None) => Ok(()),
        }
    }

    /// Refuses a table that is not one micro-batch of the model.
    pub(crate) fn check_microbatch(&self, table: &Table) -> Result<()> {
        table.check(&self.forms.train)?;
        let (found, expected) = (table.samples(), self.rows());
        match found == expected {
            true => Ok(()),
            false => Err(Mistake::Rows { found, expected }.into()),
        }
    }
}

fn evaluated(session: &mut Session, data: &Data, cutting: Cutting) -> Result<Evaluation> {
    let rows = cutting.batch / cutting.microbatches;
    match data {
        Data::Table(table) => evaluate::of_table(session, table, rows),
        Data::Tokens(corpus) => {
            let cutting = Cutting { batch: rows, microbatches: 1, ..cutting };
            evaluate::of_tokens(session, corpus, cutting)
        }
    }
}
