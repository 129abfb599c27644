//! In which order one rank runs the parts of its segments.
//!
//! A schedule is a plain list; pipeline schedules will be other lists of the same steps.

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

/// One run: an instance, a part, a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Step {
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
pub fn accumulate(instances: usize, microbatches: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    for microbatch in 0..microbatches {
        let step = |part| move |instance| Step { instance, part, microbatch };
        steps.extend((0..instances).map(step(Part::F)));
        steps.extend((0..instances).rev().map(step(Part::BW)));
    }
    steps
}

/// Where an instance's backward follows its forward at once, both become one run and nothing is
/// kept between them: the last segment's logits then never exist as a whole.
pub fn merge_adjacent(steps: &[Step]) -> Vec<Step> {
    let mut merged: Vec<Step> = Vec::new();
    for step in steps {
        match merged.last_mut() {
            Some(last)
                if last.part == Part::F
                    && step.part == Part::BW
                    && (last.instance, last.microbatch) == (step.instance, step.microbatch) =>
            {
                last.part = Part::FBW;
            }
            _ => merged.push(*step),
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
