//! Gradients of which each rank computes a summand are summed over ranks as soon as they are
//! complete.
//!
//! Where every rank keeps whole gradients, that is after the last contribution of the step (no
//! communication while micro-batches accumulate). Where gradients are kept in shards, the gradient
//! of a micro-batch is written to its own buffer and summed into the shard at once; all
//! micro-batches share one such buffer where a stage group runs them through its layers together.
//!
//! What several stage groups hold (tied weights, the replicas of a stage in Chimera) is summed over them as soon as
//! the last of them has contributed. All must start these sums in one order: that of their last contributions in
//! the whole pipeline. Holders that take micro-batches in turn do the same one after the other, so each starts a sum as soon
//! as its own gradient is complete, and goes on until it needs the result.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use phalanx_spmd::Reduction;

use super::collect::sweeps;
use super::ties::{Tie, TiedSum};
use super::{
    Action, Binder, Buffer, BufferId, Category, Contribution, Kind, Lane, Mesh, Part, Places,
    Program, Role, Run, ScheduledRun, ScriptError, Source, Tier, TrainingScript, Unit, UnitBuffers,
    UnitUpdate, View, World, Write, programs,
};
use crate::action::{Accumulator, ProgramId};
use crate::key::BufferKey;
use crate::stage_group::{StageGroup, together};
use crate::updates::UnitTiming;

/// Tells runs where to write gradients, and inserts the reductions.
pub(super) struct Reducer<'a> {
    training: TrainingScript<'a>,
    units: &'a [Unit],
    buffers: &'a [UnitBuffers],
    /// Whether all micro-batches add to one gradient buffer.
    together: bool,
    /// For each unit and group of micro-batches: the runs that contribute, by index in the
    /// schedule.
    runs: BTreeMap<(usize, usize), Vec<usize>>,
    /// The buffer for a unit's gradient of the current group, if it is a separate one.
    formed: BTreeMap<(usize, usize), BufferId>,
    /// The units that stage groups share, in the order in which they are summed; those that are not summed yet.
    shared: VecDeque<SharedSum>,
    /// For each unit: the program that sums such a gradient into its shard, once it is needed.
    scatters: Vec<Option<ProgramId>>,
    /// For each unit: when it is updated.
    timings: Vec<UnitTiming>,
}

impl<'a> Reducer<'a> {
    /// Declares every accumulator; runs write gradients directly into whole ones.
    pub(super) fn new(
        training: &TrainingScript<'a>,
        units: &'a [Unit],
        buffers: &'a [UnitBuffers],
        binder: &mut Binder<'_>,
    ) -> Result<Self, ScriptError> {
        let timings = units.iter().map(|unit| training.world.timing(unit));
        let timings: Vec<UnitTiming> = timings.collect::<Result<_, _>>()?;
        let whole: Vec<BufferId> = buffers.iter().map(|b| b.trained().buffer).collect();
        let dtype = training.precision.grads;
        binder.gradients = Some(Places::new(training.world.model, units, &whole, dtype));
        let mut reducer = Self {
            training: *training,
            units,
            buffers,
            // Each update takes the gradients of its own micro-batches alone.
            together: training.world.updates.is_none() && sweeps(training.stage_group().turns),
            runs: BTreeMap::new(),
            formed: BTreeMap::new(),
            shared: shared(training.world, training.at.stage_group, units, &timings),
            scatters: vec![None; units.len()],
            timings,
        };
        for (index, turn) in training.stage_group().turns.iter().enumerate() {
            for unit in reducer.contributes_to(*turn) {
                let group = reducer.group(turn.microbatch);
                reducer.runs.entry((unit, group)).or_default().push(index);
            }
        }
        for (unit, buffer) in whole.into_iter().enumerate() {
            let world = training.world;
            let timing = reducer.timings[unit];
            let each = 0..world.update_count(timing, training.at.stage_group);
            let of = |update| reducer.contributions(unit, |m| world.update_of(timing, m) == update);
            let complete = each.clone().map(of).collect();
            // Summands of stage groups of another shape come in messages.
            let tied = Tie::of(world, &units[unit]).is_some();
            let brought = match tied && units[unit].updates(training.ranks()) {
                true => each.map(|update| reducer.brought(unit, None, update)).collect(),
                false => vec![],
            };
            let shared = if tied { BTreeSet::new() } else { units[unit].shared() };
            let left = false;
            let own = Accumulator { buffer, dtype, complete, brought, left, shared };
            binder.script.accumulators.push(own);
        }
        Ok(reducer)
    }

    /// How a unit's gradient is reduced. What holders would form one by one, and then add up, is formed one by one where a
    /// rank takes the micro-batches of all of them: so it has the same bits.
    fn reduction(&self, unit: usize) -> Reduction {
        let spec = &self.units[unit];
        match self.timings[unit].holders > 1 && spec.stage_groups.len() == 1 {
            true => Reduction::IntoShard,
            false => spec.facts.reduction,
        }
    }

    /// Gives a run whose gradients are kept in shards a buffer for the whole gradient.
    pub(super) fn before(
        &mut self,
        turn: ScheduledRun,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let (dtype, group) = (self.training.precision.grads, self.group(turn.microbatch));
        for unit in self.contributes_to(turn) {
            if self.reduction(unit) != Reduction::IntoShard {
                continue;
            }
            if !self.formed.contains_key(&(unit, group)) {
                let buffer = self.form(unit, group, binder)?;
                self.formed.insert((unit, group), buffer);
            }
            let buffer = self.formed[&(unit, group)];
            if let Some(gradients) = &mut binder.gradients {
                gradients.set(&self.units[unit], buffer, dtype);
            }
        }
        Ok(())
    }

    /// Inserts the reductions that a run completes.
    pub(super) fn after(&mut self, run: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let group = self.group(self.training.stage_group().turns[run].microbatch);
        for unit in 0..self.units.len() {
            let last = self.runs.get(&(unit, group)).and_then(|runs| runs.last().copied());
            if last != Some(run) {
                continue;
            }
            let update = |group| self.training.world.update_of(self.timings[unit], group);
            let ends = (self.runs.range((unit, 0)..(unit + 1, 0)))
                .filter(|((_, other), _)| update(*other) == update(group))
                .all(|(_, runs)| runs.last().is_none_or(|&last| last <= run));
            match self.reduction(unit) {
                Reduction::Whole | Reduction::OwnPart | Reduction::OnRoot if !ends => {}
                Reduction::Whole => self.sum_whole(unit, binder)?,
                Reduction::OwnPart => self.scatter_whole(unit, binder)?,
                Reduction::OnRoot => self.sum_on_root(unit, binder)?,
                Reduction::IntoShard => {
                    self.scatter_formed(unit, group, binder)?;
                    if ends {
                        self.sum_shard(unit, binder)?;
                    }
                }
            }
        }
        let (levels, own) = (&self.training.world.links.levels, self.training.at.stage_group);
        while let Some(sum) = self.shared.pop_front_if(|sum| sum.level <= levels[own][run]) {
            self.sum_groups(&sum, binder)?;
        }
        Ok(())
    }

    /// Before these updates of units: sums what stage groups share and other groups complete later. The next
    /// contributions are the first ones again.
    pub(super) fn end_updates(
        &mut self,
        ended: &[UnitUpdate],
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let last = ended.iter().map(|own| own.update).max();
        while let Some(sum) = self.shared.pop_front_if(|sum| Some(sum.update) <= last) {
            self.sum_groups(&sum, binder)?;
        }
        let gradient = |own: &UnitUpdate| self.buffers[own.unit].trained().buffer;
        binder.begun.retain(|(buffer, _)| !ended.iter().any(|own| gradient(own) == *buffer));
        Ok(())
    }

    /// Every rank gets the sum.
    fn sum_whole(&self, unit: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        if self.units[unit].partial.is_empty() {
            return Ok(());
        }
        let dtype = self.training.precision.grads;
        let program = programs::all_reduce(&self.units[unit], dtype, self.mesh())?;
        let own = View { buffer: self.buffers[unit].trained().buffer, offset: 0 };
        self.push(unit, &program, own, (own, Write::Overwrite), binder);
        Ok(())
    }

    /// One rank gets the sum, and the others keep zeros.
    fn sum_on_root(&self, unit: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let dtype = self.training.precision.grads;
        let program = programs::to_root(&self.units[unit], dtype, self.mesh())?;
        let own = View { buffer: self.buffers[unit].trained().buffer, offset: 0 };
        self.push(unit, &program, own, (own, Write::Overwrite), binder);
        Ok(())
    }

    /// Every rank gets its part of the sum, where that part lies in the whole.
    fn scatter_whole(&self, unit: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let dtype = self.training.precision.grads;
        let program = programs::scatter_all(&self.units[unit], dtype, self.mesh())?;
        let gradient = self.buffers[unit].trained();
        let view = |offset| View { buffer: gradient.buffer, offset };
        let into = view(gradient.at * dtype.size());
        self.push(unit, &program, view(0), (into, Write::Overwrite), binder);
        Ok(())
    }

    /// The group's gradient is summed into the shard that accumulates.
    fn scatter_formed(
        &mut self,
        unit: usize,
        group: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let Some(from) = self.formed.remove(&(unit, group)) else { return Ok(()) };
        let program = match self.scatters[unit] {
            Some(known) => known,
            None => {
                let (dtype, spec) = (self.training.precision.grads, &self.units[unit]);
                let program = match spec.facts.reduction {
                    Reduction::IntoShard => programs::scatter(spec, dtype, self.mesh())?,
                    _ => programs::add(spec, dtype, self.mesh())?,
                };
                binder.script.program(self.training.world.library.placed(&program))
            }
        };
        self.scatters[unit] = Some(program);
        let view = |buffer| View { buffer, offset: 0 };
        let into = view(self.buffers[unit].trained().buffer);
        let first = binder.begun.insert((into.buffer, into.offset));
        let write = if first { Write::Overwrite } else { Write::Add };
        self.reduce(unit, program, view(from), (into, write), binder);
        Ok(())
    }

    /// Axes that do not shard it are summed once, at the end.
    fn sum_shard(&self, unit: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let dtype = self.training.precision.grads;
        if let Some(program) = programs::sum_shard(&self.units[unit], dtype, self.mesh())? {
            let own = View { buffer: self.buffers[unit].trained().buffer, offset: 0 };
            self.push(unit, &program, own, (own, Write::Overwrite), binder);
        }
        Ok(())
    }

    /// Parameters that stage groups share have summands on each of them.
    fn sum_groups(&self, sum: &SharedSum, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let (unit, update) = (sum.unit, sum.update);
        let spec = &self.units[unit];
        let world = self.training.world;
        if let Some(tie) = Tie::of(world, spec) {
            let (training, buffers) = (self.training, &self.buffers[unit]);
            let brought = |group| self.brought(unit, Some(group), update);
            let own = TiedSum { training, unit, buffers, update };
            return own.append(spec, tie, brought, binder);
        }
        let stage_groups: Vec<&StageGroup<'_>> =
            spec.stage_groups.iter().map(|&stage_group| &world.stage_groups[stage_group]).collect();
        let (mesh, members) = together(&stage_groups)?;
        let dtype = self.training.precision.grads;
        let program = programs::sum_groups(spec, dtype, self.mesh(), &mesh)?;
        let program = binder.script.program_of(world.library.placed(&program), members);
        let gradient = self.buffers[unit].trained();
        let own = View { buffer: gradient.buffer, offset: gradient.at * dtype.size() };
        self.reduce(unit, program, own, (own, Write::Overwrite), binder);
        Ok(())
    }

    fn push(
        &self,
        unit: usize,
        program: &Program,
        from: View,
        into: (View, Write),
        binder: &mut Binder<'_>,
    ) {
        let program = binder.script.program(self.training.world.library.placed(program));
        self.reduce(unit, program, from, into, binder);
    }

    fn reduce(
        &self,
        unit: usize,
        program: ProgramId,
        from: View,
        into: (View, Write),
        binder: &mut Binder<'_>,
    ) {
        let run = Run { program, inputs: vec![from], outputs: vec![into], contributes: vec![] };
        binder.script.actions.push(Action {
            label: format!("reduce {}", self.units[unit].name),
            lane: Lane::Reduce,
            kind: Kind::Reduce { run, from: from.buffer, into: into.0.buffer },
            after: vec![],
        });
    }

    /// A buffer for one group's gradient of a unit, with its gaps set to zero.
    fn form(
        &self,
        unit: usize,
        group: usize,
        binder: &mut Binder<'_>,
    ) -> Result<BufferId, ScriptError> {
        let (dtype, spec) = (self.training.precision.grads, &self.units[unit]);
        let buffer = binder.script.buffer(Buffer {
            key: BufferKey::Formed { unit, group },
            category: Category::Communication,
            bytes: spec.elements * dtype.size(),
            source: Source::Script,
            tier: Tier::Device,
            padding: vec![],
        });
        let complete = vec![self.contributions(unit, |m| self.group(m) == group)];
        let gaps = spec.without_gradient(dtype);
        if !gaps.is_empty() {
            let label = format!("clear {}", spec.name);
            // They are summed with the rest.
            let world = self.training.world;
            programs::clear(world, &mut binder.script, &label, buffer, dtype, &gaps)?;
        }
        let (brought, left, shared) = (vec![], false, BTreeSet::new());
        let own = Accumulator { buffer, dtype, complete, brought, left, shared };
        binder.script.accumulators.push(own);
        Ok(buffer)
    }

    fn mesh(&self) -> &'a Mesh {
        self.training.stage_group().mesh
    }

    /// The units to whose gradients a run contributes.
    fn contributes_to(&self, turn: ScheduledRun) -> Vec<usize> {
        let params = self.formed_by(turn);
        let gives = |unit: &Unit| unit.members.iter().any(|m| params.contains(&m.param));
        (0..self.units.len()).filter(|&u| gives(&self.units[u])).collect()
    }

    /// The group of a micro-batch, identified by the group's first one.
    fn group(&self, microbatch: usize) -> usize {
        if self.together { 0 } else { microbatch }
    }

    /// What these micro-batches must contribute to a unit: one gradient from every instance that
    /// uses its parameters and whose forward they run.
    fn contributions(&self, unit: usize, these: impl Fn(usize) -> bool) -> Vec<Contribution> {
        self.contributions_of(self.training.at.stage_group, unit, these)
    }

    /// What another stage group, or all others, add to a unit for an update.
    fn brought(&self, unit: usize, group: Option<usize>, update: usize) -> Vec<Contribution> {
        let (world, own) = (self.training.world, self.training.at.stage_group);
        let others = self.units[unit].stage_groups.iter().copied().filter(|&other| other != own);
        let asked = others.filter(|&other| group.is_none_or(|only| only == other));
        let timing = self.timings[unit];
        let in_update = |m: usize| world.update_of(timing, m) == update;
        let of = |other| self.contributions_of(other, unit, in_update);
        asked.flat_map(of).collect()
    }

    fn contributions_of(
        &self,
        group: usize,
        unit: usize,
        these: impl Fn(usize) -> bool,
    ) -> Vec<Contribution> {
        let world = self.training.world;
        let (model, stage_group) = (world.model, world.stage_groups[group]);
        let mut all = Vec::new();
        for (instance, microbatch) in world.forwards(group).filter(|(_, own)| these(*own)) {
            let segment = model.instances()[instance].segment;
            for (local, &param) in &model.instances()[instance].params {
                let own = self.units[unit].members.iter().any(|m| m.param == param);
                if own && stage_group.compiled.gradient_type(segment, local).is_some() {
                    all.push(Contribution { param, instance, microbatch });
                }
            }
        }
        all
    }

    /// The parameters whose gradients a run gives.
    fn formed_by(&self, turn: ScheduledRun) -> Vec<usize> {
        let instance = &self.training.world.model.instances()[turn.instance];
        let program = self.training.stage_group().compiled.program(instance.segment, turn.part);
        let ports = program.outputs_with(Role::Gradient);
        ports.filter_map(|port| instance.params.get(&port.name).copied()).collect()
    }
}

/// A sum over the stage groups that share a unit.
struct SharedSum {
    /// The update that it is for.
    update: usize,
    /// The level of the last contribution of any stage group.
    level: usize,
    unit: usize,
}

/// The sums over stage groups: for one update after the other, ordered by the level of the last turn of any stage group
/// that works on an instance which has the unit; if holders take turns, of the last turn here.
fn shared(
    world: &World<'_>,
    own: usize,
    units: &[Unit],
    timings: &[UnitTiming],
) -> VecDeque<SharedSum> {
    let level = |number: usize, update: usize| {
        let unit = &units[number];
        let uses = |turn: &ScheduledRun| {
            let params = &world.model.instances()[turn.instance].params;
            let own = |param: &usize| unit.members.iter().any(|member| member.param == *param);
            let ends = timings[number].holders == 1 || !matches!(turn.part, Part::F | Part::R);
            ends && world.update_of(timings[number], turn.microbatch) == update
                && params.values().any(own)
        };
        let last = |&group: &usize| {
            let turn = world.stage_groups[group].turns.iter().rposition(uses)?;
            Some(world.links.levels[group][turn])
        };
        let counts = |group: &&usize| timings[number].holders == 1 || **group == own;
        unit.stage_groups.iter().filter(counts).filter_map(last).max()
    };
    let mut sums = Vec::new();
    for unit in (0..units.len()).filter(|&unit| units[unit].stage_groups.len() > 1) {
        let count = |group: &usize| world.update_count(timings[unit], *group);
        for update in 0..units[unit].stage_groups.iter().map(count).fold(0, usize::max) {
            let level = level(unit, update);
            let level = level.expect("a stage group that holds a unit works on its parameters");
            sums.push(SharedSum { update, level, unit });
        }
    }
    let first = |unit: usize| units[unit].members.iter().map(|member| member.param).min();
    sums.sort_by_key(|sum| (sum.update, sum.level, first(sum.unit)));
    sums.into()
}
