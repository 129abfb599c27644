//! Tokens that a layout sends to other places than one rank does.
//!
//! Experts are chosen by comparing numbers, and sums of other orders have other last bits: a token whose two
//! experts are nearly equally likely may take the other one, and tokens after it other places. In f64 this must
//! not happen.

use phalanx_error::Result;
use phalanx_ir::{Op, Program, Role};
use phalanx_models::port;
use phalanx_session::{Models, Session};

/// The instances of a model that send tokens to experts.
pub(super) struct Routing {
    instances: Vec<usize>,
    microbatches: usize,
    /// Tokens that went elsewhere, over all layers, micro-batches and steps.
    pub(super) flips: usize,
}

impl Routing {
    /// Makes models expose their slots; none if they have none.
    pub(super) fn expose(models: &mut Models, microbatches: usize) -> Option<Self> {
        for model in models.roomier.iter_mut().chain([&mut models.train]) {
            *model = model.map_segments(with_slots);
        }
        let exposing = &models.train;
        let routes = |i: &usize| exposing.program(*i).output_named(port::SLOT).is_some();
        let instances: Vec<usize> = (0..exposing.instances().len()).filter(routes).collect();
        (!instances.is_empty()).then_some(Self { instances, microbatches, flips: 0 })
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

/// A segment that exposes the slots by which it sends tokens; where rows are packed, the experts that they are of: slots
/// depend on the room.
fn with_slots(segment: &Program) -> Program {
    let mut sends = segment.instrs().iter();
    let slot = sends.find_map(|instr| match instr.op {
        Op::Queue(_) => Some(instr.inputs[0]),
        Op::Dispatch(_) => Some(instr.inputs[1]),
        _ => None,
    });
    let mut exposing = segment.clone();
    slot.into_iter().for_each(|slot| exposing.output(port::SLOT, Role::Probe, slot));
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
