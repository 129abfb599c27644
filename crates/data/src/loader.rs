//! Batches, prepared ahead of time on a separate thread.
//!
//! The loader's only state is one number, how many samples it has given out: a batch is a pure
//! function of that number and the settings, so a loader that starts there gives the same bits as
//! one that ran there. A fixed set of buffers circulates between the two threads: one is with the
//! consumer, the others are being filled or wait; after the first round nothing is allocated.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::images::normalised;
use crate::queue::Queue;
use crate::sampling::setting;
use crate::{
    Corpus, DEFAULT_VAL_FRACTION, DataError, Images, Permutation, Sampler, Samples, Split,
};

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
    /// So many targets of each sample, from the first, are ignored: those of tokens that a model reads and does
    /// not predict.
    pub unpredicted: usize,
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
            unpredicted: 0,
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

/// One step's data: `batch_size` rows of `seq_len` tokens, row after row, or as many images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// How many whole batches lie before this one.
    pub step: u64,
    /// The global index of the first row's sample.
    pub first_sample: u64,
    /// The inputs; none if there are images.
    pub ids: Vec<i32>,
    /// The images, row after row, with zero mean; none if there are tokens.
    pub pixels: Vec<f32>,
    /// For each input the token that follows it, or [`IGNORED`]; for each image its class.
    pub targets: Vec<i32>,
    /// How many targets count: what the summed loss is divided by.
    pub valid_tokens: u64,
}

/// Gives out batches; a separate thread prepares the next ones meanwhile.
#[derive(Debug)]
pub struct Loader {
    batch_size: u64,
    /// How many samples its part has.
    samples: u64,
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
        Self::of(&Samples::Tokens(corpus), config, start)
    }

    /// The same of any samples.
    pub fn of(of: &Samples, config: LoaderConfig, start: u64) -> Result<Self, DataError> {
        config.check()?;
        let maker: Box<dyn Maker> = match of {
            Samples::Tokens(corpus) => {
                let corpus = Arc::clone(corpus);
                let sampler =
                    Sampler::new(&*corpus, config.seed, config.seq_len, config.val_fraction)?;
                let row = vec![0; config.seq_len + 1];
                Box::new(Plan { sampler, config: config.clone(), corpus, row })
            }
            Samples::Images(images) => {
                let [height, width] = images.size();
                let (images, image) = (Arc::clone(images), vec![0; height * width]);
                Box::new(ImagePlan { images, config: config.clone(), image })
            }
        };
        let lines = Arc::new(Queues::new(config.prefetch));
        for _ in 0..config.prefetch {
            lines.free.push(maker.buffer());
        }
        let (current, samples) = (maker.buffer(), maker.samples());
        let batch_size = config.batch_size as u64;
        let worker = Worker { maker, batch_size, next: start, lines: Arc::clone(&lines) };
        let thread = std::thread::Builder::new()
            .name("loader".into())
            .spawn(move || worker.run())
            .map_err(|error| DataError::Thread { reason: error.to_string() })?;
        Ok(Self { batch_size, samples, counter: start, current, lines, thread: Some(thread) })
    }

    /// The next batch; it stays valid until the next call.
    pub fn next_batch(&mut self) -> Result<&Batch, DataError> {
        let batch = self.lines.ready.pop().ok_or_else(|| DataError::Stopped {
            sample: self.counter,
            reason: "it ended after an error or a panic that was reported before".into(),
        })??;
        self.lines.free.push(std::mem::replace(&mut self.current, batch));
        self.counter += self.batch_size;
        Ok(&self.current)
    }

    /// How many samples have been given out: this is all that is needed to resume.
    pub fn state(&self) -> u64 {
        self.counter
    }

    /// How many batches take every sample of the split once; the last may repeat some (training) or
    /// be padded with ignored rows (evaluation).
    pub fn batches_per_pass(&self) -> u64 {
        self.samples.div_ceil(self.batch_size)
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
trait Maker: Send {
    /// Room for a batch.
    fn buffer(&self) -> Batch;

    /// How many samples there are.
    fn samples(&self) -> u64;

    /// Makes `batch` the one that starts at sample `first`.
    fn fill(&mut self, first: u64, batch: &mut Batch) -> Result<(), DataError>;
}

/// Batches of images.
struct ImagePlan {
    images: Arc<dyn Images>,
    config: LoaderConfig,
    /// Room for one image.
    image: Vec<u8>,
}

impl ImagePlan {
    /// The image that is sample `global`, and whether it counts, as in [`Plan::place`].
    fn place(&self, global: u64) -> (u64, bool) {
        let samples = self.samples();
        match self.config.split {
            Split::Train => {
                let order = Permutation::new(self.config.seed, global / samples, samples);
                (order.at(global % samples), true)
            }
            Split::Validation => {
                let index = global % samples.next_multiple_of(self.config.batch_size as u64);
                (index % samples, index < samples)
            }
        }
    }
}

impl Maker for ImagePlan {
    fn buffer(&self) -> Batch {
        let images = self.config.batch_size;
        let pixels = vec![0.0; images * self.image.len()];
        Batch { pixels, targets: vec![IGNORED; images], ..Batch::default() }
    }

    fn samples(&self) -> u64 {
        self.images.samples(self.config.split)
    }

    fn fill(&mut self, first: u64, batch: &mut Batch) -> Result<(), DataError> {
        batch.step = first / self.config.batch_size as u64;
        batch.first_sample = first;
        let rows = batch.pixels.chunks_exact_mut(self.image.len()).zip(&mut batch.targets);
        for (sample, (pixels, target)) in (first..).zip(rows) {
            let (index, counts) = self.place(sample);
            let class = self.images.read(self.config.split, index, &mut self.image)?;
            *target = if counts { i32::from(class) } else { IGNORED };
            for (to, &from) in pixels.iter_mut().zip(&self.image) {
                *to = normalised(from);
            }
        }
        batch.valid_tokens = batch.targets.iter().filter(|&&t| t != IGNORED).count() as u64;
        Ok(())
    }
}

/// Batches of tokens.
struct Plan {
    sampler: Sampler,
    config: LoaderConfig,
    corpus: Arc<dyn Corpus>,
    /// Room for one sample.
    row: Vec<i32>,
}

impl Plan {
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
}

impl Maker for Plan {
    fn buffer(&self) -> Batch {
        let tokens = self.config.batch_size * self.config.seq_len;
        Batch { ids: vec![0; tokens], targets: vec![IGNORED; tokens], ..Batch::default() }
    }

    fn samples(&self) -> u64 {
        self.sampler.samples(self.config.split)
    }

    fn fill(&mut self, first: u64, batch: &mut Batch) -> Result<(), DataError> {
        let length = self.config.seq_len;
        batch.step = first / self.config.batch_size as u64;
        batch.first_sample = first;
        let rows = batch.ids.chunks_exact_mut(length).zip(batch.targets.chunks_exact_mut(length));
        for (sample, (ids, targets)) in (first..).zip(rows) {
            let (start, counts) = self.place(sample);
            self.corpus.read(start, &mut self.row)?;
            ids.copy_from_slice(&self.row[..length]);
            for (at, (target, &token)) in targets.iter_mut().zip(&self.row[1..]).enumerate() {
                let predicted = counts && at >= self.config.unpredicted;
                let ignored = !predicted || Some(token) == self.config.ignore_token;
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
    maker: Box<dyn Maker>,
    batch_size: u64,
    next: u64,
    lines: Arc<Queues>,
}

impl Worker {
    fn run(mut self) {
        while let Some(mut batch) = self.lines.free.pop() {
            let outcome = self.maker.fill(self.next, &mut batch);
            self.next += self.batch_size;
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
