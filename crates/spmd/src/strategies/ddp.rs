//! Distributed data parallelism (Li et al., 2020): every rank keeps the whole model and a part of
//! the batch; gradients are summed in buckets while the backward still runs.
//!
//! Parameters are packed in the reverse of their order, which is about the order in which their
//! gradients complete. A bucket is closed once it holds 25 MiB, the one that is reduced first once
//! it holds 1 MiB, so that the first reduction starts early and the others are large. While
//! micro-batches accumulate nothing is sent; the last one's backward reduces.
//!
//! Memory per rank (w, g, k bytes of weight, gradient and optimizer state per parameter):
//! (w + g + k)Ψ. Sent per rank and step: 2Ψ(N−1)/N elements, whatever the accumulation.

use phalanx_ir::Mesh;

use super::{BatchParallel, Strategy};
use crate::annotate::Annotator;
use crate::error::SpmdError;
use crate::sharing::{Grouping, Sharing};

/// Shards the batch over an axis; gradients are summed in buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Ddp {
    /// The axis.
    pub axis: String,
    /// MiB of gradients after which a bucket is closed.
    pub bucket_mib: f64,
    /// The same for the bucket that is reduced first.
    pub first_bucket_mib: f64,
}

impl Default for Ddp {
    fn default() -> Self {
        Self { axis: "dp".to_owned(), bucket_mib: 25.0, first_bucket_mib: 1.0 }
    }
}

impl Strategy for Ddp {
    fn name(&self) -> &'static str {
        "DDP"
    }

    fn axes(&self) -> Option<Vec<&str>> {
        Some(vec![&self.axis])
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        BatchParallel { axis: self.axis.clone() }.annotate(ctx)
    }

    fn share(&self, _mesh: &Mesh, sharing: &mut Sharing) -> Result<(), SpmdError> {
        let bytes = |mib: f64| (mib * 1024.0 * 1024.0) as usize;
        let (first, cap) = (bytes(self.first_bucket_mib), bytes(self.bucket_mib));
        let mut own = Sharing::none();
        own.grouping = Grouping::Buckets { first: first.min(cap), cap };
        sharing.set(self.name(), own)
    }
}
