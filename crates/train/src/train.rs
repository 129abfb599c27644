//! A training run, from a configuration to a folder of results.

use std::sync::Arc;

use phalanx_data::{Batch, Corpus, Loader};
use phalanx_script::Category;

use crate::bench::gemm_rate;
use crate::config::Loaded;
use crate::corpus;
use crate::error::Result;
use crate::host::{HostEngine, host_engine};
use crate::metrics::{Evaluation, LossPlot, Step, Summary, bytes, short};
use crate::network::Network;
use crate::report::{Facts, Report};
use crate::rundir::RunDir;
use crate::saved;
use crate::schedule::LearningRate;
use crate::session::{Prepared, Session, Settings};
use crate::steps::{Taken, take_steps};

pub use crate::report::Output;

/// Trains as the configuration says. Whatever can be refused is refused before the run's folder
/// is made and before anything is printed.
pub fn train(loaded: &Loaded, output: Output) -> Result<Summary> {
    let mut run = Run::prepare(loaded)?;
    let folder = RunDir::create(loaded)?;
    let mut report = Report::new(output, folder, run.facts(), run.plot());
    for line in run.header(report.dir().display().to_string()) {
        report.line(&line);
    }
    run.steps(&mut report)?;
    run.save(&report)?;
    let tokens = (loaded.config.train.tokens_per_step() * loaded.config.train.steps.get()) as u64;
    report.finish(run.parameters as u64, tokens)
}

/// Everything that a run needs, ready to start.
struct Run<'a> {
    loaded: &'a Loaded,
    network: Network,
    corpus: Arc<dyn Corpus>,
    loader: Loader,
    held_out: Vec<Batch>,
    session: Session<HostEngine>,
    parameters: usize,
    gemm_rate: Option<f64>,
}

impl<'a> Run<'a> {
    fn prepare(loaded: &'a Loaded) -> Result<Self> {
        let config = &loaded.config;
        let network = Network::new(loaded)?;
        let evaluates = config.train.eval_every > 0;
        let models = network.models(config, evaluates)?;
        // What can't fit is refused before data are opened and weights are made.
        let engine = host_engine(config.run.threads.get())?;
        let prepared = Prepared::new(engine, &models, Settings::new(config))?;
        let corpus = corpus::open(loaded)?;
        let loader = corpus::training(loaded, &corpus)?;
        let held_out = match evaluates {
            true => corpus::held_out(loaded, &corpus)?,
            false => Vec::new(),
        };
        let gemm_rate = gemm_rate(config, &models.train)?;
        let session = prepared.start(&mut *network.start())?;
        Ok(Self {
            loaded,
            network,
            corpus,
            loader,
            held_out,
            session,
            parameters: models.train.elements(),
            gemm_rate,
        })
    }

    fn facts(&self) -> Facts {
        let train = &self.loaded.config.train;
        Facts {
            steps: train.steps.get(),
            log_every: train.log_every.get(),
            flops_per_step: self.session.flops_per_step(),
            gemm_rate: self.gemm_rate,
            planned: self.session.arena() as u64,
        }
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

    /// What a reader wants to know before the first step.
    fn header(&self, dir: String) -> Vec<String> {
        let config = &self.loaded.config;
        let memory = self.session.memory();
        let parts: Vec<String> = (Category::ALL.into_iter())
            .filter(|&category| memory.peak(category) > 0)
            .map(|category| format!("{category} {}", bytes(memory.peak(category) as u64)))
            .collect();
        let floor = match self.corpus.entropy_floor() {
            Some(floor) => format!(", entropy {floor:.4}"),
            None => String::new(),
        };
        let train = &config.train;
        let preset = match &self.loaded.preset {
            Some(preset) if *preset == self.loaded.label => format!("preset {preset}"),
            Some(preset) => format!("{}, over preset {preset}", self.loaded.label),
            None => format!("{}, over the defaults of `phalanx config`", self.loaded.label),
        };
        vec![
            format!("config {preset}"),
            format!(
                "model  {}: {} parameters in {}",
                self.network.describe(&config.model),
                short(self.parameters as f64),
                config.precision.weights,
            ),
            format!("data   {}{floor}", self.corpus.describe()),
            format!(
                "step   {} sequences of {} tokens, micro-batches: {}, threads: {}",
                train.batch_size, train.seq_len, train.microbatches, config.run.threads,
            ),
            format!("plan   {}: {}", bytes(self.session.arena() as u64), parts.join(", ")),
            format!("run    {dir}"),
            String::new(),
        ]
    }

    fn steps(&mut self, report: &mut Report) -> Result<()> {
        let train = &self.loaded.config.train;
        let rate = LearningRate::new(&self.loaded.config);
        let (steps, every) = (train.steps.get(), train.eval_every);
        let (session, held_out) = (&mut self.session, &self.held_out);
        let observe = |session: &mut Session<HostEngine>, taken: Taken| {
            let Taken { step, result, time, .. } = taken;
            let line = Step {
                step,
                loss: result.loss,
                grad_norm: result.grad_norm,
                lr: taken.lr,
                tokens_per_s: train.tokens_per_step() as f64 / time.as_secs_f64(),
                step_ms: 1e3 * time.as_secs_f64(),
            };
            report.step(line, time)?;
            if every > 0 && (step % every == 0 || step == steps) {
                let val_loss = corpus::mean_loss(held_out, |data| session.evaluate(data))?;
                report.evaluation(Evaluation { after_step: step, val_loss })?;
            }
            Ok(())
        };
        take_steps(session, &mut self.loader, steps, |step| rate.at(step), observe)
    }

    fn save(&mut self, report: &Report) -> Result<()> {
        let Some(spec) = self.network.architecture.spec() else {
            return Ok(());
        };
        let tensors = self.session.params()?;
        saved::save(&report.folder().weights(), &spec, self.session.steps(), &tensors)
    }
}
