//! The kinds of context parallelism, and how they deal positions to ranks.

use super::parallel::ParallelConfig;
use super::setting::choice;
use super::values::Values;
use phalanx_error::Problem;
use phalanx_ir::ops::AttentionKind;

choice! {
    /// How attention sees the whole sequence.
    pub enum CpKind {
        /// Heads are exchanged for positions.
        Ulysses = "ulysses",
        /// Keys and values are gathered.
        AllGather = "allgather",
        /// Keys and values are passed around a ring.
        Ring = "ring",
        /// Ring self-attention with stored scores.
        Rsa = "rsa",
    }
}

choice! {
    /// How positions are distributed to ranks.
    pub enum CpOrder {
        /// One block after the other.
        Block = "block",
        /// Of twice as many blocks as ranks, the i-th and the i-th from the end.
        Zigzag = "zigzag",
        /// One by one.
        Striped = "striped",
    }
}

impl CpKind {
    /// How positions are distributed by default.
    pub(super) fn usual_order(self) -> CpOrder {
        match self {
            CpKind::Ring => CpOrder::Zigzag,
            CpKind::Ulysses | CpKind::AllGather | CpKind::Rsa => CpOrder::Block,
        }
    }

    /// The attention that it is meant for.
    pub(super) fn usual_attention(self) -> AttentionKind {
        match self {
            CpKind::Rsa => AttentionKind::Materialised,
            CpKind::Ulysses | CpKind::AllGather | CpKind::Ring => AttentionKind::Flash,
        }
    }
}

impl ParallelConfig {
    /// Refuses orders that a kind of context parallelism cannot deal.
    pub(super) fn check_cp_kind(&self, values: &mut Values) {
        let (kind, order) = (self.cp_kind.name(), self.cp_order.name());
        let any = matches!(self.cp_kind, CpKind::Ring | CpKind::AllGather);
        let distributed = any || self.cp_order == CpOrder::Block;
        values.rule(&["parallel.cp_order", "parallel.cp_kind"], distributed, || {
            Problem::new(format!(
                "parallel.cp_order = \"{order}\" does not work with parallel.cp_kind = \"{kind}\""
            ))
            .because("its exchanges take blocks of neighbours")
            .nearest(
                "parallel.cp_kind = \"ring\" or \"allgather\", or parallel.cp_order = \"block\"",
            )
        });
    }
}
