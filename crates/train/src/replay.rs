//! Repeats the first steps of a run on many ranks on one rank: the check of the layout that every
//! newcomer sees.
//!
//! The same weights, batches, micro-batches and learning rates; only the ranks are fewer. So the
//! losses may differ by rounding alone.

use std::ops::ControlFlow;

use phalanx_data::Loader;

use crate::metrics::OneRank;
use crate::report::Report;
use crate::steps::{TrainedStep, take_steps};
use phalanx_config::Loaded;
use phalanx_error::{Error, Problem, Result};
use phalanx_inspect::verify::{larger, relative};
use phalanx_session::rate::LearningRate;
use phalanx_session::{MemoryLimit, Models, Prepared, ReadParam, Session, Settings};

/// How many steps are repeated.
const STEPS: usize = 20;
/// How far the losses of a step may differ, relative to them.
const BOUND: f64 = 1e-4;

/// Steps to repeat, ready to start.
pub(crate) struct Replay {
    prepared: Prepared,
    steps: usize,
}

impl Replay {
    /// Prepares the steps of the default run, if it uses many ranks. What cannot work is refused
    /// together with the run.
    pub(crate) fn prepare(
        loaded: &Loaded,
        models: &Models,
        settings: &Settings,
    ) -> Result<Option<Self>> {
        if !loaded.is_default_run || settings.parallel.ranks() == 1 {
            return Ok(None);
        }
        // With room for all rows of experts, so that steps that were taken again are compared with steps that were not.
        let models = Models::trained(models.with_all_room().train);
        let alone = Settings {
            parallel: settings.on_one_rank(&models.train)?,
            // A memory limit for each of many ranks does not apply to one rank that holds
            // everything.
            memory_limit: MemoryLimit::of(settings.device, 1)?,
            ..settings.clone()
        };
        let steps = STEPS.min(loaded.config.train.steps.get());
        Ok(Some(Self { prepared: Prepared::new(&models, alone)?, steps }))
    }

    /// Takes the steps, and compares their losses with those that `report` knows.
    pub(crate) fn run(
        self,
        start: &ReadParam<'_>,
        loader: &mut Loader,
        rate: &LearningRate,
        report: &mut Report,
    ) -> Result<Outcome> {
        let (steps, many) = (self.steps, report.losses());
        report.replay_begins(steps);
        let mut session = self.prepared.start(start)?;
        let mut worst = Worst::default();
        let observe = |_: &mut Session, TrainedStep { step, result, .. }: TrainedStep| {
            let loss = many[step - 1];
            report.replayed(step, steps, result.loss, loss);
            worst.see(step, result.loss, loss);
            Ok(ControlFlow::Continue(()))
        };
        take_steps(&mut session, loader, steps, |step| rate.at(step), observe)?;
        if (session.steps() as usize) < steps {
            return Ok(Outcome::Stopped);
        }
        report.one_rank(OneRank { steps, loss_max_rel: worst.difference }, BOUND)?;
        Ok(match worst.difference <= BOUND {
            true => Outcome::Agrees,
            false => Outcome::Differs(worst.problem()),
        })
    }
}

/// How a comparison ended.
pub(crate) enum Outcome {
    /// Within the bound.
    Agrees,
    /// Beyond it.
    Differs(Problem),
    /// The user interrupted it.
    Stopped,
}

impl Outcome {
    /// The error that the run ends with, if there is one.
    pub(crate) fn into_result(self, run_dir: &str) -> Result<()> {
        let safe = format!("the run itself is complete; its weights are in {run_dir}");
        match self {
            Outcome::Agrees => Ok(()),
            Outcome::Differs(problem) => Err(Error::failed(problem.because(safe))),
            Outcome::Stopped => Err(Error::failed(
                Problem::new("stopped on request while the first steps were repeated on one rank")
                    .because(safe)
                    .fix("phalanx verify compares again, in f64"),
            )),
        }
    }
}

/// The step whose two losses differ most.
#[derive(Default)]
struct Worst {
    difference: f64,
    step: usize,
    alone: f64,
    many: f64,
}

impl Worst {
    fn see(&mut self, step: usize, alone: f64, many: f64) {
        let difference = relative(many, alone);
        if step == 1 || larger(self.difference, difference) > self.difference {
            *self = Self { difference, step, alone, many };
        }
    }

    fn problem(&self) -> Problem {
        let Self { difference, step, alone, many } = self;
        Problem::new(format!(
            "the loss of step {step} is {many} on all ranks and {alone} on one: {difference:.1e} apart"
        ))
        .because(format!(
            "the layout of ranks may change only rounding: at most {BOUND:e} in {STEPS} steps"
        ))
        .fix("phalanx verify names the tensor that differs most; please report what it says")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_step_is_told_with_both_losses() {
        let mut worst = Worst::default();
        worst.see(1, 4.0, 4.0);
        worst.see(2, 2.0, 2.5);
        worst.see(3, 4.0, 4.1);
        assert_eq!((worst.step, worst.difference), (2, 0.25));
        let text = worst.problem().to_string();
        assert!(text.contains("step 2 is 2.5 on all ranks and 2 on one: 2.5e-1 apart"), "{text}");
        worst.see(4, 4.0, f64::NAN);
        assert_eq!((worst.step, worst.difference), (4, f64::INFINITY));
    }

    #[test]
    fn a_difference_and_a_request_to_stop_end_the_command_with_1() {
        assert!(Outcome::Agrees.into_result("runs/a").is_ok());
        let differs = Outcome::Differs(Worst::default().problem());
        for outcome in [differs, Outcome::Stopped] {
            let error = outcome.into_result("runs/a").unwrap_err();
            assert_eq!(error.exit_code(), 1);
            assert!(error.to_string().contains("its weights are in runs/a"), "{error}");
        }
    }
}
