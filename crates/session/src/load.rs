//! How evenly the tokens of a step are spread over experts.

use std::collections::BTreeMap;

use phalanx_error::{Error, Problem, Result};
use phalanx_ir::DType;
use phalanx_script::{ExpertPolicy, ExpertRecord, ScriptKey};

use crate::command::{Command, Reply};
use crate::{BatchSource, Session, StepResult, forward};

/// The load of a step's experts.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ExpertLoad {
    /// For each layer that has experts: how many tokens chose each of them.
    pub chosen: Vec<Vec<f64>>,
    /// The share of all choices that found no place.
    pub dropped: f64,
}

impl ExpertLoad {
    /// The load of the busiest expert of a layer, as a multiple of an even share; of the layer where it is
    /// largest.
    pub fn max_over_mean(&self) -> f64 {
        let of_layer = |chosen: &Vec<f64>| {
            let most = chosen.iter().copied().fold(0.0, f64::max);
            most * chosen.len() as f64 / chosen.iter().sum::<f64>().max(1.0)
        };
        self.chosen.iter().map(of_layer).fold(0.0, f64::max)
    }

    /// The load in the counts of all ranks; none if no layer has experts.
    fn of(answers: Vec<Reply>) -> Option<Self> {
        let mut counts: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for piece in answers.into_iter().flat_map(Reply::into_pieces) {
            let numbers = piece.bytes.as_chunks::<8>().0.iter().map(|n| f64::from_ne_bytes(*n));
            let sums =
                counts.entry(piece.first).or_insert_with(|| vec![0.0; piece.bytes.len() / 8]);
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        let (mut chosen, mut lost, mut all) = (Vec::new(), 0.0, 0.0);
        for (&number, own) in counts.iter().filter(|(number, _)| number.is_multiple_of(2)) {
            let total: f64 = own.iter().sum();
            let placed = counts.get(&(number + 1)).map_or(total, |placed| placed.iter().sum());
            (lost, all) = (lost + total - placed, all + total);
            chosen.push(own.clone());
        }
        (!chosen.is_empty()).then(|| Self { chosen, dropped: lost / f64::max(all, 1.0) })
    }
}

impl Session {
    /// Takes steps of which each reads experts in the way that a rule chooses from what the one before has logged.
    pub(super) fn take_choosing(
        &mut self,
        policy: &dyn ExpertPolicy,
        count: u64,
        batches: &dyn BatchSource,
    ) -> Result<Vec<StepResult>> {
        let mut taken = Vec::new();
        for _ in 0..count {
            let layout = policy.next(self.steps + 1, self.logged.as_ref());
            taken.extend(self.take_as(layout, 1, batches)?);
            let load = self.expert_load()?.unwrap_or_default();
            let whole = |layer: Vec<f64>| layer.into_iter().map(|count| count as u64).collect();
            let chosen = load.chosen.into_iter().map(whole).collect();
            self.logged = Some(ExpertRecord { step: self.steps, layout, chosen });
            let scaling = taken.last().and_then(|last: &StepResult| last.scaling);
            if scaling.is_some_and(|own| own.overflowed) {
                break;
            }
        }
        Ok(taken)
    }

    /// What the last step has logged of its experts, if steps choose how they read them.
    pub fn logged(&self) -> Option<&ExpertRecord> {
        self.logged.as_ref()
    }

    /// Goes on after a step that has logged this.
    pub fn go_on_from(&mut self, logged: Option<ExpertRecord>) {
        self.logged = logged.filter(|_| self.known.settings.parallel.experts.is_some());
    }

    /// How many tokens of the last step chose which expert; none if the model has no experts, or if the
    /// step was one of several taken together. Every process must call it together.
    pub fn expert_load(&mut self) -> Result<Option<ExpertLoad>> {
        match self.known.has_experts {
            true => Ok(ExpertLoad::of(self.ranks.ask(Command::ExpertLoad)?)),
            false => Ok(None),
        }
    }
}

impl Session {
    /// Integers that an instance of the model exposed for a micro-batch in the last step, by the name of their
    /// port: their shape, and all of them. Every process must call it together.
    pub fn exposed_integers(
        &mut self,
        (port, instance, microbatch): (&str, usize, usize),
    ) -> Result<(Vec<usize>, Vec<i32>)> {
        let (key, instance) = (ScriptKey::Train, Some(instance));
        let answers = self.ranks.ask(Command::Show { key, port, instance, microbatch })?;
        let (shape, dtype, bytes) = forward::gathered_bytes(port, answers)?;
        if dtype != DType::I32 {
            let problem = Problem::new(format!("the model exposes `{port}` as {dtype}"));
            return Err(Error::refused(problem.fix("expose integers")));
        }
        let integers = bytes.as_chunks::<4>().0.iter().map(|n| i32::from_ne_bytes(*n));
        Ok((shape, integers.collect()))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::DType;

    use super::*;
    use crate::command::StatePiece;

    #[test]
    fn counts_of_ranks_are_added() {
        let piece = |first, counts: [f64; 4]| StatePiece {
            first,
            dtype: DType::F64,
            bytes: counts.iter().flat_map(|count| count.to_ne_bytes()).collect(),
        };
        // Instance 1 has 16 choices, of which 4 found no place; instance 3 drops nothing.
        let one = vec![piece(2, [4.0, 2.0, 1.0, 1.0]), piece(3, [2.0, 2.0, 1.0, 1.0])];
        let two = vec![
            piece(2, [4.0, 2.0, 2.0, 0.0]),
            piece(3, [2.0, 2.0, 2.0, 0.0]),
            piece(6, [4.0; 4]),
        ];
        let load = ExpertLoad::of(vec![Reply::Pieces(one), Reply::Pieces(two)]).unwrap();
        assert_eq!(load.chosen, [[8.0, 4.0, 3.0, 1.0], [4.0; 4]]);
        assert_eq!((load.max_over_mean(), load.dropped), (2.0, 4.0 / 32.0));
        assert_eq!(ExpertLoad::of(vec![Reply::Pieces(vec![])]), None);
    }
}
