//! Replicas that train by themselves and take the mean of their weights from time to time: parallel SGD
//! with averaging (Zhang et al., 2016) and local SGD (Stich, 2019).
//!
//! Each replica is a world of its own, whose mesh has no data-parallel axis: no type claims that weights
//! agree. A second script averages, over the ranks that hold the same part of the model in all
//! replicas. Which steps end with it is a pure rule.

use std::borrow::Cow;

use phalanx_script::{Choice, Controller, Record, ScriptKey};

/// How many replicas there are, and when they take the mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Replicas {
    /// How many replicas.
    pub count: usize,
    /// Steps from one mean to the next; 0: none before the last step.
    pub every: u64,
    /// The first steps, each of which ends with a mean.
    pub warmup: u64,
    /// The last step, which ends with a mean.
    pub last: u64,
    /// Whether the mean is taken of the optimizer's state too, or only of weights.
    pub states: bool,
}

impl Replicas {
    /// The axis along which replicas lie.
    pub const AXIS: &str = "dp";

    /// Whether a step, counted from 1, ends with the mean.
    pub fn averages(&self, step: u64) -> bool {
        let since = step.saturating_sub(self.warmup);
        let due = self.every > 0 && since.is_multiple_of(self.every);
        step <= self.warmup || step == self.last || due
    }

    /// How often the steps of a whole run take the mean.
    pub fn averages_until_the_end(&self) -> u64 {
        (1..=self.last).filter(|step| self.averages(*step)).count() as u64
    }

    /// In a few words.
    pub fn describe(&self) -> String {
        let means = match (self.every, self.warmup) {
            (0, _) => "a mean at the end".to_owned(),
            (1, _) => "a mean after every step".to_owned(),
            (every, 0) => format!("a mean every {every} steps"),
            (every, warmup) => format!("a mean every {every} steps after the first {warmup}"),
        };
        let what = if self.states { "weights and optimizer state" } else { "weights" };
        format!("{} replicas, {means} of {what}", self.count)
    }
}

impl Controller for Replicas {
    fn next(&self, step: u64, _records: &[Record]) -> Choice {
        Choice(Cow::Borrowed(match self.averages(step) {
            true => &[ScriptKey::Train, ScriptKey::Average],
            false => &[ScriptKey::Train],
        }))
    }
}

/// Which of several equal shares of a batch a rank takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchShare {
    /// Which one, from 0.
    pub index: usize,
    /// How many there are.
    pub of: usize,
}

impl BatchShare {
    /// The whole batch.
    pub const WHOLE: Self = Self { index: 0, of: 1 };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(replicas: Replicas) -> Vec<u64> {
        (1..=replicas.last).filter(|step| replicas.averages(*step)).collect()
    }

    #[test]
    fn the_rule_is_that_of_local_sgd() {
        let replicas = Replicas { count: 4, every: 3, warmup: 0, last: 10, states: true };
        assert_eq!(steps(replicas), [3, 6, 9, 10]);
        // ⌈T/H⌉.
        for every in 1..=12_u64 {
            let replicas = Replicas { every, ..replicas };
            assert_eq!(replicas.averages_until_the_end(), 10_u64.div_ceil(every), "{every}");
        }
        assert_eq!(steps(Replicas { every: 0, ..replicas }), [10]);
        assert_eq!(steps(Replicas { warmup: 4, ..replicas }), [1, 2, 3, 4, 7, 10]);
        assert_eq!(steps(Replicas { every: 1, ..replicas }).len(), 10);
    }
}
