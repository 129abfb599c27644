//! Tokens that a layout sends to other places than one rank does.
//!
//! Experts are chosen by comparing numbers, and sums of other orders have other last bits: a token whose two
//! experts are nearly equally likely may take the other one, and tokens after it other places. In f64 this must
//! not happen.

use std::collections::BTreeMap;

use phalanx_error::Result;
use phalanx_ir::{Op, Program, Role};
use phalanx_models::port;
use phalanx_session::{Models, Session};

/// For each instance and micro-batch of a step how many rows each region had, in their order.
pub(super) type StepRows = BTreeMap<(usize, usize), Vec<u64>>;

/// The instances of a model that send tokens to experts.
pub(super) struct Routing {
    instances: Vec<usize>,
    /// Those that count the rows which travel.
    counted: Vec<usize>,
    microbatches: usize,
    /// Tokens that went elsewhere, over all layers, micro-batches and steps.
    pub(super) flips: usize,
}

impl Routing {
    /// Makes models expose their slots; none if they have none.
    pub(super) fn expose(models: &mut Models, microbatches: usize) -> Option<Self> {
        let roomier = !models.roomier.is_empty();
        let others = models.roomier.iter_mut().chain(&mut models.gathered);
        for model in others.chain([&mut models.train]) {
            *model = model.map_segments(|segment| with_slots(segment, roomier));
        }
        let exposing = &models.train;
        let all = 0..exposing.instances().len();
        let shows = |port: &'static str| {
            all.clone().filter(move |i| exposing.program(*i).output_named(port).is_some())
        };
        let instances: Vec<usize> = shows(port::SLOT).collect();
        let counted = shows(port::ROWS).collect();
        (!instances.is_empty()).then_some(Self { instances, counted, microbatches, flips: 0 })
    }

    /// How many rows each region had in a step that both have taken: on one rank. Where tokens went elsewhere on many, as
    /// they may in few digits, what these counted.
    pub(super) fn rows(&self, shown: &mut Session) -> Result<StepRows> {
        let mut rows = StepRows::new();
        for &instance in &self.counted {
            for microbatch in 0..self.microbatches {
                let at = (instance, microbatch);
                rows.insert(at, rows_of(shown, at)?);
            }
        }
        Ok(rows)
    }

    /// Compares the slots of a step that both have taken.
    pub(super) fn compare(&mut self, one: &mut Session, many: &mut Session) -> Result<()> {
        for &instance in &self.instances {
            for microbatch in 0..self.microbatches {
                let at = (port::SLOT, instance, microbatch);
                let (shape, expected) = one.exposed_integers(at)?;
                let (_, found) = many.exposed_integers(at)?;
                let choices = shape.last().copied().unwrap_or(1);
                self.flips += elsewhere(choices, &expected, &found);
            }
        }
        Ok(())
    }
}

/// How many rows each region of an instance had for a micro-batch of the last step.
pub(super) fn rows_of(shown: &mut Session, at: (usize, usize)) -> Result<Vec<u64>> {
    let (shape, counts) = shown.exposed_integers((port::ROWS, at.0, at.1))?;
    let runs = shape.last().copied().unwrap_or(1).max(1);
    let sum = |runs: &[i32]| runs.iter().map(|&n| u64::from(n.unsigned_abs())).sum();
    Ok(counts.chunks(runs).map(sum).collect())
}

/// A segment that exposes the slots by which it sends tokens; where rows are packed or steps have bounds, the places of
/// their experts: slots depend on the room.
fn with_slots(segment: &Program, roomier: bool) -> Program {
    let packed = segment.instrs().iter().any(|instr| matches!(instr.op, Op::GroupedMatmul(_)));
    let mut exposing = segment.clone();
    let mut sends = segment.instrs().iter();
    let shown = sends.find_map(|instr| match instr.op {
        Op::Queue(_) => {
            let slot = if packed || roomier { instr.inputs[0] } else { instr.outputs[0] };
            Some(vec![(port::SLOT, slot), (port::ROWS, instr.outputs[1])])
        }
        Op::Dispatch(_) => Some(vec![(port::SLOT, instr.inputs[1])]),
        _ => None,
    });
    let shown = shown.into_iter().flatten();
    shown.for_each(|(name, value)| exposing.output(name, Role::Probe, value));
    exposing
}

/// The tokens of which a choice has another slot.
fn elsewhere(choices: usize, one: &[i32], many: &[i32]) -> usize {
    let tokens = one.chunks(choices.max(1)).zip(many.chunks(choices.max(1)));
    tokens.filter(|(one, many)| one != many).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_counts_once() {
        let one = [0, 5, 1, 6, 2, 7];
        assert_eq!(elsewhere(2, &one, &one), 0);
        assert_eq!(elsewhere(2, &one, &[0, 5, 6, 1, 2, 8]), 2);
        assert_eq!(elsewhere(3, &one, &[0, 5, 6, 1, 2, 8]), 2);
        assert_eq!(elsewhere(1, &one, &[0, 5, 6, 1, 2, 8]), 3);
    }
}
