//! The training loop around the script: next batch, one run, one report. It does not know where
//! batches come from or where reports go.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use phalanx_data::Loader;
use phalanx_sys::interrupt;

use phalanx_error::{Error, Problem, Result};
use phalanx_script::ScriptKey;
use phalanx_session::corpus::with_step_data;
use phalanx_session::job;
use phalanx_session::{
    Accuracy, BatchSource, ExpertLoad, OwnedStep, Session, StepData, StepResult,
};

/// Gives one batch after the other.
pub trait Batches {
    /// Gives the next batch to `run`, once.
    fn with_next(&mut self, run: &mut dyn FnMut(&StepData<'_>) -> Result<()>) -> Result<()>;

    /// Whether a batch may be read before its step, and be lost if that step is never taken.
    fn may_be_read_ahead(&self) -> bool {
        false
    }
}

impl Batches for Loader {
    fn with_next(&mut self, run: &mut dyn FnMut(&StepData<'_>) -> Result<()>) -> Result<()> {
        let batch = self.next_batch();
        let batch = batch.map_err(|e| Error::failed(e.diagnostic().into()))?;
        with_step_data(batch, run)
    }

    fn may_be_read_ahead(&self) -> bool {
        true
    }
}

/// A step that was taken.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainedStep {
    /// Its number, from 1.
    pub step: usize,
    /// Its loss and gradient norm.
    pub result: StepResult,
    /// The share of its samples that was classified right, if that is what the model does.
    pub accuracy: Option<f64>,
    /// How its tokens were spread over experts, if the model has some.
    pub load: Option<ExpertLoad>,
    /// Its learning rate.
    pub lr: f64,
    /// How long it took, the batch not counted.
    pub time: Duration,
}

/// Runs steps until `steps` are done, and calls `observe` after each. It ends early if a loss or a
/// gradient norm is not finite, because further steps would be useless; or if the user interrupts
/// it, where interrupts are handled ([`interrupt`]), or if `observe` breaks: the steps done so far
/// are kept.
pub fn take_steps(
    session: &mut Session,
    batches: &mut dyn Batches,
    steps: usize,
    rate: impl Fn(usize) -> f64,
    observe: impl FnMut(&mut Session, TrainedStep) -> Result<ControlFlow<()>>,
) -> Result<()> {
    take_blocks(session, batches, steps, rate, |_| true, observe)
}

/// The same; where a session can, it runs several steps without waiting in between. `observe` is then called for each of
/// them after the last. It never runs past a step after which something `pauses`.
pub fn take_blocks(
    session: &mut Session,
    batches: &mut dyn Batches,
    steps: usize,
    rate: impl Fn(usize) -> f64,
    pauses: impl Fn(usize) -> bool,
    mut observe: impl FnMut(&mut Session, TrainedStep) -> Result<ControlFlow<()>>,
) -> Result<()> {
    let mut last = None;
    let batches = &mut LookAhead { batches, next: None };
    while (session.steps() as usize) < steps {
        let first = session.steps() as usize + 1;
        let together = session.together();
        let pause = (first..steps).take(together.end() - 1).find(|step| pauses(*step));
        let end = 1 + pause.unwrap_or(steps.min(first + together.end() - 1));
        let (results, time) = match end - first > 1 && together.contains(&(end - first)) {
            true => take_block(session, batches, first..end, &rate)?,
            false => take_one(session, batches, (first, steps), &rate)?,
        };
        let mut wish = Wish::GoOn;
        let mut failed = None;
        for (step, Measured { result, accuracy, load }) in (first..).zip(results) {
            let lr = rate(step);
            finite(session, step, result, &mut last, lr)?;
            let taken = TrainedStep { step, result, accuracy, load, lr, time };
            match observe(session, taken) {
                Err(error) => {
                    (wish, failed) = (Wish::Fail, Some(error));
                    break;
                }
                Ok(flow) if flow.is_break() || interrupt::requested() => wish = Wish::Stop,
                Ok(_) => {}
            }
        }
        // All processes end after the same step, whichever of them was asked to.
        let agreed = session.largest(wish as u64)?;
        if let Some(error) = failed {
            return Err(error);
        }
        match agreed {
            0 => {}
            1 => break,
            _ => return Err(job::reported_by_first("a file could not be written")),
        }
    }
    Ok(())
}

/// The numbers of a step: its accuracy if the model has one, the load of its experts if it has some.
struct Measured {
    result: StepResult,
    accuracy: Option<f64>,
    load: Option<ExpertLoad>,
}

/// One step, and how long it took.
fn take_one(
    session: &mut Session,
    batches: &mut LookAhead<'_>,
    (step, last): (usize, usize),
    rate: impl Fn(usize) -> f64,
) -> Result<(Vec<Measured>, Duration)> {
    let (mut results, mut time) = (Vec::new(), Duration::ZERO);
    let ahead = step < last && session.looks_ahead() && batches.batches.may_be_read_ahead();
    batches.with_two(ahead, &mut |data, next| {
        let next = next.map(|next| (next, rate(step + 1)));
        let begun = Instant::now();
        let result = session.step_before(data, rate(step), next)?;
        time = begun.elapsed();
        let accuracy = session.accuracy(ScriptKey::Train, data)?.and_then(Accuracy::share);
        results.push(Measured { result, accuracy, load: session.expert_load()? });
        Ok(())
    })?;
    Ok((results, time))
}

/// A block of steps, and how long each took.
fn take_block(
    session: &mut Session,
    batches: &mut dyn Batches,
    steps: Range<usize>,
    rate: impl Fn(usize) -> f64,
) -> Result<(Vec<Measured>, Duration)> {
    let mut block = StepBlock { first: steps.start as u64, steps: Vec::new() };
    for step in steps.clone() {
        batches.with_next(&mut |data| {
            block.steps.push((OwnedStep::new(data), rate(step)));
            Ok(())
        })?;
    }
    let begun = Instant::now();
    let results = session.take(steps.len() as u64, &block)?;
    let alone = |result| Measured { result, accuracy: None, load: None };
    let results = results.into_iter().map(alone).collect();
    Ok((results, begun.elapsed() / steps.len() as u32))
}

/// Batches of which the one after the next may be wanted too.
struct LookAhead<'a> {
    batches: &'a mut dyn Batches,
    /// What could not be read is said when its step is due.
    next: Option<Result<OwnedStep>>,
}

impl LookAhead<'_> {
    /// Gives the next batch to `run` and, if it is wanted, the one that comes after it.
    fn with_two(
        &mut self,
        ahead: bool,
        run: &mut dyn FnMut(&StepData<'_>, Option<&OwnedStep>) -> Result<()>,
    ) -> Result<()> {
        if !ahead {
            return self.with_next(&mut |data| run(data, None));
        }
        let now = match self.next.take() {
            Some(now) => now?,
            None => self.read()?,
        };
        let after = self.read();
        let next = self.next.insert(after).as_ref().ok();
        now.with(|data| run(data, next))
    }

    fn read(&mut self) -> Result<OwnedStep> {
        let mut read = None;
        self.batches.with_next(&mut |data| {
            read = Some(OwnedStep::new(data));
            Ok(())
        })?;
        Ok(read.expect("a batch is given once"))
    }
}

impl Batches for LookAhead<'_> {
    fn with_next(&mut self, run: &mut dyn FnMut(&StepData<'_>) -> Result<()>) -> Result<()> {
        match self.next.take() {
            Some(next) => next?.with(run),
            None => self.batches.with_next(run),
        }
    }
}

/// The batches of a block, with their learning rates.
struct StepBlock {
    first: u64,
    steps: Vec<(OwnedStep, f64)>,
}

impl BatchSource for StepBlock {
    fn with(&self, step: u64, run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>) -> Result<()> {
        let (data, lr) = &self.steps[(step - self.first) as usize];
        data.with(|data| run(data, *lr))
    }
}

/// Fails if further steps would be useless.
fn finite(
    session: &Session,
    step: usize,
    result: StepResult,
    last: &mut Option<f64>,
    lr: f64,
) -> Result<()> {
    match result.scaling {
        Some(scaling) if scaling.overflowed => {
            if session.is_least(scaling.loss_scale) {
                return Err(Error::failed(overflows(step, scaling.loss_scale)));
            }
        }
        _ if !(result.loss.is_finite() && result.grad_norm.is_finite()) => {
            return Err(Error::failed(diverged(step, result, *last, lr, session.remedies())));
        }
        _ => *last = Some(result.loss),
    }
    Ok(())
}

/// What a process wants after a step; the largest wish of all processes holds.
#[derive(Clone, Copy)]
enum Wish {
    GoOn,
    Stop,
    Fail,
}

/// The error of a step that overflowed although the loss scale cannot fall any further.
fn overflows(step: usize, scale: f64) -> Problem {
    Problem::new(format!("step {step} overflows in f16 with the loss scale {scale}"))
        .because("the scale cannot fall below it, so that no further step would change anything")
        .because("no weights were written")
        .fix(
            "precision.compute = \"bf16\"; a lower learning rate; or a smaller \
             precision.min_loss_scale",
        )
}

/// `remedies` are settings, besides the learning rate, that might help and are not yet on.
fn diverged(
    step: usize,
    result: StepResult,
    last: Option<f64>,
    lr: f64,
    remedies: Vec<&'static str>,
) -> Problem {
    let (what, value) = match result.loss.is_finite() {
        false => ("loss", result.loss),
        true => ("gradient norm", result.grad_norm),
    };
    let message = format!("the {what} is {value} at step {step}, with the learning rate {lr:e}");
    let problem = Problem::new(message);
    // The first loss comes from the initial weights: the learning rate has no part in it.
    let (problem, first) = match last {
        Some(loss) => (
            problem.because(format!("the last good loss was {loss} at step {}", step - 1)),
            "a lower learning rate, or a longer warm-up",
        ),
        None => (
            problem.because("it was so at the first step already, before any update"),
            "check the initial weights and the data",
        ),
    };
    let remedies: Vec<&str> = [first].into_iter().chain(remedies).collect();
    problem.because("no weights were written").fix(remedies.join("; "))
}

#[cfg(test)]
mod tests {
    use phalanx_session::StepRoom;

    use super::*;

    const NAN: StepResult = StepResult {
        loss: f64::NAN,
        grad_norm: f64::NAN,
        scaling: None,
        repeated: false,
        room: StepRoom { bound: 0, repeats: 0, lacking: 0 },
    };

    #[test]
    fn a_loss_that_was_never_a_number_is_not_blamed_on_the_learning_rate() {
        let text = diverged(1, NAN, None, 1e-3, vec![]).to_string();
        assert!(text.contains("at the first step already") && !text.contains("lower"), "{text}");
        let text = diverged(7, NAN, Some(2.5), 1e-3, vec!["clip"]).to_string();
        assert!(text.contains("the last good loss was 2.5 at step 6"), "{text}");
        assert!(text.contains("a lower learning rate, or a longer warm-up; clip"), "{text}");
    }
}
