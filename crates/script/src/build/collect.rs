//! Weights that lie in shards are gathered before the runs that read them, and released after.
//!
//! The gathers of a run are issued some runs ahead, on their own lane, so that they overlap with
//! compute; a limit on how many runs' units are gathered at a time keeps memory small.

use std::collections::BTreeSet;

use phalanx_ir::DType;
use phalanx_spmd::{Gathering, Keep};

use super::versions::VersionPlaces;
use super::{
    Action, Binder, Buffer, BufferId, Category, Kind, Lane, Port, Role, Run, ScheduledRun,
    ScriptError, StageGroup, Tier, Unit, View, World, Write, programs,
};
use crate::action::{ProgramId, Source};
use crate::key::BufferKey;
use crate::schedule::Part;

/// Inserts gathers and releases around the runs of a schedule.
pub(super) struct Collector<'a> {
    reader: Reader<'a>,
    weights: DType,
    gathered_ranges: Vec<GatheredRange>,
    /// For each unit: the program that gathers it, once it is needed.
    programs: Vec<Option<ProgramId>>,
    /// For each run of the schedule: the actions that release its units.
    releases: Vec<Vec<usize>>,
}

/// Which run reads which weights.
#[derive(Clone, Copy)]
struct Reader<'a> {
    world: &'a World<'a>,
    stage_group: StageGroup<'a>,
    units: &'a [Unit],
}

/// The live range of one gathered unit, in runs of the schedule.
struct GatheredRange {
    unit: usize,
    first: usize,
    last: usize,
    buffer: Option<BufferId>,
}

impl<'a> Collector<'a> {
    /// For the runs of a stage group, which read these units, in elements of the type `weights`.
    pub(super) fn new(
        world: &'a World<'a>,
        stage_group: usize,
        units: &'a [Unit],
        weights: DType,
    ) -> Self {
        let stage_group = world.stage_groups[stage_group];
        let reader = Reader { world, stage_group, units };
        let releases = vec![Vec::new(); stage_group.turns.len()];
        let programs = vec![None; units.len()];
        Self { reader, weights, gathered_ranges: gathered_ranges(reader), programs, releases }
    }

    /// Issues the gathers that are due before a run, and binds its weights to the gathered buffers. `versions` says
    /// where what a rank keeps of each unit lies.
    pub(super) fn before(
        &mut self,
        run: usize,
        versions: &VersionPlaces<'_>,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        for index in 0..self.gathered_ranges.len() {
            let GatheredRange { unit, first, buffer, .. } = self.gathered_ranges[index];
            // No further ahead than the limit allows: the release that a gather waits for must have
            // been issued before it.
            let Some((prefetch, in_flight, _)) = for_runs(&self.reader.units[unit]) else {
                continue;
            };
            let due = run + prefetch.min(in_flight.saturating_sub(1));
            let turn = self.reader.stage_group.turns[first];
            if buffer.is_none() && first <= due && versions.exists(unit, turn) {
                let shard = versions.read(unit, turn);
                self.gather((index, shard), in_flight, binder)?;
            }
        }
        for stay in &self.gathered_ranges {
            if let (true, Some(buffer)) = (stay.first <= run && run <= stay.last, stay.buffer) {
                binder.weights.set(&self.reader.units[stay.unit], buffer, self.weights);
            }
        }
        Ok(())
    }

    /// Releases the units that no later run of the same live range reads.
    pub(super) fn after(&mut self, run: usize, binder: &mut Binder<'_>) {
        for stay in self.gathered_ranges.iter().filter(|s| s.last == run) {
            let Some(buffer) = stay.buffer else { continue };
            self.releases[stay.first].push(binder.script.actions.len());
            binder.script.actions.push(Action {
                label: format!("release {}", self.reader.units[stay.unit].name),
                lane: Lane::Compute,
                kind: Kind::Release { buffer },
                after: vec![],
            });
        }
    }

    /// Appends the gather of a live range. The units of at most `in_flight` runs are gathered at a
    /// time: those of the run before must have been released.
    fn gather(
        &mut self,
        (index, shard): (usize, BufferId),
        in_flight: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let GatheredRange { unit: number, first, .. } = self.gathered_ranges[index];
        let Reader { world, stage_group, units } = self.reader;
        let (unit, dtype, script) = (&units[number], self.weights, &mut binder.script);
        let buffer = script.buffer(Buffer {
            key: BufferKey::Gathered { unit: number, run: first },
            category: Category::Communication,
            bytes: unit.elements * dtype.size(),
            source: Source::Script,
            tier: Tier::Device,
            padding: vec![],
        });
        let program = match self.programs[number] {
            Some(known) => known,
            None => script.program(world.library.placed(&programs::gather(
                unit,
                dtype,
                stage_group.mesh,
            )?)),
        };
        self.programs[number] = Some(program);
        let view = |buffer| View { buffer, offset: 0 };
        let run = Run {
            program,
            inputs: vec![view(shard)],
            outputs: vec![(view(buffer), Write::Overwrite)],
            contributes: vec![],
        };
        let after = match first.checked_sub(in_flight) {
            Some(earlier) => self.releases[earlier].clone(),
            None => vec![],
        };
        script.actions.push(Action {
            label: format!("gather {}", unit.name),
            lane: Lane::Gather,
            kind: Kind::Gather(run),
            after,
        });
        self.gathered_ranges[index].buffer = Some(buffer);
        Ok(())
    }
}

/// How a unit is gathered for runs, if it is: how many runs ahead, how many at a time, and for how long.
fn for_runs(unit: &Unit) -> Option<(usize, usize, Keep)> {
    match unit.facts.gathering {
        Gathering::ForRuns { prefetch, in_flight, keep } => Some((prefetch, in_flight, keep)),
        Gathering::Never | Gathering::AfterUpdate => None,
    }
}

/// The live ranges of gathered units, in order of first use.
fn gathered_ranges(reader: Reader<'_>) -> Vec<GatheredRange> {
    if reader.units.iter().all(|unit| for_runs(unit).is_none()) {
        return Vec::new();
    }
    let turns = reader.stage_group.turns;
    let sweeps = reader.world.updates.is_none() && sweeps(turns);
    let mut gathered_ranges: Vec<GatheredRange> = Vec::new();
    for (run, turn) in turns.iter().enumerate() {
        for unit in read_units(reader, *turn) {
            let open = gathered_ranges.iter_mut().rev().find(|s| s.unit == unit);
            match open {
                Some(stay)
                    if sweeps && swept(turns, stay.last, run)
                        || follows(turns, stay.last, run)
                        || kept(reader, unit, stay.first, run) =>
                {
                    stay.last = run;
                }
                _ => gathered_ranges.push(GatheredRange {
                    unit,
                    first: run,
                    last: run,
                    buffer: None,
                }),
            }
        }
    }
    gathered_ranges
}

/// Whether a stage group runs all its micro-batches through a chunk of layers, in one direction,
/// before anything else, as in breadth-first pipelines. Then a chunk's units stay gathered for all
/// of them, and are gathered once for each direction; their gradients are summed over ranks once.
pub(super) fn sweeps(turns: &[ScheduledRun]) -> bool {
    // Consecutive instances belong to one chunk.
    let held: BTreeSet<usize> = turns.iter().map(|turn| turn.instance).collect();
    let chunk = |instance: usize| (0..instance).rev().find(|before| !held.contains(before));
    let sweep = |run: usize| (goes_back(turns, run), chunk(turns[run].instance));
    let mut seen = BTreeSet::new();
    let mut last = None;
    let once =
        (0..turns.len()).map(sweep).all(|own| last.replace(own) == Some(own) || seen.insert(own));
    once && turns.iter().any(|turn| turn.part != Part::F)
}

/// Whether a run belongs to the backward pass: a backward, or a forward that is recomputed for one.
/// The forward of the model's last instance comes after the recomputed ones.
fn goes_back(turns: &[ScheduledRun], run: usize) -> bool {
    let (own, before) = (turns[run], run.checked_sub(1).map(|before| turns[before]));
    let behind = before.is_some_and(|t| (t.part, t.microbatch) == (Part::R, own.microbatch));
    own.part != Part::F || behind
}

/// Whether two runs that read a unit belong to the same pass (forward or backward), for different
/// micro-batches or, where the first is recomputed for the second, for the same one.
fn swept(turns: &[ScheduledRun], earlier: usize, run: usize) -> bool {
    let (a, b) = (turns[earlier], turns[run]);
    let back = goes_back(turns, earlier);
    let apart = a.microbatch != b.microbatch || (back && matches!(a.part, Part::F | Part::R));
    apart && back == goes_back(turns, run)
}

/// Whether a run directly follows another run that reads the same unit in the same pass (forward or
/// backward): a unit of several layers gathered_ranges gathered for all of them.
fn follows(turns: &[ScheduledRun], earlier: usize, run: usize) -> bool {
    let way = |run: usize| (turns[run].microbatch, goes_back(turns, run));
    earlier + 1 == run && way(earlier) == way(run)
}

/// Whether a unit that was gathered for one run is kept for a later one that reads it.
fn kept(reader: Reader<'_>, unit: usize, first: usize, run: usize) -> bool {
    let (turns, unit) = (reader.stage_group.turns, &reader.units[unit]);
    let same = turns[first].microbatch == turns[run].microbatch;
    let turn = turns[first].part == Part::F && turns[run].part != Part::F;
    match for_runs(unit) {
        None | Some((_, _, Keep::Run)) => false,
        Some((_, _, Keep::Backward)) => same && turn,
        Some((_, _, Keep::Root)) => same && turn && is_root(reader, unit, turns[run].instance),
    }
}

/// Whether a unit belongs to a segment that is not repeated.
fn is_root(reader: Reader<'_>, unit: &Unit, instance: usize) -> bool {
    let instances = reader.world.model.instances();
    let alone = |segment: usize| instances.iter().filter(|i| i.segment == segment).count() == 1;
    let own = &instances[instance];
    alone(own.segment) && unit.members.iter().any(|m| own.params.values().any(|&p| p == m.param))
}

/// The units whose parameters a run reads and that are gathered for it, in order. Where nothing is kept
/// from run to run (ZeRO's third stage), a segment's backward has all its parameters gathered, as its
/// forward had.
fn read_units(reader: Reader<'_>, turn: ScheduledRun) -> Vec<usize> {
    let instance = &reader.world.model.instances()[turn.instance];
    let program = reader.stage_group.compiled.program(instance.segment, turn.part);
    let of = |port: &Port| instance.params.get(&port.name).copied();
    let read: BTreeSet<usize> = program.inputs_with(Role::Param).filter_map(of).collect();
    let formed: BTreeSet<usize> = program.outputs_with(Role::Gradient).filter_map(of).collect();
    let reads = |unit: &Unit| {
        let again = match for_runs(unit) {
            None => return false,
            Some((_, _, keep)) => keep == Keep::Run && turn.part != Part::W,
        };
        let mut params = unit.members.iter().map(|member| member.param);
        params.any(|param| read.contains(&param) || (again && formed.contains(&param)))
    };
    (0..reader.units.len()).filter(|&u| reads(&reader.units[u])).collect()
}
