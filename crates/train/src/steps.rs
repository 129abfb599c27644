//! The loop around the script: next batch, one run, one report. It knows neither where batches
//! come from nor who is told.

use std::time::{Duration, Instant};

use phalanx_data::Loader;
use phalanx_engine::Engine;

use crate::corpus::with_step_data;
use crate::error::{Error, Problem, Result};
use crate::session::{Session, StepData, StepResult};

/// Gives one batch after the other.
pub trait Batches {
    /// Gives the next batch to `run`, once.
    fn with_next(
        &mut self,
        run: &mut dyn FnMut(&StepData<'_>) -> Result<StepResult>,
    ) -> Result<StepResult>;
}

impl Batches for Loader {
    fn with_next(
        &mut self,
        run: &mut dyn FnMut(&StepData<'_>) -> Result<StepResult>,
    ) -> Result<StepResult> {
        let batch = self.next_batch();
        let batch = batch.map_err(|e| Error::failed(Problem::new(e.to_string())))?;
        with_step_data(batch, run)
    }
}

/// A step that was taken.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Taken {
    /// Its number, from 1.
    pub step: usize,
    /// What it told.
    pub result: StepResult,
    /// Its learning rate.
    pub lr: f64,
    /// How long it took, the batch not counted.
    pub time: Duration,
}

/// Takes steps until their number reaches `steps`, and tells `observe` of each. A loss or a
/// gradient norm that is no number ends it: every further step would be wasted.
pub fn take_steps<E: Engine>(
    session: &mut Session<E>,
    batches: &mut dyn Batches,
    steps: usize,
    rate: impl Fn(usize) -> f64,
    mut observe: impl FnMut(&mut Session<E>, Taken) -> Result<()>,
) -> Result<()> {
    let mut last = None;
    for step in session.steps() as usize + 1..=steps {
        let lr = rate(step);
        let mut time = Duration::ZERO;
        let result = batches.with_next(&mut |data| {
            let begun = Instant::now();
            let result = session.step(data, lr);
            time = begun.elapsed();
            result
        })?;
        check_finite(step, result, last, lr)?;
        last = Some(result.loss);
        let taken = Taken { step, result, lr, time };
        observe(session, taken)?;
    }
    Ok(())
}

fn check_finite(step: usize, result: StepResult, last: Option<f64>, lr: f64) -> Result<()> {
    let (what, value) = match (result.loss.is_finite(), result.grad_norm.is_finite()) {
        (true, true) => return Ok(()),
        (false, _) => ("loss", result.loss),
        (true, false) => ("gradient norm", result.grad_norm),
    };
    let before = match last {
        Some(loss) => format!("the last good loss was {loss} at step {}", step - 1),
        None => "it was so from the first step on: look at the weights and the data".to_owned(),
    };
    let message = format!("the {what} is {value} at step {step}, with the learning rate {lr:e}");
    Err(Error::failed(
        Problem::new(message).because(before).because("no weights were written").fix(
            "lower the learning rate, warm it up for longer, clip gradients, or compute in f32",
        ),
    ))
}
