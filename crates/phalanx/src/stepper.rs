//! The second level: a training loop of one's own.

use phalanx_error::Result;
use phalanx_session::StepResult;

use crate::mistake::{Mistake, check_rate};
use crate::table::{Rows, Table};
use crate::training::Training;
use crate::words::in_own_words;

/// For those who write their own training loop: [`forward`](Self::forward),
/// [`backward`](Self::backward) and [`step`](Self::step), under every strategy and schedule.
///
/// Each micro-batch goes through `forward`, which gives its loss, and `backward`, which asks for its
/// gradient. `step` updates the weights at the accumulation boundary: when as many micro-batches
/// went through `backward` as [`Trainer::microbatches`](crate::Trainer::microbatches) says. Before
/// that it changes nothing and returns `None`, so it may be called after every micro-batch.
///
/// # What runs when
///
/// A step of Phalanx is one planned script over all its micro-batches, on all ranks: that is how
/// pipelines overlap them and how gradients are reduced while others are still computed. So
///
/// - `forward` runs the forward of this one micro-batch, with the present weights and without
///   dropout, and returns its loss;
/// - `backward` only marks the micro-batch as part of the step;
/// - `step` at the boundary runs the whole script: forward and backward of all marked micro-batches
///   (with dropout), reduction, clipping and update.
///
/// Every micro-batch is therefore run forward twice. If you don't need its loss before the step,
/// [`Stepper::add`] marks it without that.
///
/// ```
/// use phalanx::{Ddp, Mlp, Optimizer, Table, Trainer};
///
/// let x: Vec<f32> = (0..32).map(|i| i as f32 / 16.0 - 1.0).collect();
/// let mut stepper = Trainer::new(Mlp::regression(1, [16], 1))
///     .batch(32)
///     .microbatches(4) // of 8 samples
///     .optimizer(Optimizer::sgd(0.9))
///     .mesh("dp=2")
///     .strategy(Ddp::default())
///     .threads(1)
///     .stepper()?;
/// let mut updates = Vec::new();
/// for (number, part) in x.chunks(8).cycle().take(400).enumerate() {
///     let y = part.iter().map(|x| x * x).collect();
///     let batch = Table::new(8).input("x", part.to_vec()).target("y", y);
///     let loss = stepper.forward(&batch)?;
///     assert!(loss.is_finite());
///     stepper.backward()?;
///     if let Some(update) = stepper.step(0.05)? {
///         assert_eq!((number + 1) % 4, 0); // every fourth micro-batch
///         updates.push(update.loss);
///     }
/// }
/// assert_eq!(updates.len(), 100);
/// assert!(updates[99] < 0.1 * updates[0]);
/// // Everything else is there too: weights by name, evaluation, saving.
/// assert_eq!(stepper.training().param("layers.0.weight")?.shape, [1, 16]);
/// # Ok::<(), phalanx::Error>(())
/// ```
pub struct Stepper<'a> {
    training: Training<'a>,
    /// The micro-batch of the last forward, until it is marked.
    last: Option<Table>,
    /// The micro-batches of the next step.
    marked: Vec<Table>,
    /// Samples of all steps so far.
    samples: u64,
}

impl<'a> Stepper<'a> {
    pub(crate) fn new(training: Training<'a>) -> Self {
        Self { training, last: None, marked: Vec::new(), samples: 0 }
    }

    /// The mean loss of one micro-batch with the present weights. The table has as many samples as
    /// a micro-batch: [`Trainer::batch`](crate::Trainer::batch) ÷
    /// [`Trainer::microbatches`](crate::Trainer::microbatches).
    pub fn forward(&mut self, microbatch: &Table) -> Result<f64> {
        self.training.check_microbatch(microbatch)?;
        let loss = self.training.loss(microbatch)?;
        self.last = Some(microbatch.clone());
        Ok(loss)
    }

    /// Adds the micro-batch of the last [`forward`](Self::forward) to the next step.
    pub fn backward(&mut self) -> Result<()> {
        let Some(last) = self.last.take() else { return Err(Mistake::NoForward.into()) };
        self.add(&last)
    }

    /// Adds a micro-batch to the next step without computing its loss first.
    pub fn add(&mut self, microbatch: &Table) -> Result<()> {
        self.training.check_microbatch(microbatch)?;
        let microbatches = self.training.microbatches();
        if self.marked.len() == microbatches {
            return Err(Mistake::StepIsDue { microbatches }.into());
        }
        self.marked.push(microbatch.clone());
        Ok(())
    }

    /// At the accumulation boundary: updates the weights with this learning rate, and gives the mean
    /// loss before the update and the gradient norm before clipping. Otherwise nothing happens, and
    /// the result is `None`.
    pub fn step(&mut self, lr: f64) -> Result<Option<StepResult>> {
        check_rate(self.training.steps() + 1, lr)?;
        if self.marked.len() < self.training.microbatches() {
            return Ok(None);
        }
        let mut rows = Rows::new(&self.marked[0]);
        for table in &self.marked {
            (0..table.samples()).for_each(|row| rows.push(table, row));
        }
        let (first, session) = (self.samples, &mut self.training.session);
        let count = rows.count().max(1);
        let taken = rows.with(first, count, |data| session.step(data, lr)).map_err(in_own_words)?;
        self.samples += self.marked.iter().map(|table| table.samples() as u64).sum::<u64>();
        self.marked.clear();
        Ok(Some(taken))
    }

    /// How many micro-batches wait for the next step.
    pub fn waiting(&self) -> usize {
        self.marked.len()
    }

    /// The training: parameters by name, evaluation, predictions, loading and saving.
    pub fn training(&mut self) -> &mut Training<'a> {
        &mut self.training
    }
}
