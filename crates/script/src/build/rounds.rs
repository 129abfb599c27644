//! Several updates in one script: what each needs besides its gradients, and the numbers of all of them.
//!
//! A stage group updates its weights right after the last backward of a round, and goes on at once: it waits for no
//! other group. So the loss of a round, and squares after the last one of a step, are added up where they are, and one
//! collective at the end of the script sums those of all its steps and of all groups. Where holders of a stage take rounds
//! in turn, each has its own. In an endless row of scripts even that would make groups wait: there the
//! sums are carried, and the next script adds them up beside its own turns. Only where gradients are clipped must all
//! groups agree on a norm before each update; then that collective comes in every round, and the groups wait for the slowest.

use std::collections::BTreeMap;

use phalanx_ir::TensorType;
use phalanx_ir::ops::UnaryKind;

use super::finish::{push, push_as, whole};
use super::norm::{self, StepNumbers};
use super::{
    Action, Buffer, BufferId, BufferKey, Builder, Category, DType, Kind, Lane, Part, Role, Run,
    Script, ScriptError, Source, State, Tier, TrainingScript, UnitUpdate, VersionPlaces, View,
    Write,
};
use crate::key::Number;
use crate::updates::Updates;

/// The rounds of a script.
pub(super) struct Rounds<'a> {
    training: TrainingScript<'a>,
    updates: Option<&'a Updates>,
    /// The turns that are the last of a round here, each with the round.
    last: BTreeMap<usize, usize>,
    /// For each round so far: loss and squares of this stage group.
    sums: Vec<BufferId>,
    /// By how many rounds an update takes: their share in it, by which gradients are multiplied if they are not clipped.
    shares: BTreeMap<usize, BufferId>,
    /// The coefficient of the last round, if gradients are clipped.
    clipped: Option<BufferId>,
    /// The sums of the script before: as this rank carries them, and over all groups.
    before: Option<[BufferId; 2]>,
}

impl<'a> Rounds<'a> {
    /// Starts adding up the sums of the script before, if it has left them.
    pub(super) fn start(
        training: &TrainingScript<'a>,
        script: &mut Script,
    ) -> Result<Self, ScriptError> {
        let (world, updates) = (training.world, training.world.updates.as_ref());
        let turns = training.stage_group().turns.iter().enumerate();
        // Of each round, the turn that comes last; a forward ahead belongs to a later script.
        let backward = turns.filter(|(_, turn)| !matches!(turn.part, Part::F | Part::R));
        let by_round: BTreeMap<usize, usize> =
            backward.map(|(index, turn)| (world.round_of(turn.microbatch), index)).collect();
        let last = match updates {
            Some(_) => by_round.into_iter().map(|(round, index)| (index, round)).collect(),
            None => BTreeMap::new(),
        };
        let (sums, shares, clipped, before) = (Vec::new(), BTreeMap::new(), None, None);
        let mut rounds = Self { training: *training, updates, last, sums, shares, clipped, before };
        let begins = script.window.is_some_and(|window| window.part.begins_in_flight());
        if begins && training.clip.is_none() {
            let carried = rounds.packed(script, Source::Carried);
            let beside = (Lane::Reduce, "sums of the script before");
            let summed = rounds.over_groups(script, carried, beside)?;
            rounds.before = Some([carried, summed]);
        }
        Ok(rounds)
    }

    /// The round that ends here with a turn.
    pub(super) fn ends(&self, turn: usize) -> Option<usize> {
        self.last.get(&turn).copied()
    }

    /// The updates whose gradients are complete here after a round.
    pub(super) fn complete(&self, round: usize, versions: &VersionPlaces<'_>) -> Vec<UnitUpdate> {
        let next = self.next(round);
        let ended = |unit: usize| {
            let update = |round: usize| round / versions.timing(unit).holders;
            let ends = next.is_none_or(|next| update(next) != update(round));
            ends.then(|| UnitUpdate { unit, update: update(round) })
        };
        (0..versions.units()).filter_map(ended).collect()
    }

    /// Whether a round is the last one of a step here.
    pub(super) fn ends_step(&self, round: usize) -> bool {
        let step = |round: usize| round / self.rounds_of_step();
        self.next(round).is_none_or(|next| step(next) != step(round))
    }

    fn next(&self, round: usize) -> Option<usize> {
        self.last.values().copied().filter(|other| *other > round).min()
    }

    /// Appends the sums of a round.
    pub(super) fn end(
        &mut self,
        script: &mut Script,
        state: &State,
        round: usize,
    ) -> Result<(), ScriptError> {
        let dtype = self.training.precision.state;
        let own = number(script, Number::Sums, round, (2 * dtype.size(), Source::Script));
        let world = self.training.world;
        let of_round = |microbatch| world.round_of(microbatch) == round;
        let squares = self.training.clip.is_some() || self.ends_step(round);
        norm::sums_of_group(script, state, &self.training, (own, squares), of_round)?;
        self.sums.push(own);
        if self.training.clip.is_some() {
            self.clipped = Some(self.clipped(script, own, round)?);
        }
        Ok(())
    }

    /// What an update needs that takes so many rounds.
    pub(super) fn numbers(
        &mut self,
        script: &mut Script,
        rounds: usize,
    ) -> Result<StepNumbers, ScriptError> {
        let coefficient = match self.clipped {
            None => self.share(script, rounds)?,
            Some(clipped) => clipped,
        };
        Ok(StepNumbers { coefficient, go: None, lacks: None })
    }

    /// Appends what is left of the numbers of all steps: those of the script before, and this script's own, unless
    /// the next one adds them up.
    pub(super) fn finish(self, script: &mut Script) -> Result<(), ScriptError> {
        if self.training.clip.is_some() || self.updates.is_none() {
            return Ok(());
        }
        let mut told = 0;
        if let Some([_, summed]) = self.before {
            told = self.tell(script, summed, told)?;
        }
        let leaves = script.window.is_some_and(|window| window.part.ends_in_flight());
        let own = match (self.before, leaves) {
            (Some([carried, _]), true) => carried,
            (None, true) => self.packed(script, Source::Carried),
            (_, false) => self.packed(script, Source::Script),
        };
        self.pack(script, own)?;
        if !leaves {
            let summed = self.over_groups(script, own, (Lane::Compute, "sums of all"))?;
            self.tell(script, summed, told)?;
        }
        Ok(())
    }

    /// How many rounds a step has: one, unless the schedule has more.
    fn rounds_of_step(&self) -> usize {
        match self.updates {
            Some(updates) => updates.per_step(),
            None => 1,
        }
    }

    /// How many steps a script has.
    fn steps(&self) -> usize {
        let rounds = self.training.world.last_round(self.training.at.stage_group) + 1;
        rounds.div_ceil(self.rounds_of_step())
    }

    /// A buffer for loss and squares of each step, as far as this rank knows them.
    fn packed(&self, script: &mut Script, source: Source) -> BufferId {
        let carried = source == Source::Carried;
        let key = if carried { "sums for the next script" } else { "sums of each step" };
        let category = if carried { Category::Optimizer } else { Category::Workspace };
        let bytes = 2 * self.steps() * self.training.precision.state.size();
        let (key, tier, padding) = (BufferKey::Own(key.into()), Tier::Device, vec![]);
        script.buffer(Buffer { key, category, bytes, source, tier, padding })
    }

    /// Appends loss and squares of each step from those of its rounds here. A step of several updates has the mean loss of
    /// its micro-batches, and the norm of its last update.
    fn pack(&self, script: &mut Script, into: BufferId) -> Result<(), ScriptError> {
        let dtype = self.training.precision.state;
        let (all, each) = (self.rounds_of_step(), self.sums.len() / self.steps());
        let b = Builder::new("sums of each step", dtype);
        let ty = TensorType::new(dtype, vec![2]);
        let input = |i: usize| b.input(&format!("sums{i}"), Role::Loss, ty.clone());
        let rounds: Vec<_> = (0..self.sums.len()).map(input).collect();
        let mut numbers = Vec::new();
        for step in rounds.chunks(each) {
            let losses = step.iter().map(|sums| sums.slice(0, 0, 1));
            let loss = losses.reduce(|a, x| a + x).expect("a step has a round");
            numbers.push(if all == 1 { loss } else { loss.scale(1.0 / all as f64) });
            numbers.push(step[each - 1].slice(0, 1, 1));
        }
        b.port("all", Role::Scalar, b.concat(&numbers, 0));
        let program = self.training.world.library.placed(&b.finish()?);
        let inputs = self.sums.iter().map(|sums| whole(*sums)).collect();
        push(script, "sums of each step", program, inputs, &[whole(into)], None);
        Ok(())
    }

    /// Appends the sum of these numbers over all stage groups.
    fn over_groups(
        &self,
        script: &mut Script,
        own: BufferId,
        (lane, label): (Lane, &str),
    ) -> Result<BufferId, ScriptError> {
        let world = self.training.world;
        let (dtype, bytes) = (self.training.precision.state, script.buffers[own.0].bytes);
        let (key, category) = (BufferKey::Own(label.into()), Category::Communication);
        let (source, tier, padding) = (Source::Script, Tier::Device, vec![]);
        let summed = script.buffer(Buffer { key, category, bytes, source, tier, padding });
        let (mesh, ranks) = norm::all_ranks(world)?;
        let program = norm::summed(&mesh, dtype, self.steps())?;
        let run = Run {
            program: script.program_of(world.library.placed(&program), ranks),
            inputs: vec![whole(own)],
            outputs: vec![(whole(summed), Write::Overwrite)],
            contributes: vec![],
        };
        let (label, kind) = (label.to_owned(), Kind::Run(run));
        script.actions.push(Action { label, lane, kind, after: vec![] });
        Ok(summed)
    }

    /// Appends the results of the script's steps. `told` steps had theirs appended before; gives how many have them now.
    fn tell(
        &self,
        script: &mut Script,
        summed: BufferId,
        told: usize,
    ) -> Result<usize, ScriptError> {
        let (dtype, steps) = (self.training.precision.state, self.steps());
        let mut outputs = Vec::new();
        let b = Builder::new("loss and norm", dtype);
        let all = b.input("all", Role::Scalar, TensorType::new(dtype, vec![2 * steps]));
        let number_at = |i: usize| all.slice(0, i, 1).reshape([]);
        for step in 0..steps {
            b.probe(&format!("loss{step}"), number_at(2 * step).scale(1.0));
            let squares = number_at(2 * step + 1);
            b.probe(&format!("grad_norm{step}"), squares.unary(UnaryKind::Sqrt));
            let size = (dtype.size(), Source::Result);
            for of in [Number::Loss, Number::GradNorm] {
                outputs.push(whole(number(script, of, told + step, size)));
            }
        }
        let program = self.training.world.library.placed(&b.finish()?);
        push(script, "loss and norm", program, vec![whole(summed)], &outputs, None);
        Ok(told + steps)
    }

    fn share(&mut self, script: &mut Script, rounds: usize) -> Result<BufferId, ScriptError> {
        if let Some(known) = self.shares.get(&rounds) {
            return Ok(*known);
        }
        let dtype = self.training.precision.state;
        let b = Builder::new("share of a round", dtype);
        b.port("clip", Role::Scalar, b.constant(dtype, [], 1.0 / rounds as f64));
        let program = self.training.world.library.placed(&b.finish()?);
        let share = number(script, Number::Clip, rounds - 1, (dtype.size(), Source::Script));
        push(script, "no clipping", program, vec![], &[whole(share)], None);
        self.shares.insert(rounds, share);
        Ok(share)
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
        let program = norm::over_all(&all.0, (dtype, 2), |sums| {
            norm::finish(sums, &self.training);
        })?;
        let program = script.program_of(self.training.world.library.placed(&program), all.1);
        let inputs: Vec<View> = vec![whole(own)];
        push_as(script, "norm and clip", program, inputs, &outputs, None);
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
