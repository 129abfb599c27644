//! Checks that training on many ranks is the same as training on one rank.
//!
//! The same steps run on one rank and in the layout of the configuration, from the same weights and
//! on the same batches; replicas that train by themselves are compared with one rank each. Losses, gradient norms, every gradient of the first step and every
//! parameter at the end are compared; so are the bytes that ranks were predicted to exchange and
//! the memory that they were planned to write with what was measured.

mod bytes;
mod comparison;
mod routing;

use std::sync::Arc;

use phalanx_script::{AnyLayout, Category, StateKind};
use serde::Serialize;

use self::bytes::Bytes;
use self::comparison::Comparison;
use self::routing::{Routing, StepRows};
use crate::alone::{Alone, in_replicas};
use crate::memory_advice;
use phalanx_config::{FloatKind, Loaded, OptimKind, Sources};
use phalanx_error::{Error, Problem, Result, counted};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::host;
use phalanx_session::job;
use phalanx_session::network::{Network, load};
use phalanx_session::{Backend, BatchSource, Lowered, OwnedStep, Session, Settings, StepData};

/// The result of `verify`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Verified {
    /// Whether everything agrees.
    pub ok: bool,
    /// What the layout was compared with.
    pub reference: &'static str,
    /// The largest relative difference of losses.
    pub loss_max_rel: f64,
    /// The same for gradient norms.
    pub grad_norm_max_rel: f64,
    /// The largest difference of a gradient of the first step that was applied, relative to its largest entry.
    pub grad_max_rel: f64,
    /// The same for parameters after the last step.
    pub param_max_rel: f64,
    /// The parameter that differs most.
    pub worst_param: String,
    /// Tokens that went to other places than on one rank, over all layers and steps; none if there are no experts,
    /// or if replicas train by themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routing_flips: Option<usize>,
    /// Steps whose loss scale, or whose decision to change nothing, is not that of one rank; none if losses are not scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_flips: Option<usize>,
    /// What was moved between ranks, over all ranks and steps but those that were taken again for want of room.
    pub comm: Vec<CommRow>,
    /// What a step writes, on the rank that writes most.
    pub memory: Vec<MemoryRow>,
    /// Ranks that moved or wrote other bytes than predicted.
    #[serde(skip)]
    pub mismatches: Vec<Mismatch>,
}

/// A rank that moved or wrote other bytes than predicted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The rank.
    pub rank: usize,
    /// What: `all_gather<tp>` or `residuals`.
    pub what: String,
    /// Bytes and calls, or bytes.
    pub predicted: String,
    /// The same as measured.
    pub measured: String,
}

/// Collectives of one kind over the same axes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CommRow {
    /// The op.
    pub op: &'static str,
    /// The axes.
    pub axes: Vec<String>,
    /// Calls, counted on every rank that takes part.
    pub count: u64,
    /// Bytes that follow from the script's types.
    pub bytes_predicted: u64,
    /// Bytes of other ranks' memory that ranks read and wrote, as measured.
    pub bytes_measured: u64,
}

/// One category of memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct MemoryRow {
    /// The category.
    pub category: &'static str,
    /// The planned peak of live bytes.
    pub predicted: usize,
    /// The same peak, over bytes that were measured to be written.
    pub measured: usize,
}

/// Loads a configuration for a comparison: in f64 unless the user sets another precision.
pub fn sources(sources: &Sources) -> Result<Loaded> {
    let loaded = load(sources)?;
    match loaded.by_user("precision.compute") {
        true => Ok(loaded),
        false => load(&sources.clone().set("precision.compute=f64")),
    }
}

/// Runs the steps on one rank and in the layout, and compares.
pub fn verify(loaded: &Loaded, steps: usize) -> Result<Verified> {
    job::fits(loaded.config.parallel.ranks().get())?;
    verify_with(loaded, steps, &*host::ranks(loaded.config.run.device))
}

/// The same, on this backend.
pub fn verify_with(loaded: &Loaded, steps: usize, backend: &dyn Backend) -> Result<Verified> {
    verify_as(loaded, Settings::new(&loaded.config)?, steps, backend)
}

/// The same, in the layout of these settings, which may use the user's own strategies.
pub fn verify_as(
    loaded: &Loaded,
    settings: Settings,
    steps: usize,
    backend: &dyn Backend,
) -> Result<Verified> {
    let config = &loaded.config;
    let network = Network::new(loaded)?;
    let mut models = network.models(config, false)?;
    let alone = settings.parallel.replica_count() == 1;
    let (microbatches, scaled) = (settings.microbatches, settings.scaling.is_some());
    let mut routing = alone.then(|| Routing::expose(&mut models, microbatches)).flatten();
    let mut settings = settings.measured(&models)?;
    // Whatever a rule would choose, numbers are the same; so they are compared under one that takes all there is.
    if let Some(experts) = &mut settings.parallel.experts {
        experts.policy = Arc::new(AnyLayout { seed: settings.seed });
    }
    // One rank has room for all rows from the start, so the steps that ranks take again are compared with steps that are not.
    let mut one = Alone::new(&network, &models.with_all_room(), &settings)?;
    let reference = one.describe(settings.device);
    let requirements = backend.requirements(settings.units);
    let lowered = Lowered::for_engine(&models, settings, requirements)?;
    let many = memory_advice::prepare(loaded, &network, &models, &lowered, backend)?;
    let mut many = many.start_from(&*network.source())?;
    let mut loader = corpus::training(loaded, &corpus::open(loaded)?)?;
    let (mut found, mut moved) = (Comparison::default(), Bytes::default());
    let bounds = Bounds::of(loaded);
    let lr = config.optim.lr.get();
    // Gradients are compared before any update: Adam turns the rounding of narrow types into full steps. Of a step with
    // several updates they are those of the last one, so the first step does not move then.
    let still = one.updates_within_steps() && bounds.params.is_none();
    let first_lr = if still { 0.0 } else { lr };
    let mut batches = Steps { lr, steps: Vec::with_capacity(steps) };
    for step in 1..=steps {
        let batch = loader.next_batch().map_err(|e| Error::failed(e.diagnostic().into()))?;
        with_step_data(batch, |data| batches.steps.push(OwnedStep::new(data)));
        let data = &batches.steps[step - 1];
        let lr = if step == 1 { first_lr } else { lr };
        found.expected.push(data.with(|data| one.step(data, lr))?);
        // What routers chose is known until the next step, so it is compared after each.
        let mut repeats = 0;
        if found.gradients.is_none() || routing.is_some() {
            let b = data.with(|data| many.step(data, lr))?;
            repeats = b.room.repeats;
            found.step(b);
        }
        if let Some(routing) = &mut routing {
            let before = routing.flips;
            routing.compare(one.first_mut(), &mut many)?;
            let same = routing.flips == before;
            let rows = routing.rows(if same { one.first_mut() } else { &mut many })?;
            moved.after(&mut many, &rows, repeats > 0)?;
        }
        if found.gradients.is_none() && found.applied {
            found.gradients = Some(Difference::of(&mut one, &mut many, StateKind::Gradient)?);
        }
    }
    let gradients = found.gradients.take().ok_or_else(|| nothing_applied(&found))?;
    // As training takes them: where ranks need not wait for each other after every step, they don't. Of a model with
    // experts no step is left here.
    while many.steps() < steps as u64 {
        let rest = steps as u64 - many.steps();
        many.take(rest, &batches)?.into_iter().for_each(|b| found.step(b));
    }
    let full = many.full_kind();
    found.params = Difference::of(&mut one, &mut many, full)?;
    if routing.is_none() {
        moved.after(&mut many, &StepRows::new(), false)?;
    }
    let (comm, mut mismatches) = moved.compared();
    let (memory, wrote_else) = memory(&mut many)?;
    mismatches.extend(wrote_else);
    let routing_flips = routing.map(|routing| routing.flips);
    let routed = bounds.flips || routing_flips.is_none_or(|flips| flips == 0);
    let scale_flips = scaled.then_some(found.scale_flips);
    Ok(Verified {
        ok: bounds.hold(&found, &gradients) && mismatches.is_empty() && routed,
        reference,
        loss_max_rel: found.loss,
        grad_norm_max_rel: found.grad_norm,
        grad_max_rel: gradients.largest,
        param_max_rel: found.params.largest,
        worst_param: found.params.name,
        routing_flips,
        scale_flips,
        comm,
        memory,
        mismatches,
    })
}

/// Every step overflowed, so no gradient could be compared.
fn nothing_applied(found: &Comparison) -> Error {
    let steps = counted(found.expected.len(), "step");
    let scales = found.expected.iter().filter_map(|step| Some(step.scaling?.loss_scale));
    let least = scales.fold(f64::INFINITY, f64::min);
    let problem = Problem::new(format!("none of {steps} was applied, so nothing was compared"))
        .because(format!("gradients of the loss times {least} overflow"));
    Error::failed(problem.fix("more --steps, or a smaller precision.initial_scale_power"))
}

/// The batches of all steps, for ranks that take several.
struct Steps {
    lr: f64,
    steps: Vec<OwnedStep>,
}

impl BatchSource for Steps {
    fn with(&self, step: u64, run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>) -> Result<()> {
        self.steps[step as usize - 1].with(|data| run(data, self.lr))
    }
}

/// |a − b| relative to b; infinite if one of them is not a number.
pub fn relative(a: f64, b: f64) -> f64 {
    let error = (a - b).abs() / b.abs().max(f64::MIN_POSITIVE);
    if error.is_finite() { error } else { f64::INFINITY }
}

/// The larger of two differences; NaN counts as larger than any number.
pub fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// The tensor that differs most, and by how much.
#[derive(Default)]
struct Difference {
    largest: f64,
    name: String,
}

impl Difference {
    /// Each tensor's largest difference, relative to its largest entry or, if that is larger, to the
    /// root of the mean square over all tensors. One tensor of each session is in memory at a time.
    fn of(expected: &mut Alone, found: &mut Session, kind: StateKind) -> Result<Self> {
        let params = expected.first().parameters().iter();
        let names: Vec<String> = params.map(|p| p.name.clone()).collect();
        let (mut count, mut squares) = (0, 0.0);
        for param in 0..names.len() {
            let values = expected.values(param, kind)?;
            count += values.len();
            squares += values.iter().map(|x| x * x).sum::<f64>();
        }
        let typical = (squares / count.max(1) as f64).sqrt();
        let mut worst = Self::default();
        // In the order of names, so that the first of equal ones is reported.
        let mut order: Vec<usize> = (0..names.len()).collect();
        order.sort_by_key(|&param| &names[param]);
        for param in order {
            let expected = expected.values(param, kind)?;
            let found = in_replicas(found, param, kind)?;
            let error = match found.len() == expected.len() {
                false => f64::INFINITY,
                true => {
                    let entry = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                    let pairs = expected.iter().zip(&found).map(|(a, b)| (a - b).abs());
                    let most = pairs.fold(0.0, larger);
                    let scale = entry.max(typical).max(f64::MIN_POSITIVE);
                    if most.is_finite() { most / scale } else { f64::INFINITY }
                }
            };
            if error > worst.largest || worst.name.is_empty() {
                worst = Self { largest: error, name: names[param].clone() };
            }
        }
        Ok(worst)
    }
}

/// How far the two runs may differ.
struct Bounds {
    /// Losses, norm and gradients of the first step.
    first: f64,
    /// Losses of all steps.
    losses: f64,
    /// Parameters, if they are compared.
    params: Option<f64>,
    /// Whether tokens may go to other places.
    flips: bool,
}

impl Bounds {
    fn of(loaded: &Loaded) -> Self {
        let config = &loaded.config;
        let wide = |bound| Self { first: bound, losses: bound, params: Some(bound), flips: false };
        let f32_params = match config.optim.kind {
            // Its steps are as small as the gradients.
            OptimKind::Sgd => Some(1e-4),
            // They turn the rounding noise of zero gradients into full steps.
            _ => None,
        };
        match config.precision.compute {
            FloatKind::F64 => wide(1e-10),
            // Operands of products have eleven significant bits.
            FloatKind::F32 if config.precision.tf32 => {
                Self { first: 1e-2, losses: 1e-2, params: None, flips: true }
            }
            FloatKind::F32 => Self { first: 1e-5, losses: 1e-4, params: f32_params, flips: true },
            // bf16 has eight significant bits, and some hundred values are summed.
            _ => Self { first: 5e-2, losses: 5e-2, params: None, flips: true },
        }
    }

    fn hold(&self, found: &Comparison, gradients: &Difference) -> bool {
        found.scale_flips == 0
            && found.first_loss <= self.first
            && found.first_grad_norm <= self.first
            && gradients.largest <= self.first
            && found.loss <= self.losses
            && self.params.is_none_or(|bound| found.params.largest <= bound)
    }
}

/// Planned and written bytes of each category; and the ranks where these differ.
fn memory(session: &mut Session) -> Result<(Vec<MemoryRow>, Vec<Mismatch>)> {
    let observed = session.observe()?;
    let planned: Vec<_> = session.planned().collect();
    let mut rows: Vec<MemoryRow> = (Category::ALL.into_iter())
        .map(|category| MemoryRow { category: category.name(), predicted: 0, measured: 0 })
        .collect();
    let mut mismatches = Vec::new();
    for (rank, observed) in observed.iter().enumerate() {
        for ((row, (category, written)), (_, planned)) in
            rows.iter_mut().zip(&observed.peaks).zip(planned[rank])
        {
            let planned = *planned;
            if planned != *written {
                let (predicted, measured) =
                    (format!("{planned} bytes"), format!("{written} bytes"));
                mismatches.push(Mismatch { rank, what: category.to_string(), predicted, measured });
            }
            row.predicted = row.predicted.max(planned);
            row.measured = row.measured.max(*written);
        }
    }
    rows.retain(|row| row.predicted > 0 || row.measured > 0);
    Ok((rows, mismatches))
}
