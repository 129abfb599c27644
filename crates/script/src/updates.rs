//! When weights are updated, and which version of them a run reads: the rule of pipelines that never wait for
//! their gradients.
//!
//! Micro-batches are counted through a script, and so are updates: every `round` micro-batches make one. Version 0 is
//! what the weights are before the script, version u is what its update u makes, and version −a is what they were
//! a updates before. A micro-batch of update u (counted from 0) reads version u − delay for its forward
//! and its backward alike. With a delay of 0 that is training without any; with other delays the gradient belongs
//! to older weights than those that it is applied to.

/// How often weights are updated, and how old those are that runs read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Updates {
    /// Micro-batches of a step.
    pub step: usize,
    /// Micro-batches whose gradients one update takes; whole rounds make a step.
    pub round: usize,
    /// How many updates are not yet in the weights that are read: by stage in a schedule, by instance in scripts.
    pub delays: Vec<usize>,
}

impl Updates {
    /// The update that a micro-batch contributes to, counted from 0.
    pub fn of(&self, microbatch: usize) -> usize {
        microbatch / self.round
    }

    /// The version that a stage or an instance reads for a micro-batch.
    pub fn version(&self, index: usize, microbatch: usize) -> i64 {
        self.of(microbatch) as i64 - self.delays[index] as i64
    }

    /// Updates of a step.
    pub fn per_step(&self) -> usize {
        self.step / self.round
    }

    /// The same rule with other delays.
    pub fn with_delays(&self, delays: Vec<usize>) -> Self {
        Self { delays, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sheet's rule of PipeDream-2BW: batch n reads W(n − 1), and the first two batches read the same weights
    /// because a run starts with both versions equal.
    #[test]
    fn a_batch_reads_the_weights_of_the_batch_before() {
        let updates = Updates { step: 4, round: 4, delays: vec![1, 1] };
        let read: Vec<i64> = (0..12).map(|microbatch| updates.version(0, microbatch)).collect();
        assert_eq!(read, [-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(updates.per_step(), 1);
    }

    /// PipeDream's: stage k of n is n − k updates late.
    #[test]
    fn a_stage_is_as_late_as_stages_follow_it() {
        let updates = Updates { step: 3, round: 1, delays: vec![2, 1, 0] };
        let of = |stage: usize| -> Vec<i64> { (0..3).map(|m| updates.version(stage, m)).collect() };
        assert_eq!([of(0), of(1), of(2)], [[-2, -1, 0], [-1, 0, 1], [0, 1, 2]]);
        assert_eq!(updates.per_step(), 3);
    }
}
