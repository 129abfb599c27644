//! A training run, from a configuration to a folder of results.

mod evaluation;
mod opening;
mod saving;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use phalanx_data::{Batch, Loader, Samples};
use phalanx_sys::interrupt;

use crate::checkpoints::{Checkpoints, RunFacts, logged_in};
use crate::metrics::{LossPlot, MoeLine, Step, Summary};
use crate::replay::{Outcome, Replay};
use crate::report::{Facts, GpuPeak, Report};
use crate::requeued::OuterJob;
use crate::resume::Resume;
use crate::rundir::RunDir;
use crate::start::{Restart, Start};
use crate::steps::{TrainedStep, take_blocks};
use evaluation::evaluated;
use phalanx_bench::floor::{self, Effort};
use phalanx_config::{DeviceKind, Loaded, RunName};
use phalanx_error::{Error, Result};
use phalanx_inspect::memory_advice;
use phalanx_inspect::trace::{Tracing, traced_step};
use phalanx_ir::DType;
use phalanx_models::hf;
use phalanx_recovery::{Allowed, Spent};
use phalanx_script::ReadLayout;
use phalanx_session::again;
use phalanx_session::corpus;
use phalanx_session::host;
use phalanx_session::job;
use phalanx_session::network::Network;
use phalanx_session::rate::LearningRate;
use phalanx_session::{Backend, Lowered, Restored, Session, Settings};

pub use crate::report::Output;

/// Trains as the configuration says. Whatever can be refused is refused before the run's folder
/// is made and before anything is printed. One step is measured and written to `trace`, if there is
/// one: see [`trace`](phalanx_inspect::trace).
///
/// In a job of several processes all of them call this; the one of rank 0 alone writes and reports.
pub fn train(loaded: &Loaded, output: Output, trace: Option<&Path>) -> Result<Summary> {
    run(loaded, output, trace, None)
}

/// Goes on with a run from its checkpoint, as the configuration says: in the run's own folder, unless
/// `run.name` asks for another one.
pub fn resume(
    loaded: &Loaded,
    output: Output,
    trace: Option<&Path>,
    resumed: &Resume,
) -> Result<Summary> {
    resumed.has_work_left(loaded.config.train.steps.get() as u64)?;
    run(loaded, output, trace, Some(resumed))
}

fn run(
    loaded: &Loaded,
    output: Output,
    trace: Option<&Path>,
    resumed: Option<&Resume>,
) -> Result<Summary> {
    let first = job::is_first();
    let smaller = Restart::smaller(loaded)?;
    let loaded = smaller.as_ref().unwrap_or(loaded);
    job::fits(loaded.config.parallel.ranks().get())?;
    let tracing = trace.filter(|_| first).map(Tracing::new).transpose()?;
    again::expect();
    let restart = Restart::find()?;
    let batch = loaded.config.train.batch_size.get() as u64;
    let start = Restart::start(restart.as_ref(), resumed, batch);
    if restart.is_none() {
        // A rank may be lost before the run has a folder: then it begins again.
        allow_restarts(loaded, None, start.taken());
    }
    let mut run = Run::prepare(loaded, tracing, &start, resumed.is_none())?;
    run.agree(trace.is_some())?;
    let products = run.different_products()?;
    let listening = interrupt::listen();
    let own = restart.as_ref().and_then(Restart::folder);
    let (folder, earlier) = match (first, &own) {
        (true, Some(own)) => {
            let (folder, earlier) = RunDir::reopen(own, loaded, start.taken().0)?;
            (Some(folder), earlier)
        }
        (true, None) => {
            RunDir::check_room(loaded, run.weight_bytes())?;
            let (folder, earlier) = open_folder(loaded, resumed)?;
            (Some(folder), earlier)
        }
        (false, _) => (None, Vec::new()),
    };
    let mut report = Report::new(output, folder, run.facts()?, run.plot());
    match (&restart, resumed) {
        (Some(restart), _) => report.restarted(restart, start.taken().0, &earlier)?,
        (None, Some(resumed)) => report.resumed(resumed.steps(), &earlier)?,
        (None, None) => {}
    }
    let dir = report.folder().map(|folder| folder.path().to_path_buf());
    let facts = run.checkpoint_facts(&start);
    run.checkpoints = Checkpoints::new(saving::saving(loaded, dir.as_deref()), facts);
    if let (Some(dir), None) = (dir.as_ref(), &own) {
        let lines = run.header(dir.display().to_string(), resumed, products);
        lines.iter().for_each(|line| report.header(line));
    }
    if let Some(dir) = &dir {
        let first = restart.as_ref().map_or(start.taken(), |restart| restart.again.first);
        allow_restarts(loaded, Some(dir), first);
    }
    run.measure_products(&mut report, restart.is_some());
    report.times.steps_begin();
    if let Err(error) = run.steps(&mut report) {
        return Err(run.after_error(&report, error));
    }
    if run.stopped_early() {
        report.line("stopping: the weights are being written (Ctrl-C again to stop without them)");
    }
    let saved = run.save_checkpoint(&mut report);
    report.times.mark(Spent::Checkpoint);
    // The weights are written first, so that no later error can lose them.
    run.save_or_rescue(&report)?;
    again::finish();
    let weights = report.folder().map(|folder| folder.weights().display().to_string());
    let safe = format!("the weights are safe in {}", weights.unwrap_or_default());
    let (stopped, parameters) = (run.stopped_early(), run.parameters as u64);
    let traced = run.traced(&mut report).map_err(|error| error.because(&safe));
    let compared = match stopped {
        true => Ok(Outcome::Agrees),
        false => run.replay(&mut report).map_err(|error| error.because(&safe)),
    };
    let each = crate::closing::PerStep::of(&loaded.config);
    let summary = report.finish(parameters, each).map_err(|e| e.because(safe))?;
    if stopped {
        // More requests may be on their way, and must not end the process before it has said why.
        std::mem::forget(listening);
        return Err(match first {
            true => Error::failed(crate::closing::stopped_early(loaded, &summary, saved.err())),
            false => job::reported_by_first("stopped on request"),
        });
    }
    saved?;
    traced?;
    compared?.into_result(summary.run_dir.as_deref().unwrap_or_default())?;
    Ok(summary)
}

/// Everything that a run needs, ready to start.
struct Run<'a> {
    loaded: &'a Loaded,
    network: Network,
    corpus: Samples,
    loader: Loader,
    held_out: Vec<Batch>,
    session: Session,
    replay: Option<Replay>,
    parameters: usize,
    backend: Box<dyn Backend>,
    lowered: Lowered,
    tracing: Option<Tracing>,
    checkpoints: Option<Checkpoints>,
}

impl<'a> Run<'a> {
    fn prepare(
        loaded: &'a Loaded,
        tracing: Option<Tracing>,
        start: &Start<'_>,
        is_new: bool,
    ) -> Result<Self> {
        let config = &loaded.config;
        let network = Network::new(loaded)?;
        let evaluates = config.train.eval_every > 0;
        let models = network.models(config, evaluates)?;
        // A plan that does not fit is refused before data are opened and weights are made.
        let lowered = Lowered::new(&models, Settings::new(config)?)?;
        let backend = host::own_machine(config.run.device);
        let prepared = memory_advice::prepare(loaded, &network, &models, &lowered, &*backend)?;
        // One rank does not do what replicas do that train by themselves; `verify` compares those.
        let alone = config.parallel.separate_replicas() > 1;
        let replay = match is_new && job::is_first() && !alone {
            // Where ranks are processes, one of them repeats steps for all.
            true => Replay::prepare(loaded, &models, &lowered.settings)?,
            // The first steps of a run that goes on were taken earlier.
            false => None,
        };
        let corpus = corpus::open(loaded)?;
        let (_, samples) = start.taken();
        let loader = corpus::training_after(loaded, &corpus, samples)?;
        let held_out = match evaluates {
            true => corpus::held_out(loaded, &corpus)?,
            false => Vec::new(),
        };
        let session = match start {
            Start::New => prepared.start_from(&*network.source())?,
            Start::Kept { step, .. } => prepared.take_over(*step)?,
            Start::Saved(Resume { checkpoint, .. }) => {
                let optimizer = &lowered.settings.optimizer;
                let replicas = lowered.replicas();
                let source = Restored::new(checkpoint, prepared.parameters(), optimizer, replicas)?;
                let mut session = prepared.resume(&source, checkpoint.manifest().step)?;
                session.go_on_from(logged_in(checkpoint)?);
                session
            }
        };
        Ok(Self {
            loaded,
            network,
            corpus,
            loader,
            held_out,
            session,
            replay,
            parameters: models.train.elements(),
            backend,
            lowered,
            tracing,
            checkpoints: None,
        })
    }

    /// Makes sure that all processes of the run do the same, and lets them trace the same step.
    fn agree(&mut self, traces: bool) -> Result<()> {
        let config = &self.loaded.config;
        let mut digest = DefaultHasher::new();
        // Where results go concerns one process alone.
        let (text, seed) = (config.to_toml(), config.run.seed);
        let sections = text.split("\n[").filter(|section| !section.starts_with("run]"));
        sections.for_each(|section| section.hash(&mut digest));
        (traces, seed, self.session.steps()).hash(&mut digest);
        let run = &config.run;
        (run.checkpoint_every, run.checkpoint_minutes, run.copy_every).hash(&mut digest);
        self.session.agree("the configuration", digest.finish())?;
        if traces {
            self.session.trace_at(traced_step(config.train.steps.get()) as u64);
        }
        Ok(())
    }

    /// What steps on GPUs are compared with.
    fn gpu_peak(&self) -> Result<Option<GpuPeak>> {
        let config = &self.loaded.config;
        if config.run.device == DeviceKind::Cpu {
            return Ok(None);
        }
        let (gpus, sharing) = host::gpus(self.session.ranks())?;
        let bf16 = DType::from(config.precision.compute) == DType::Bf16;
        let peak = host::gpu()?.bf16_rate.filter(|_| bf16);
        let planned = self.session.planned_bytes(sharing) as u64;
        Ok(Some(GpuPeak { flops_per_s: peak.map(|peak| peak * gpus as f64), planned }))
    }

    fn facts(&self) -> Result<Facts> {
        let train = &self.loaded.config.train;
        Ok(Facts {
            steps: train.steps.get(),
            log_every: train.log_every.get(),
            flops_per_step: self.session.flops_per_step(),
            gemm_seconds: None,
            planned: self.session.arena() as u64,
            planned_here: self.session.local_arena() as u64,
            exports: self.network.architecture.spec().is_some(),
            gpu: self.gpu_peak()?,
        })
    }

    fn plot(&self) -> LossPlot {
        LossPlot {
            // The details in parentheses are in the header and the configuration; here they would
            // run off the picture.
            title: {
                let data = self.corpus.describe();
                format!("{} · {}", self.loaded.label, data.split(" (").next().unwrap_or_default())
            },
            entropy_floor: self.corpus.entropy_floor(),
            ..LossPlot::default()
        }
    }

    /// What the manifests of checkpoints say of this run.
    fn checkpoint_facts(&self, start: &Start<'_>) -> RunFacts {
        let shapes = self.lowered.model.params().iter().map(|param| &param.shape[..]);
        let kept = self.lowered.settings.optimizer.kept(shapes);
        let kinds = kept.chain([(phalanx_checkpoint::FULL, self.parameters)]);
        let replicas = self.lowered.replicas();
        RunFacts {
            seed: self.loaded.config.run.seed,
            corpus: self.corpus.describe(),
            model: self.network.architecture.spec().map(|spec| hf::config_text(&spec)),
            layout: self.session.layout().to_owned(),
            products: opening::multipliers(&self.loaded.config),
            start: start.taken(),
            batch: self.loaded.config.train.batch_size.get() as u64,
            kinds: kinds
                .map(|(kind, count)| (kind.to_owned(), (count * replicas) as u64))
                .collect(),
        }
    }

    /// Saves the end of the run in a checkpoint, if it leaves any.
    fn save_checkpoint(&mut self, report: &mut Report) -> Result<()> {
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        let committed = checkpoints.at_end(&mut self.session)?;
        committed.iter().try_for_each(|committed| report.saved(committed))
    }

    /// Measures how fast the products of a step are alone, which step lines are compared with. It
    /// only informs, so a run goes on without it. Who takes the place of others knows what they found.
    fn measure_products(&self, report: &mut Report, again: bool) {
        // On a GPU, MFU says more: what the host would measure is mostly how fast it issues calls.
        if self.loaded.config.run.device == DeviceKind::Cuda {
            return report.compare_with(None);
        }
        let recorder = job::recorder().map(|recorder| recorder.job());
        if again {
            return report.compare_with(recorder.and_then(|words| words.floor()));
        }
        let compute = self.loaded.config.precision.compute.into();
        match floor::seconds(&self.lowered, &*self.backend, compute, Effort::SHORT) {
            Ok(seconds) => {
                let known = recorder.zip(seconds).filter(|_| job::is_first());
                known.into_iter().for_each(|(words, seconds)| words.set_floor(seconds));
                report.compare_with(seconds);
            }
            Err(error) => report.line(&format!("the GEMM rate was not measured: {error}")),
        }
    }

    fn steps(&mut self, report: &mut Report) -> Result<()> {
        let train = &self.loaded.config.train;
        let rate = LearningRate::new(&self.loaded.config);
        let (steps, every) = (train.steps.get(), train.eval_every);
        let (session, held_out) = (&mut self.session, &self.held_out);
        let (tracing, checkpoints) = (&mut self.tracing, &mut self.checkpoints);
        let observe = |session: &mut Session, taken: TrainedStep| {
            let TrainedStep { step, result, time, .. } = taken;
            let gathered = session.logged().is_some_and(|own| own.layout == ReadLayout::All);
            let rooms = session.rooms().filter(|_| !gathered);
            let slack = rooms.map(|rooms| rooms.slack(result.room.bound));
            let moe = |load| MoeLine::new(load, slack, result.room.repeats, gathered);
            let line = Step {
                step,
                loss: result.loss,
                grad_norm: result.grad_norm,
                lr: taken.lr,
                tokens_per_s: train.tokens_per_step() as f64 / time.as_secs_f64(),
                step_ms: 1e3 * time.as_secs_f64(),
                accuracy: taken.accuracy,
                moe: taken.load.as_ref().map(moe),
                loss_scale: result.scaling.map(|scaling| scaling.loss_scale),
                skipped: result.scaling.map(|scaling| scaling.skipped),
            };
            // An error of the report concerns one process; so all evaluate before it counts.
            let again = report.taken_again(step, result, slack);
            let mut reported = again.and_then(|()| report.step(line, time));
            report.experts.extend(step, taken.load);
            tracing.iter_mut().for_each(|tracing| tracing.look(session));
            if every > 0 && (step % every == 0 || step == steps) {
                let line = evaluated(session, held_out, step)?;
                reported = reported.and_then(|()| report.evaluation(line));
            }
            report.times.step(step as u64);
            // Of a block of steps, the state is that after the last.
            let here = step < steps && session.steps() == step as u64;
            if let Some(checkpoints) = checkpoints.as_mut().filter(|_| here) {
                let saved = checkpoints.after_step(session, step as u64);
                let told = |saved: Option<_>| saved.map_or(Ok(()), |saved| report.saved(&saved));
                reported = reported.and(saved.and_then(told));
                report.times.mark(Spent::Checkpoint);
            }
            reported.map(ControlFlow::Continue)
        };
        let saving = [self.loaded.config.run.checkpoint_every, self.loaded.config.run.copy_every];
        let pauses = |step: usize| {
            let due = |every: usize| every > 0 && step.is_multiple_of(every);
            due(every) || saving.into_iter().any(due)
        };
        let rate = |step| rate.at(step);
        take_blocks(session, &mut self.loader, steps, rate, pauses, observe)
    }

    /// Bytes of the file of weights, its header not counted.
    fn weight_bytes(&self) -> u64 {
        (self.parameters * self.loaded.config.precision.state().size()) as u64
    }

    fn stopped_early(&self) -> bool {
        (self.session.steps() as usize) < self.loaded.config.train.steps.get()
    }

    /// Reports where the trace is, if there is one.
    fn traced(&mut self, report: &mut Report) -> Result<()> {
        let Some(tracing) = &mut self.tracing else { return Ok(()) };
        if let Some(written) = tracing.outcome()? {
            report.traced(written);
        }
        Ok(())
    }

    /// Repeats the first steps on one rank, if asked for. The ranks are dropped first, because
    /// their memory may be needed.
    fn replay(self, report: &mut Report) -> Result<Outcome> {
        let Self { loaded, network, corpus, session, replay, .. } = self;
        drop(session);
        let Some(replay) = replay else { return Ok(Outcome::Agrees) };
        let mut loader = corpus::training(loaded, &corpus)?;
        let rate = LearningRate::new(&loaded.config);
        replay.run(&*network.start(), &mut loader, &rate, report)
    }
}

/// Lets the launcher start the ranks again if one is lost.
fn allow_restarts(loaded: &Loaded, folder: Option<&Path>, first: (u64, u64)) {
    let config = &loaded.config;
    let mut smaller = [0; Allowed::LAYOUTS];
    let mut ranks = config.parallel.ranks().get();
    for own in &mut smaller {
        let next = config.shrink(ranks - 1).map(|smaller| smaller.parallel.ranks().get());
        let Some(next) = next.filter(|next| *next >= config.run.min_ranks.get()) else { break };
        (*own, ranks) = (next, next);
    }
    let allowed = Allowed { restarts: config.run.restarts as u64, smaller };
    let timeout = Duration::from_secs(config.run.timeout_s.get() as u64);
    again::allow(folder, allowed, timeout, first);
}

/// The folder of a run: a new one, or that of the run that goes on, with its earlier steps.
fn open_folder(loaded: &Loaded, resumed: Option<&Resume>) -> Result<(RunDir, Vec<Step>)> {
    let own = resumed.and_then(|resumed| resumed.run.as_deref());
    // A name that the run itself has kept asks for nothing: its folder may have got another one.
    let name = loaded.config.run.name.as_ref().filter(|_| loaded.by_user("run.name"));
    let named = |run: &&Path| {
        let is_own = |name: &RunName| run.file_name().is_some_and(|own| own == name.as_str());
        name.is_none_or(is_own) || OuterJob::is_again(run)
    };
    match (own.filter(named), resumed) {
        (Some(run), Some(resumed)) => RunDir::reopen(run, loaded, resumed.steps()),
        _ => Ok((RunDir::create(loaded)?, Vec::new())),
    }
}
