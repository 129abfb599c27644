//! What the library refuses, as types: each with its values, and what would work.

use phalanx_error::{Error, Problem};
use phalanx_ir::DType;
use phalanx_script::Optimizer;

/// Why the library refused what it was asked, before anything was started.
///
/// It is the cause of an [`Error`], whose text also says what would work:
///
/// ```
/// use phalanx::{Mistake, Mlp, Trainer};
///
/// let error = Trainer::new(Mlp::regression(1, [8], 1)).lr(-1.0).build().err().unwrap();
/// assert!(matches!(error.cause(), Some(Mistake::LearningRate { step: 1, lr: -1.0 })));
/// ```
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the values in the text")]
pub enum Mistake {
    /// Nothing to train on.
    #[error("there is nothing to train on")]
    NoData,
    /// A learning rate that is negative or not finite.
    #[error("the learning rate of step {step} is {lr}")]
    LearningRate { step: usize, lr: f64 },
    /// A gradient norm that cannot be a limit.
    #[error("gradients cannot be clipped to the norm {clip}")]
    Clip { clip: f64 },
    /// A constant of the optimizer that cannot work.
    #[error("the optimizer has {name} = {value}")]
    Optimizer { name: &'static str, value: f64, expected: &'static str },
    /// A batch that cannot be cut into equal micro-batches.
    #[error("a batch of {batch} samples can't be cut into {parts}")]
    Uneven { batch: usize, parts: String },
    /// A strategy whose axis the mesh lacks.
    #[error(
        "{strategy} divides work over the axis `{axis}`, which the mesh ({mesh}) does not have"
    )]
    NoAxis { strategy: &'static str, axis: String, mesh: String },
    /// An axis of several ranks over which nothing is divided.
    #[error(
        "nothing is divided over the {size} ranks of the axis `{axis}`: they would all do the same"
    )]
    UnusedAxis { axis: String, size: usize },
    /// Local SGD beside something that needs a common step.
    #[error("replicas that train by themselves do not work with {other}")]
    Replicas { other: &'static str },
    /// Another number of processes than the mesh has ranks.
    #[error("Trainer::ranks asks for {processes} processes, but the mesh needs {ranks}")]
    Processes { processes: usize, ranks: usize },
    /// A model without a loss.
    #[error("model {model} has no loss to train")]
    NoLoss { model: String },
    /// A model without data.
    #[error("model {model} reads no data")]
    ReadsNothing { model: String },
    /// Two columns of one name.
    #[error("the table has two columns `{name}`")]
    ColumnTwice { name: String },
    /// A column that does not have equal rows.
    #[error("column `{name}` has {found} values for {samples} samples")]
    Ragged { name: String, found: usize, samples: usize },
    /// A table without anything to predict.
    #[error("the table has no target column")]
    NoTarget,
    /// A data port without a column.
    #[error("the model reads the data port `{port}`, and the table has only {}", list(.given))]
    NoColumn { port: String, given: Vec<String> },
    /// A column of another element type than its data port.
    #[error("column `{name}` has {found} values, and the model reads {expected}")]
    ColumnType { name: String, found: DType, expected: DType, target: bool },
    /// A column of another width than its data port.
    #[error("column `{name}` has {found} values per sample, and the model reads {expected}")]
    ColumnWidth { name: String, found: usize, expected: usize },
    /// A class that the model does not have, or a token beyond its vocabulary.
    #[error("column `{name}` has the value {value} in sample {sample}, and the model knows {end}")]
    OutOfRange { name: String, sample: usize, value: i32, end: i32 },
    /// A model that exposes nothing.
    #[error("model {model} exposes nothing to predict")]
    PredictsNothing { model: String },
    /// Evaluation without samples.
    #[error("there is nothing to evaluate: {what}")]
    NothingToEvaluate { what: String },
    /// Evaluation after every zeroth step.
    #[error("Trainer::evaluate_every was given 0 steps")]
    EvaluateEveryZero,
    /// Checkpoints after every zeroth step.
    #[error("Trainer::checkpoint_every was given 0 steps")]
    CheckpointEveryZero,
    /// The latest checkpoint of an unknown folder.
    #[error("Trainer::resume(\"latest\") needs the folder of Trainer::checkpoint_every")]
    NoCheckpointFolder,
    /// A model that Hugging Face does not know.
    #[error("model {model} has no form at Hugging Face")]
    NotExportable { model: String },
    /// A name that no parameter has.
    #[error("the model has no parameter `{name}`")]
    NoParam { name: String, known: Vec<String> },
    /// Values that do not fill a parameter.
    #[error("{found} values for the parameter `{name}` of shape {shape:?}")]
    ParamSize { name: String, found: usize, shape: Vec<usize> },
    /// Weights of another model.
    #[error("{from}: the parameter `{name}` has the shape {found:?}, and the model's {expected:?}")]
    OtherShape { from: String, name: String, found: Vec<usize>, expected: Vec<usize> },
    /// Weights that lack a parameter.
    #[error("{from} has no parameter `{name}`, which the model reads")]
    MissingParam { from: String, name: String },
    /// A micro-batch of the wrong size.
    #[error("a micro-batch of {found} samples was given, and the model takes {expected}")]
    Rows { found: usize, expected: usize },
    /// A backward without a forward.
    #[error("Stepper::backward was called without a Stepper::forward before it")]
    NoForward,
    /// More micro-batches than a step takes.
    #[error("{microbatches} micro-batches wait already, which is a whole step")]
    StepIsDue { microbatches: usize },
}

impl Mistake {
    /// What would work.
    fn fix(&self) -> String {
        use Mistake as M;
        match self {
            M::NoData => "call Trainer::data".into(),
            M::LearningRate { .. } => {
                "a finite number of at least 0 in Trainer::lr or Trainer::rate".into()
            }
            M::Clip { .. } => {
                "Trainer::clip(Some(1.0)), any finite number above 0, or None for no limit".into()
            }
            M::Optimizer { name, expected, .. } => format!("{name} must be {expected}"),
            M::Uneven { .. } => {
                "choose Trainer::batch and Trainer::microbatches so that one divides the other"
                    .into()
            }
            M::NoAxis { axis, .. } => format!(
                "add the axis in Trainer::mesh(\"… {axis}=2\") ({axis}=1 for none), or name another \
                 axis in the strategy's field `axis`"
            ),
            M::Replicas { other } => {
                format!("leave Trainer::local_sgd out, or go without {other}")
            }
            M::UnusedAxis { axis, .. } => format!(
                "add a strategy for `{axis}` with Trainer::strategy, annotate a value of the model \
                 with it (Tensor::annotate), or leave it out of Trainer::mesh"
            ),
            M::Processes { ranks, .. } => format!(
                "every process is one rank: write Processes({ranks}), or change Trainer::mesh"
            ),
            M::NoLoss { .. } => "call Builder::loss in the last segment".into(),
            M::ReadsNothing { .. } => "declare a port with Builder::data".into(),
            M::ColumnTwice { name } => format!("give `{name}` once, or rename one of the two"),
            M::Ragged { .. } => "give every sample the same number of values, at least one".into(),
            M::NoTarget => "add the column to predict with Table::target or Table::labels".into(),
            M::NoColumn { port, .. } => {
                format!("name a column `{port}` with Table::input, ids, target or labels")
            }
            M::ColumnType { expected, target, .. } => column_fix(*expected, *target),
            M::ColumnWidth { expected, .. } => {
                format!("give {expected} values for each sample, one sample after the other")
            }
            M::OutOfRange { end, .. } => format!("give numbers from 0 to {}", end - 1),
            M::PredictsNothing { .. } => {
                "call Builder::probe for each value that Training::predict shall give".into()
            }
            M::NothingToEvaluate { .. } => "give at least one sample with a valid target".into(),
            M::CheckpointEveryZero => "1 step or more; leave it out for no checkpoints".into(),
            M::NoCheckpointFolder => "call checkpoint_every, or give resume the folder".into(),
            M::EvaluateEveryZero => "1 step or more; leave it out to evaluate never".into(),
            M::NotExportable { .. } => {
                "export a Gpt or a Llama; Training::save writes the weights of any model".into()
            }
            M::NoParam { known, .. } => format!("one of {}", known.join(", ")),
            M::ParamSize { shape, .. } => {
                format!("give {} values, row after row", shape.iter().product::<usize>())
            }
            M::OtherShape { .. } | M::MissingParam { .. } => {
                "build the model with the sizes that the weights were trained with".into()
            }
            M::Rows { expected, .. } => format!("give tables of {expected} samples"),
            M::NoForward => "call Stepper::forward for each micro-batch first".into(),
            M::StepIsDue { .. } => "call Stepper::step".into(),
        }
    }
}

impl From<Mistake> for Error {
    fn from(mistake: Mistake) -> Self {
        let fix = mistake.fix();
        Error::refused(Problem::of(mistake).fix(fix))
    }
}

/// Refuses a learning rate that no step can take.
pub(crate) fn check_rate(step: usize, lr: f64) -> Result<(), Mistake> {
    match lr.is_finite() && lr >= 0.0 {
        true => Ok(()),
        false => Err(Mistake::LearningRate { step, lr }),
    }
}

/// Refuses a norm that cannot be a limit.
pub(crate) fn check_clip(clip: Option<f64>) -> Result<(), Mistake> {
    match clip {
        Some(clip) if !(clip.is_finite() && clip > 0.0) => Err(Mistake::Clip { clip }),
        _ => Ok(()),
    }
}

/// Refuses constants with which an update makes no sense.
pub(crate) fn check_optimizer(optimizer: &Optimizer) -> Result<(), Mistake> {
    let share = |value: f64| (0.0..1.0).contains(&value);
    let (below_one, at_least_0) = ("at least 0 and below 1", "a finite number of at least 0");
    let decays = |value: f64| value.is_finite() && value >= 0.0;
    let checks = match *optimizer {
        Optimizer::AdamW { beta1, beta2, eps, decay }
        | Optimizer::Adam { beta1, beta2, eps, decay }
        | Optimizer::Lamb { beta1, beta2, eps, decay } => vec![
            ("beta1", beta1, share(beta1), below_one),
            ("beta2", beta2, share(beta2), below_one),
            ("eps", eps, eps.is_finite() && eps > 0.0, "a finite number above 0"),
            ("decay", decay, decays(decay), at_least_0),
        ],
        Optimizer::Lion { beta1, beta2, decay } => vec![
            ("beta1", beta1, share(beta1), below_one),
            ("beta2", beta2, share(beta2), below_one),
            ("decay", decay, decays(decay), at_least_0),
        ],
        Optimizer::Adafactor { eps, least, longest, decay } => {
            let above_0 = |value: f64| value.is_finite() && value > 0.0;
            vec![
                ("eps", eps, above_0(eps), "a finite number above 0"),
                ("least", least, above_0(least), "a finite number above 0"),
                ("longest", longest, above_0(longest), "a finite number above 0"),
                ("decay", decay, decays(decay), at_least_0),
            ]
        }
        Optimizer::Sgd { momentum, decay, .. } => vec![
            ("momentum", momentum, share(momentum), below_one),
            ("decay", decay, decays(decay), at_least_0),
        ],
    };
    match checks.into_iter().find(|(_, _, holds, _)| !holds) {
        None => Ok(()),
        Some((name, value, _, expected)) => Err(Mistake::Optimizer { name, value, expected }),
    }
}

fn column_fix(expected: DType, target: bool) -> String {
    let method = match (expected, target) {
        (DType::I32, true) => "Table::labels",
        (DType::I32, false) => "Table::ids",
        (_, true) => "Table::target",
        (_, false) => "Table::input",
    };
    format!("give {expected} values with {method}, or declare the port with another element type")
}

fn list(names: &[String]) -> String {
    match names {
        [] => "no columns".to_owned(),
        names => names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
    }
}
