//! `[train]`: steps and batches.

use super::Config;
use super::key::section;
use super::model::assignments;
use super::setting::{Count, words};
use super::values::Values;
use phalanx_error::Problem;

section! {
    /// `[train]`: steps, batch and sequence, recomputation, evaluation.
    pub struct TrainConfig in "train" () {
        /// Optimizer steps.
        steps: Count = "200"; aka "train_iters" "max_steps" "num_steps" "training_steps" "iterations",
        /// Sequences per step over all ranks, whatever the layout.
        batch_size: Count = "32";
            aka "global_batch_size" "train_batch_size" "batch" "global_bs",
        /// Micro-batches that each rank's share of the batch is divided into, for gradient
        /// accumulation and pipelines.
        microbatches: Count = "1";
            aka "gradient_accumulation_steps" "num_microbatches" "grad_accum" "accumulation_steps",
        /// Tokens per sequence. If not set, at most model.context.
        seq_len: Count = "128";
            aka "seq_length" "sequence_length" "max_seq_length" "encoder_seq_length" "T",
        /// What the backward pass computes again instead of keeping it. full: everything, from
        /// each block's input. stage: everything, from the input of a pipeline's stage. selective:
        /// the probabilities of a materialised attention; flash attention keeps none, so with it
        /// selective changes nothing.
        recompute: RecomputeKind = "none";
            aka "recompute_granularity" "activation_checkpoint" "activation_checkpointing"
                "gradient_checkpointing",
        /// Steps between evaluations on held-out data; 0: never.
        eval_every: usize = "0"; aka "eval_interval" "validation_freq" "val_every" "eval_freq",
        /// Batches per evaluation.
        eval_batches: Count = "4"; aka "eval_iters" "validation_steps" "val_batches",
        /// Steps between printed step lines; the JSON output and metrics.jsonl have every step.
        log_every: Count = "10"; aka "log_interval" "log_freq" "steps_per_print" "print_every",
    }
}

/// What the backward pass computes again instead of keeping it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the setting's listing describes them")]
pub enum RecomputeKind {
    None,
    Selective,
    Full,
    Stage,
}

words!(RecomputeKind {
    None = "none",
    Selective = "selective",
    Full = "full",
    Stage = "stage",
});

impl RecomputeKind {
    /// What a segment's backward computes again.
    pub fn in_segments(self) -> phalanx_autodiff::Recompute {
        match self {
            // A stage that is recomputed keeps all values for the backward that follows.
            RecomputeKind::None | RecomputeKind::Stage => phalanx_autodiff::Recompute::None,
            RecomputeKind::Selective => phalanx_autodiff::Recompute::Selective,
            RecomputeKind::Full => phalanx_autodiff::Recompute::Full,
        }
    }
}

impl TrainConfig {
    /// Tokens per step over all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.batch_size.get() * self.seq_len.get()
    }

    /// Into how many parts a batch is cut: micro-batches of all data-parallel ranks.
    fn parts(&self, dp: Count) -> usize {
        dp.get().saturating_mul(self.microbatches.get())
    }

    pub(crate) fn check(&self, dp: Count, values: &mut Values) {
        let (batch, micro) = (self.batch_size.get(), self.microbatches.get());
        let parts = self.parts(dp);
        let keys = ["train.batch_size", "train.microbatches", "parallel.dp"];
        values.rule(&keys, batch % parts == 0, || {
            let mut near = vec![batch / parts * parts, batch.next_multiple_of(parts)];
            near.retain(|n| *n > 0);
            let each = match dp.get() {
                1 => String::new(),
                ranks => format!(" on each of parallel.dp = {ranks} ranks"),
            };
            if batch < parts {
                return few(batch, micro, dp.get());
            }
            Problem::new(format!(
                "train.batch_size = {batch} cannot be cut into train.microbatches = {micro} equal \
                 parts{each}"
            ))
            .because("batch_size = dp × microbatches × micro-batch, all whole numbers")
            .nearest(assignments("train.batch_size", &near))
        });
        let tokens = self.tokens_per_step();
        values.rule(&["train.batch_size", "train.seq_len"], tokens < 1 << 32, || {
            Problem::new(format!("a step would take {tokens} tokens"))
                .because("a step takes fewer than 2^32")
                .fix("lower train.batch_size or train.seq_len")
        });
    }
}

impl Config {
    /// The sequences of a micro-batch on a data-parallel rank, if they are whole: otherwise [`TrainConfig::check`] tells.
    pub(super) fn sequences(&self) -> Option<usize> {
        let (batch, parts) = (self.train.batch_size.get(), self.train.parts(self.parallel.dp));
        batch.is_multiple_of(parts).then(|| batch / parts)
    }

    /// The nearest batches, below and above, of whose micro-batches each is a multiple of so many sequences.
    pub(super) fn batches_of(&self, sequences: usize) -> Vec<usize> {
        let batch = self.train.batch_size.get();
        let each = self.train.parts(self.parallel.dp).saturating_mul(sequences);
        let mut near = vec![batch / each * each, batch.next_multiple_of(each)];
        near.retain(|n| *n > 0);
        near
    }
}

/// The problem with a batch that leaves ranks without work.
fn few(batch: usize, micro: usize, dp: usize) -> Problem {
    let work = Problem::new(match dp {
        1 => format!("train.batch_size = {batch} leaves some of {micro} micro-batches empty"),
        _ => format!(
            "parallel.dp = {dp} leaves some ranks without work: train.batch_size = {batch}, \
             train.microbatches = {micro}"
        ),
    });
    let mut near = vec![format!("train.batch_size = {}", dp * micro)];
    if dp > 1 && batch >= micro {
        near.push(format!("parallel.dp = {}", batch / micro));
    }
    if micro > 1 && batch >= dp {
        near.push(format!("train.microbatches = {}", batch / dp));
    }
    work.because("each data-parallel rank needs at least one sequence in each micro-batch")
        .nearest(near.join(", or "))
}
