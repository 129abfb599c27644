//! Several updates in one script: what each needs besides its gradients, and the numbers of all of them.
//!
//! A stage group updates its weights right after the last backward of a round, and goes on at once: it waits for no
//! other group. So loss and squares of a round are added up where they are, and one collective at the end of the
//! script sums those of all rounds and groups. Only where gradients are clipped must all groups agree on a norm before each update;
//! then that collective comes in every round, and the groups wait for the slowest.

use std::collections::BTreeMap;

use phalanx_ir::ops::UnaryKind;

use super::finish::{push, push_as, whole};
use super::norm::{self, StepNumbers};
use super::{
    Buffer, BufferId, BufferKey, Builder, Category, DType, Role, Script, ScriptError, Source,
    State, Tier, TrainingScript, View,
};
use crate::key::Number;
use crate::updates::Updates;

/// The rounds of a script.
pub(super) struct Rounds<'a> {
    training: TrainingScript<'a>,
    updates: Option<&'a Updates>,
    /// The turns that are the last of a round.
    last: BTreeMap<usize, usize>,
    /// For each round so far: loss and squares of this stage group.
    sums: Vec<BufferId>,
    /// One, by which gradients are multiplied if they are not clipped.
    one: Option<BufferId>,
}

impl<'a> Rounds<'a> {
    pub(super) fn new(training: &TrainingScript<'a>) -> Self {
        let (world, updates) = (training.world, training.world.updates.as_ref());
        let turns = training.stage_group().turns.iter().enumerate();
        // Of each update, the turn that comes last.
        let by_update: BTreeMap<usize, usize> =
            turns.map(|(index, turn)| (world.update_of(turn.microbatch), index)).collect();
        let last = match updates {
            Some(_) => by_update.into_iter().map(|(update, index)| (index, update)).collect(),
            None => BTreeMap::new(),
        };
        Self { training: *training, updates, last, sums: Vec::new(), one: None }
    }

    /// Whether a round ends with a turn.
    pub(super) fn ends(&self, turn: usize) -> bool {
        self.last.contains_key(&turn)
    }

    /// Appends the sums of a round; gives what its update needs.
    pub(super) fn end(
        &mut self,
        script: &mut Script,
        state: &State,
        round: usize,
    ) -> Result<StepNumbers, ScriptError> {
        let dtype = self.training.precision.state;
        let own = number(script, Number::Sums, round, (2 * dtype.size(), Source::Script));
        let world = self.training.world;
        let of_round = |microbatch| world.update_of(microbatch) == round;
        norm::sums_of_group(script, state, &self.training, own, of_round)?;
        self.sums.push(own);
        let coefficient = match self.training.clip {
            None => self.unclipped(script)?,
            Some(_) => self.clipped(script, own, round)?,
        };
        Ok(StepNumbers { coefficient, go: None })
    }

    /// Appends the sums over all stage groups, from which losses and norms follow.
    pub(super) fn finish(self, script: &mut Script) -> Result<(), ScriptError> {
        let (Some(updates), None) = (self.updates, self.training.clip) else { return Ok(()) };
        let (dtype, each) = (self.training.precision.state, updates.per_step());
        let steps = self.sums.len() / each;
        let (mut outputs, size) = (Vec::new(), dtype.size());
        for step in 0..steps {
            for of in [Number::Loss, Number::GradNorm] {
                outputs.push(whole(number(script, of, step, (size, Source::Result))));
            }
        }
        let inputs: Vec<View> = self.sums.iter().map(|sums| whole(*sums)).collect();
        let all = norm::all_ranks(self.training.world)?;
        let program = norm::over_all(&all.0, dtype, inputs.len(), |sums| {
            let b = sums[0][0].builder();
            for (step, rounds) in sums.chunks(each).enumerate() {
                let losses = rounds.iter().map(|[loss, _]| *loss);
                let loss = losses.reduce(|a, x| a + x).expect("a step has a round");
                // Each of its updates has the mean loss of its own micro-batches.
                let loss = if each == 1 { loss } else { loss.scale(1.0 / each as f64) };
                b.probe(&format!("loss{step}"), loss);
                let [_, squares] = rounds[each - 1];
                b.probe(&format!("grad_norm{step}"), squares.unary(UnaryKind::Sqrt));
            }
        })?;
        let program = script.program_of(self.training.world.library.placed(&program), all.1);
        push_as(script, "loss and norm", program, inputs, &outputs, None);
        Ok(())
    }

    fn unclipped(&mut self, script: &mut Script) -> Result<BufferId, ScriptError> {
        if let Some(known) = self.one {
            return Ok(known);
        }
        let dtype = self.training.precision.state;
        let b = Builder::new("one", dtype);
        b.port("clip", Role::Scalar, b.constant(dtype, [], 1.0));
        let program = self.training.world.library.placed(&b.finish()?);
        let one = number(script, Number::Clip, 0, (dtype.size(), Source::Script));
        push(script, "no clipping", program, vec![], &[whole(one)], None);
        self.one = Some(one);
        Ok(one)
    }

    fn clipped(
        &self,
        script: &mut Script,
        own: BufferId,
        round: usize,
    ) -> Result<BufferId, ScriptError> {
        let dtype: DType = self.training.precision.state;
        let size = dtype.size();
        let [loss, grad_norm] = [Number::Loss, Number::GradNorm]
            .map(|of| number(script, of, round, (size, Source::Result)));
        let coefficient = number(script, Number::Clip, round, (size, Source::Script));
        let outputs = [loss, grad_norm, coefficient].map(whole);
        let all = norm::all_ranks(self.training.world)?;
        let program = norm::over_all(&all.0, dtype, 1, |sums| {
            let [loss, squares] = sums[0];
            norm::finish(loss, squares, &self.training);
        })?;
        let program = script.program_of(self.training.world.library.placed(&program), all.1);
        push_as(script, "norm and clip", program, vec![whole(own)], &outputs, None);
        Ok(coefficient)
    }
}

fn number(
    script: &mut Script,
    number: Number,
    index: usize,
    (bytes, source): (usize, Source),
) -> BufferId {
    script.buffer(Buffer {
        key: BufferKey::NumberOf { number, index },
        category: Category::Workspace,
        bytes,
        source,
        tier: Tier::Device,
        padding: vec![],
    })
}
