//! The order in which one rank runs the parts of its segments.
//!
//! A schedule is a plain list; pipeline schedules are other lists of the same turns.

use std::fmt;

/// Which program of a segment is run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs, reason = "the phases are described in the autodiff crate")]
pub enum Part {
    F,
    B,
    W,
    BW,
    FBW,
    /// F again, for the backward that follows: the values of the first F were not kept.
    R,
}

/// One item of a schedule: an instance, a part, a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ScheduledRun {
    /// The instance's number in the model.
    pub instance: usize,
    /// Which of its programs.
    pub part: Part,
    /// The micro-batch.
    pub microbatch: usize,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Gradient accumulation on one rank: each micro-batch runs forward and backward through all
/// instances before the next, so only one is in flight.
pub fn accumulate(instances: usize, microbatches: usize) -> Vec<ScheduledRun> {
    let mut turns = Vec::new();
    for microbatch in 0..microbatches {
        let turn = |part| move |instance| ScheduledRun { instance, part, microbatch };
        turns.extend((0..instances).map(turn(Part::F)));
        turns.extend((0..instances).rev().map(turn(Part::BW)));
    }
    turns
}

/// Micro-batches one after the other, forward only.
pub fn forward(
    instances: impl Iterator<Item = usize> + Clone,
    microbatches: usize,
) -> Vec<ScheduledRun> {
    (0..microbatches)
        .flat_map(|microbatch| {
            instances.clone().map(move |instance| ScheduledRun {
                instance,
                part: Part::F,
                microbatch,
            })
        })
        .collect()
}

/// Where the last instance's whole backward directly follows its forward, both become one run and
/// nothing is kept between them: the logits of the last segment then never exist as a whole. (For
/// every other instance something must run between forward and backward.) A backward in two parts
/// stays so: the stage before waits for the first, and the second fills a bubble.
pub fn merge_adjacent(turns: &[ScheduledRun], instances: usize) -> Vec<ScheduledRun> {
    let mut merged: Vec<ScheduledRun> = Vec::new();
    for turn in turns {
        let forward = ScheduledRun { part: Part::F, ..*turn };
        let turns_around = turn.part == Part::BW && turn.instance + 1 == instances;
        match merged.last_mut() {
            Some(last) if turns_around && *last == forward => last.part = Part::FBW,
            _ => merged.push(*turn),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_instance_turns_around_at_once() {
        let text: Vec<String> = merge_adjacent(&accumulate(3, 2), 3)
            .iter()
            .map(|s| format!("{}{}@{}", s.part, s.instance, s.microbatch))
            .collect();
        let expected = "F0@0 F1@0 FBW2@0 BW1@0 BW0@0 F0@1 F1@1 FBW2@1 BW1@1 BW0@1";
        assert_eq!(text.join(" "), expected);
    }

    #[test]
    fn a_backward_in_two_parts_stays_so() {
        let turn = |part, instance| ScheduledRun { instance, part, microbatch: 0 };
        let split =
            [(Part::F, 0), (Part::F, 1), (Part::B, 1), (Part::B, 0), (Part::W, 1), (Part::W, 0)]
                .map(|(part, instance)| turn(part, instance));
        assert_eq!(merge_adjacent(&split, 2), split);
    }
}
