//! Costs of moves between states of a value, used where annotations leave a choice.

use phalanx_cost::{Hardware, Transfer};
use phalanx_ir::ops::CollectiveKind;

use crate::mask::State;

/// What the partitioner minimises where annotations leave a choice.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Costs {
    /// What the ranks run on.
    pub hardware: Hardware,
    /// The most bytes per rank that a segment's parameters and the values kept for its backward may
    /// take.
    pub memory_limit: Option<usize>,
}

impl Costs {
    /// Seconds of a collective over `n` ranks, each of which holds `bytes` before it. Moves within
    /// a rank cost almost nothing, but not zero, so that fewer moves are preferred.
    pub(crate) fn collective(&self, kind: &CollectiveKind, n: usize, bytes: f64) -> f64 {
        match kind {
            CollectiveKind::Shard { .. } | CollectiveKind::ToPartial | CollectiveKind::Done => {
                1e-3 * self.hardware.latency_s
            }
            _ => self.hardware.transfer_seconds(Transfer::collective(kind, n, bytes)),
        }
    }

    /// Seconds to bring a value from one state to another over one axis of `n` ranks; `bytes` is
    /// what a rank would hold if the axis replicated it.
    pub(crate) fn step(&self, from: State, to: State, n: usize, bytes: f64) -> f64 {
        let shard = bytes / n as f64;
        let cost = |kind, bytes| self.collective(&kind, n, bytes);
        match (from, to) {
            _ if from == to => 0.0,
            (State::Replicated, _) => cost(CollectiveKind::Shard { dim: 0 }, bytes),
            (State::Partial, State::Replicated) => cost(CollectiveKind::AllReduce, bytes),
            (State::Partial, _) => cost(CollectiveKind::ReduceScatter { dim: 0 }, bytes),
            (State::Sharded(_), State::Sharded(_)) => {
                cost(CollectiveKind::AllToAll { from: 0, to: 1 }, shard)
            }
            (State::Sharded(_), _) => cost(CollectiveKind::AllGather { dim: 0 }, shard),
        }
    }

    /// Seconds that a reader costs in the backward: its cotangent, in the state `back`, must get
    /// the state that the value started with. The backward of a slice is a gather, that of a gather
    /// is a reduce-scatter, and that of a sum is free unless readers give partial cotangents.
    pub(crate) fn returns(&self, from: State, back: State, n: usize, bytes: f64) -> f64 {
        let end = if from == State::Partial { State::Replicated } else { from };
        self.step(back, end, n, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_costs_its_gather_and_a_gather_its_reduction() {
        let hardware = Hardware { latency_s: 0.0, link_bytes_per_s: 1.0, ..Hardware::default() };
        let costs = Costs { hardware, memory_limit: None };
        let (r, p, s) = (State::Replicated, State::Partial, State::Sharded(0));
        // 4 ranks, 8 bytes: a gather or a reduce-scatter moves 6, an all-reduce 12.
        assert_eq!(costs.step(s, r, 4, 8.0), 6.0);
        assert_eq!(costs.step(p, s, 4, 8.0), 6.0);
        assert_eq!(costs.step(p, r, 4, 8.0), 12.0);
        assert_eq!(costs.step(s, State::Sharded(1), 4, 8.0), 1.5);
        // The backward of a slice, of a gather that sharded or repeated work follows, of a sum, of
        // no move before sharded work, and of a reduce-scatter.
        assert_eq!(costs.returns(r, s, 4, 8.0), 6.0);
        assert_eq!(costs.returns(s, p, 4, 8.0), 6.0);
        assert_eq!(costs.returns(s, r, 4, 8.0), 0.0);
        assert_eq!(costs.returns(p, r, 4, 8.0), 0.0);
        assert_eq!(costs.returns(r, p, 4, 8.0), 12.0);
        assert_eq!(costs.returns(p, s, 4, 8.0), 6.0);
    }
}
