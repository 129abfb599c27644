//! In which order one rank runs the parts of its segments.
//!
//! A schedule is a plain list; pipeline schedules will be other lists of the same turns.

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
}

/// One item of a schedule: an instance, a part, a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Turn {
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

/// Gradient accumulation on one rank: each micro-batch goes through all instances and back before
/// the next, so only one is in flight.
pub fn accumulate(instances: usize, microbatches: usize) -> Vec<Turn> {
    let mut turns = Vec::new();
    for microbatch in 0..microbatches {
        let turn = |part| move |instance| Turn { instance, part, microbatch };
        turns.extend((0..instances).map(turn(Part::F)));
        turns.extend((0..instances).rev().map(turn(Part::BW)));
    }
    turns
}

/// Where an instance's backward follows its forward at once, both become one run and nothing is
/// kept between them: the last segment's logits then never exist as a whole.
pub fn merge_adjacent(turns: &[Turn]) -> Vec<Turn> {
    let mut merged: Vec<Turn> = Vec::new();
    for turn in turns {
        match merged.last_mut() {
            Some(last)
                if last.part == Part::F
                    && turn.part == Part::BW
                    && (last.instance, last.microbatch) == (turn.instance, turn.microbatch) =>
            {
                last.part = Part::FBW;
            }
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
        let text: Vec<String> = merge_adjacent(&accumulate(3, 2))
            .iter()
            .map(|s| format!("{}{}@{}", s.part, s.instance, s.microbatch))
            .collect();
        let expected = "F0@0 F1@0 FBW2@0 BW1@0 BW0@0 F0@1 F1@1 FBW2@1 BW1@1 BW0@1";
        assert_eq!(text.join(" "), expected);
    }
}
