//! What moving a value and running an instruction cost: seconds, in closed form.

use phalanx_ir::ops::CollectiveKind;

use crate::lay::State;

/// What the partitioner weighs where annotations leave a choice.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Costs {
    /// FLOPs that a rank does in a second.
    pub flops_per_s: f64,
    /// Bytes that a rank sends in a second.
    pub bytes_per_s: f64,
    /// Bytes that a rank reads or writes in its own memory in a second.
    pub memory_bytes_per_s: f64,
    /// Seconds before the first byte of a message arrives.
    pub latency_s: f64,
    /// The most bytes per rank that a segment's parameters and the values kept for its backward may
    /// take.
    pub memory_limit: Option<usize>,
}

impl Default for Costs {
    /// A recent accelerator with a fast link to its neighbours. Only the ratios matter.
    fn default() -> Self {
        Self {
            flops_per_s: 300e12,
            bytes_per_s: 100e9,
            memory_bytes_per_s: 2e12,
            latency_s: 5e-6,
            memory_limit: None,
        }
    }
}

impl Costs {
    /// Seconds of a collective over `n` ranks, each of which holds `bytes` before it. Moves within a
    /// rank cost next to nothing, but not nothing: of two ways, the one with fewer is taken.
    pub(crate) fn collective(&self, kind: &CollectiveKind, n: usize, bytes: f64) -> f64 {
        let n = n as f64;
        let (rounds, volume) = match kind {
            CollectiveKind::AllGather { .. } => (1.0, n - 1.0),
            CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll { .. } => {
                (1.0, (n - 1.0) / n)
            }
            CollectiveKind::AllReduce => (2.0, 2.0 * (n - 1.0) / n),
            CollectiveKind::Permute { .. } => (1.0, 1.0),
            _ => return 1e-3 * self.latency_s,
        };
        rounds * self.latency_s + volume * bytes / self.bytes_per_s
    }

    /// Seconds to take a value from one state to another over one axis of `n` ranks; `bytes` is what
    /// a rank would hold if the axis replicated it.
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

    /// Seconds that the backward pays for a reader: the cotangent that it gives, in the state
    /// `back`, goes to where the value began. A slice is gathered there, what was gathered is summed
    /// and scattered, and a sum costs nothing again unless readers give partial cotangents.
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
        let costs = Costs { latency_s: 0.0, bytes_per_s: 1.0, ..Costs::default() };
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
