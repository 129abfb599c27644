//! When weights are updated, and which version of them a run reads: the rule of pipelines that never wait for
//! their gradients.
//!
//! Micro-batches are counted through a script, and so are updates: every `round` micro-batches make one. Version 0 is
//! what the weights are before the script, version u is what its update u makes, and version −a is what they were
//! a updates before. A micro-batch of update u (counted from 0) reads version u − delay for its forward
//! and its backward alike. With a delay of 0 that is training without any; with other delays the gradient belongs
//! to older weights than those that it is applied to.
//!
//! Where several holders of a stage take micro-batches in turn, one update of the stage takes a round from each of them,
//! and applies the mean: the stage has fewer updates than others, and its delay counts its own. If a micro-batch is to read on every
//! stage what the same earlier ones made, stages change the version that they read together, when all of them have updated: until then a
//! stage with fewer holders makes versions that nobody reads.

/// How often weights are updated, and how old those are that runs read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Updates {
    /// Micro-batches of a step.
    pub step: usize,
    /// Micro-batches whose gradients are summed before they are applied; whole rounds make a step.
    pub round: usize,
    /// How many updates are not yet in the weights that are read: by stage in a schedule, by instance in scripts.
    pub delays: Vec<usize>,
    /// The rounds whose mean one update takes, by the same: as many as holders take them in turn.
    pub holders: Vec<usize>,
    /// After how many rounds readers go on to a newer version: 1 if after each update of their stage; a multiple of all
    /// holders if together with the readers of all other stages.
    pub together: usize,
}

impl Updates {
    /// The rule in which each stage has one holder.
    pub fn new(step: usize, round: usize, delays: Vec<usize>) -> Self {
        Self { step, round, holders: vec![1; delays.len()], delays, together: 1 }
    }

    /// The round that a micro-batch belongs to, counted from 0.
    pub fn round_of(&self, microbatch: usize) -> usize {
        microbatch / self.round
    }

    /// The update of a stage or an instance that a micro-batch contributes to, counted from 0.
    pub fn of(&self, index: usize, microbatch: usize) -> usize {
        self.round_of(microbatch) / self.holders[index]
    }

    /// The version that a stage or an instance reads for a micro-batch.
    pub fn version(&self, index: usize, microbatch: usize) -> i64 {
        self.timing(index).version(self.of(index, microbatch))
    }

    /// How many older versions than the newest a stage or an instance keeps at most.
    pub fn older(&self, index: usize) -> usize {
        self.timing(index).older()
    }

    pub(crate) fn timing(&self, index: usize) -> UnitTiming {
        let holders = self.holders[index];
        UnitTiming { delay: self.delays[index], holders, each: (self.together / holders).max(1) }
    }

    /// The micro-batches that one update of a stage or an instance takes.
    pub fn taken_by(&self, index: usize) -> usize {
        self.round * self.holders[index]
    }

    /// Rounds of a step: what has one holder is updated as often.
    pub fn per_step(&self) -> usize {
        self.step / self.round
    }

    /// The same rule, where each of these is what an index of this one was.
    pub fn over(&self, indices: &[usize]) -> Self {
        let of = |all: &[usize]| indices.iter().map(|index| all[*index]).collect();
        Self { delays: of(&self.delays), holders: of(&self.holders), ..*self }
    }
}

/// When a unit is updated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct UnitTiming {
    /// How many updates late its readers are.
    pub(crate) delay: usize,
    /// The rounds whose mean an update takes.
    pub(crate) holders: usize,
    /// After how many updates its readers go on to a newer version.
    pub(crate) each: usize,
}

impl UnitTiming {
    /// Of a unit that is updated once, when nobody reads it any more.
    pub(crate) const AT_ONCE: UnitTiming = UnitTiming { delay: 0, holders: 1, each: 1 };

    /// The version that is read for a micro-batch of an update.
    pub(crate) fn version(self, update: usize) -> i64 {
        (update - update % self.each) as i64 - self.delay as i64
    }

    /// How many older versions than the newest are kept at most.
    pub(crate) fn older(self) -> usize {
        self.delay + self.each - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sheet's rule of PipeDream-2BW: batch n reads W(n − 1), and the first two batches read the same weights
    /// because a run starts with both versions equal.
    #[test]
    fn a_batch_reads_the_weights_of_the_batch_before() {
        let updates = Updates::new(4, 4, vec![1, 1]);
        let read: Vec<i64> = (0..12).map(|microbatch| updates.version(0, microbatch)).collect();
        assert_eq!(read, [-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(updates.per_step(), 1);
    }

    /// PipeDream's: stage k of n is n − k updates late.
    #[test]
    fn a_stage_is_as_late_as_stages_follow_it() {
        let updates = Updates::new(3, 1, vec![2, 1, 0]);
        let of = |stage: usize| -> Vec<i64> { (0..3).map(|m| updates.version(stage, m)).collect() };
        assert_eq!([of(0), of(1), of(2)], [[-2, -1, 0], [-1, 0, 1], [0, 1, 2]]);
        assert_eq!(updates.per_step(), 3);
    }

    /// Two holders of the first stage take micro-batches in turn: both update once for two of them.
    #[test]
    fn an_update_takes_a_round_of_every_holder() {
        let updates = Updates { holders: vec![2, 1], ..Updates::new(4, 1, vec![2, 0]) };
        let of = |stage: usize| -> Vec<(usize, i64)> {
            (0..4).map(|m| (updates.of(stage, m), updates.version(stage, m))).collect()
        };
        assert_eq!(of(0), [(0, -2), (0, -2), (1, -1), (1, -1)]);
        assert_eq!(of(1), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        let together = Updates { together: 2, ..updates.clone() };
        let of =
            |stage: usize| -> Vec<i64> { (0..4).map(|m| together.version(stage, m)).collect() };
        assert_eq!([of(0), of(1)], [[-2, -2, -1, -1], [0, 0, 2, 2]]);
        assert_eq!([together.older(0), together.older(1)], [2, 1]);
        let instances = updates.over(&[0, 0, 1]);
        assert_eq!((instances.delays, instances.holders), (vec![2, 2, 0], vec![2, 2, 1]));
    }
}
