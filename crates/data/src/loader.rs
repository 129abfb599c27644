//! Batches, prepared ahead of time on a separate thread.
//!
//! The loader's only state is one number, how many samples it has given out: a batch is a pure
//! function of that number and the settings, so a loader that starts there gives the same bits as
//! one that ran there. A fixed set of buffers circulates between the two threads: one is with the
//! consumer, the others are being filled or wait; after the first round nothing is allocated.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::queue::Queue;
use crate::sampling::setting;
use crate::{Corpus, DEFAULT_VAL_FRACTION, DataError, Sampler, Split};

/// A target with this value is ignored in the loss.
pub const IGNORED: i32 = -1;

/// What a loader gives out, and in which order.
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// Decides the order of the samples.
    pub seed: u64,
    /// Tokens per sample.
    pub seq_len: usize,
    /// Samples per batch, over all ranks.
    pub batch_size: usize,
    /// Into how many equal parts a batch is divided.
    pub microbatches: usize,
    /// Training or validation data.
    pub split: Split,
    /// The share of the samples held out for evaluation.
    pub val_fraction: f64,
    /// Targets equal to this token are ignored.
    pub ignore_token: Option<i32>,
    /// How many batches may be ready before they are asked for.
    pub prefetch: usize,
}

impl LoaderConfig {
    /// Default settings: training samples, one micro-batch, no masks.
    pub fn new(seed: u64, seq_len: usize, batch_size: usize) -> Self {
        Self {
            seed,
            seq_len,
            batch_size,
            microbatches: 1,
            split: Split::Train,
            val_fraction: DEFAULT_VAL_FRACTION,
            ignore_token: None,
            prefetch: 2,
        }
    }

    fn check(&self) -> Result<(), DataError> {
        let (batch, parts) = (self.batch_size, self.microbatches);
        if batch == 0 {
            return Err(setting("batch_size", batch, "a batch needs at least one sample"));
        }
        if parts == 0 || batch % parts != 0 {
            let remedy = format!("it must divide batch_size = {batch} into equal parts");
            return Err(setting("microbatches", parts, remedy));
        }
        if self.prefetch == 0 {
            return Err(setting("prefetch", 0, "at least one batch must be made ahead"));
        }
        Ok(())
    }
}

/// One step's data: `batch_size` rows of `seq_len` tokens, row after row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// How many whole batches lie before this one.
    pub step: u64,
    /// The global index of the first row's sample.
    pub first_sample: u64,
    /// The inputs.
    pub ids: Vec<i32>,
    /// For each input the token that follows it, or [`IGNORED`].
    pub targets: Vec<i32>,
    /// How many targets count: what the summed loss is divided by.
    pub valid_tokens: u64,
}

/// Gives out batches; a separate thread prepares the next ones meanwhile.
#[derive(Debug)]
pub struct Loader {
    plan: Plan,
    counter: u64,
    current: Batch,
    lines: Arc<Queues>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// A loader that starts after `start` samples.
    pub fn new(
        corpus: Arc<dyn Corpus>,
        config: LoaderConfig,
        start: u64,
    ) -> Result<Self, DataError> {
        config.check()?;
        let sampler = Sampler::new(&*corpus, config.seed, config.seq_len, config.val_fraction)?;
        let plan = Plan { sampler, config };
        let lines = Arc::new(Queues::new(plan.config.prefetch));
        for _ in 0..plan.config.prefetch {
            lines.free.push(plan.buffer());
        }
        let worker = Worker { plan: plan.clone(), corpus, next: start, lines: Arc::clone(&lines) };
        let thread = std::thread::Builder::new()
            .name("loader".into())
            .spawn(move || worker.run())
            .map_err(|error| DataError::Thread { reason: error.to_string() })?;
        Ok(Self { current: plan.buffer(), plan, counter: start, lines, thread: Some(thread) })
    }

    /// The next batch; it stays valid until the next call.
    pub fn next_batch(&mut self) -> Result<&Batch, DataError> {
        let batch = self.lines.ready.pop().ok_or_else(|| DataError::Stopped {
            sample: self.counter,
            reason: "it ended after an error or a panic that was reported before".into(),
        })??;
        self.lines.free.push(std::mem::replace(&mut self.current, batch));
        self.counter += self.plan.config.batch_size as u64;
        Ok(&self.current)
    }

    /// How many samples have been given out: this is all that is needed to resume.
    pub fn state(&self) -> u64 {
        self.counter
    }

    /// How many batches take every sample of the split once; the last may repeat some (training) or
    /// be padded with ignored rows (evaluation).
    pub fn batches_per_pass(&self) -> u64 {
        let samples = self.plan.sampler.samples(self.plan.config.split);
        samples.div_ceil(self.plan.config.batch_size as u64)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // The thread ends at its next look for a free buffer.
        self.lines.close();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported where it happened.
            let _ = thread.join();
        }
    }
}

/// The two queues of buffers: empty ones to the worker, full ones to the consumer.
#[derive(Debug)]
struct Queues {
    free: Queue<Batch>,
    ready: Queue<Result<Batch, DataError>>,
}

impl Queues {
    /// Queues with room for all buffers, including the consumer's.
    fn new(prefetch: usize) -> Self {
        Self { free: Queue::new(prefetch + 1), ready: Queue::new(prefetch + 1) }
    }

    /// Closes both: no empty buffer is filled any more; full ones can still be taken.
    fn close(&self) {
        self.free.abandon();
        self.ready.close();
    }
}

/// Everything that decides what a batch holds.
#[derive(Clone, Debug)]
struct Plan {
    sampler: Sampler,
    config: LoaderConfig,
}

impl Plan {
    fn buffer(&self) -> Batch {
        let tokens = self.config.batch_size * self.config.seq_len;
        Batch { ids: vec![0; tokens], targets: vec![IGNORED; tokens], ..Batch::default() }
    }

    /// Where sample `global` starts, and whether it counts. The rows that fill up the last batch
    /// of an evaluation pass do not: every held-out sample counts exactly once per pass.
    fn place(&self, global: u64) -> (u64, bool) {
        match self.config.split {
            Split::Train => {
                let (epoch, index) = self.sampler.epoch(global);
                (self.sampler.train_start(epoch, index), true)
            }
            Split::Validation => {
                let samples = self.sampler.samples(Split::Validation);
                let index = global % samples.next_multiple_of(self.config.batch_size as u64);
                (self.sampler.validation_start(index), index < samples)
            }
        }
    }

    /// Makes `batch` the one that starts at sample `first`; `row` has room for one sample.
    fn fill(
        &self,
        corpus: &dyn Corpus,
        first: u64,
        row: &mut [i32],
        batch: &mut Batch,
    ) -> Result<(), DataError> {
        let length = self.config.seq_len;
        batch.step = first / self.config.batch_size as u64;
        batch.first_sample = first;
        let rows = batch.ids.chunks_exact_mut(length).zip(batch.targets.chunks_exact_mut(length));
        for (sample, (ids, targets)) in (first..).zip(rows) {
            let (start, counts) = self.place(sample);
            corpus.read(start, row)?;
            ids.copy_from_slice(&row[..length]);
            for (target, &token) in targets.iter_mut().zip(&row[1..]) {
                let ignored = !counts || Some(token) == self.config.ignore_token;
                *target = if ignored { IGNORED } else { token };
            }
        }
        let valid = batch.targets.iter().filter(|&&target| target != IGNORED).count();
        batch.valid_tokens = valid as u64;
        match self.config.ignore_token {
            Some(token) if valid == 0 => Err(DataError::NothingToPredict {
                first,
                end: first + self.config.batch_size as u64,
                token,
            }),
            _ => Ok(()),
        }
    }
}

/// The loading thread.
struct Worker {
    plan: Plan,
    corpus: Arc<dyn Corpus>,
    next: u64,
    lines: Arc<Queues>,
}

impl Worker {
    fn run(mut self) {
        let mut row = vec![0; self.plan.config.seq_len + 1];
        while let Some(mut batch) = self.lines.free.pop() {
            let outcome = self.plan.fill(&*self.corpus, self.next, &mut row, &mut batch);
            self.next += self.plan.config.batch_size as u64;
            let failed = outcome.is_err();
            self.lines.ready.push(outcome.map(|()| batch));
            if failed {
                return;
            }
        }
    }
}

impl Drop for Worker {
    /// Also when a corpus panics: the consumer must not wait for a batch that never comes.
    fn drop(&mut self) {
        self.lines.close();
    }
}
