//! Weights that lie in shards are gathered before the runs that read them, and released after.
//!
//! The gathers of a run are issued some runs ahead, on their own lane, so that they overlap with
//! compute; a limit on how many runs' units are there at a time keeps memory small.

use std::collections::BTreeSet;

use phalanx_ir::DType;

use super::{
    Action, Binder, Buffer, BufferId, Category, Device, Kind, Lane, Model, Ranks, Role, Run,
    ScriptError, Sharded, Sharing, Training, Turn, Unit, View, Write, programs,
};
use crate::action::Source;
use crate::schedule::Part;
use phalanx_spmd::Keep;

/// The rank whose runs read the weights.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) model: &'a Model,
    pub(super) device: Device<'a>,
    /// The rank's place in the device's mesh.
    pub(super) place: usize,
    pub(super) weights: DType,
}

impl<'a> Reader<'a> {
    fn sharing(&self) -> &'a Sharing {
        self.device.sharing
    }

    fn ranks(&self) -> Ranks<'a> {
        Ranks { mesh: self.device.mesh, rank: self.place, sharing: self.device.sharing }
    }
}

/// Inserts gathers and releases around the runs of a schedule.
pub(super) struct Collector<'a> {
    reader: Reader<'a>,
    units: &'a [Unit],
    shards: Vec<BufferId>,
    stays: Vec<Stay>,
    /// By run of the schedule, the actions that release its units.
    releases: Vec<Vec<usize>>,
}

/// The time during which one gathered unit is there, in runs of the schedule.
struct Stay {
    unit: usize,
    first: usize,
    last: usize,
    buffer: Option<BufferId>,
}

impl<'a> Collector<'a> {
    pub(super) fn new(training: &Training<'a>, units: &'a [Unit], weights: &[BufferId]) -> Self {
        let Training { model, at, precision, .. } = *training;
        let (device, place) = (training.device(), at.place);
        let reader = Reader { model, device, place, weights: precision.weights };
        Self::of(reader, units, weights)
    }

    pub(super) fn of(reader: Reader<'a>, units: &'a [Unit], weights: &[BufferId]) -> Self {
        let stays = match reader.sharing().sharded() {
            Sharded::Weights => stays(reader, units),
            _ => Vec::new(),
        };
        let releases = vec![Vec::new(); reader.device.turns.len()];
        Self { reader, units, shards: weights.to_vec(), stays, releases }
    }

    /// Issues the gathers that are due before a run, and points its weights to what was gathered.
    pub(super) fn before(
        &mut self,
        run: usize,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let sharing = self.reader.sharing();
        // No further ahead than so many runs' units may be there: the release that a gather waits
        // for must have been issued before it.
        let due = run + sharing.prefetch.min(sharing.in_flight.saturating_sub(1));
        for index in 0..self.stays.len() {
            if self.stays[index].buffer.is_none() && self.stays[index].first <= due {
                self.gather(index, binder)?;
            }
        }
        for stay in &self.stays {
            if let (true, Some(buffer)) = (stay.first <= run && run <= stay.last, stay.buffer) {
                binder.weights.set(&self.units[stay.unit], buffer, self.reader.weights);
            }
        }
        Ok(())
    }

    /// Releases the units that no later run of their stay reads.
    pub(super) fn after(&mut self, run: usize, binder: &mut Binder<'_>) {
        for stay in self.stays.iter().filter(|s| s.last == run) {
            let Some(buffer) = stay.buffer else { continue };
            self.releases[stay.first].push(binder.script.actions.len());
            binder.script.actions.push(Action {
                label: format!("release {}", self.units[stay.unit].name),
                lane: Lane::Compute,
                kind: Kind::Release { buffer },
                after: vec![],
            });
        }
    }

    fn gather(&mut self, index: usize, binder: &mut Binder<'_>) -> Result<(), ScriptError> {
        let (stay, dtype) = (&self.stays[index], self.reader.weights);
        let unit = &self.units[stay.unit];
        let script = &mut binder.script;
        let buffer = script.buffer(Buffer {
            name: format!("{}/gathered@{}", unit.name, stay.first),
            category: Category::Communication,
            bytes: unit.elements * dtype.size(),
            source: Source::Script,
            tier: Default::default(),
            padding: vec![],
        });
        let program = programs::gather(unit, dtype, self.reader.ranks())?;
        let view = |buffer| View { buffer, offset: 0 };
        let run = Run {
            program: script.program(&program),
            inputs: vec![view(self.shards[stay.unit])],
            outputs: vec![(view(buffer), Write::Overwrite)],
            contributes: vec![],
        };
        // At most so many runs' units at a time: the one before that must have been released.
        let limit = self.reader.sharing().in_flight;
        let after = match stay.first.checked_sub(limit) {
            Some(earlier) => self.releases[earlier].clone(),
            None => vec![],
        };
        script.actions.push(Action {
            label: format!("gather {}", unit.name),
            lane: Lane::Gather,
            kind: Kind::Gather(run),
            after,
        });
        self.stays[index].buffer = Some(buffer);
        Ok(())
    }
}

/// When each unit is there, in order of first use.
fn stays(reader: Reader<'_>, units: &[Unit]) -> Vec<Stay> {
    let turns = reader.device.turns;
    let sweeps = sweeps(turns);
    let mut stays: Vec<Stay> = Vec::new();
    for (run, turn) in turns.iter().enumerate() {
        for unit in read_units(reader, units, *turn) {
            let open = stays.iter_mut().rev().find(|s| s.unit == unit);
            match open {
                Some(stay)
                    if sweeps && swept(turns, stay.last, run)
                        || kept(reader, units, unit, stay.first, run) =>
                {
                    stay.last = run;
                }
                _ => stays.push(Stay { unit, first: run, last: run, buffer: None }),
            }
        }
    }
    stays
}

/// Whether a device takes all its micro-batches through a chunk of layers, in one direction, before it
/// turns to anything else, as in breadth-first pipelines. Then a chunk's units stay for all of them,
/// and are gathered once for each direction; their gradients are summed over ranks once.
pub(super) fn sweeps(turns: &[Turn]) -> bool {
    // Instances that follow each other belong to one chunk.
    let held: BTreeSet<usize> = turns.iter().map(|turn| turn.instance).collect();
    let chunk = |instance: usize| (0..instance).rev().find(|before| !held.contains(before));
    let sweep = |run: usize| (goes_back(turns, run), chunk(turns[run].instance));
    let mut seen = BTreeSet::new();
    let mut last = None;
    let once =
        (0..turns.len()).map(sweep).all(|own| last.replace(own) == Some(own) || seen.insert(own));
    once && turns.iter().any(|turn| turn.part != Part::F)
}

/// Whether a run belongs to the way back: a backward, and a forward that is run for one. The model's last
/// instance goes forward behind those that do so again.
fn goes_back(turns: &[Turn], run: usize) -> bool {
    let (own, before) = (turns[run], run.checked_sub(1).map(|before| turns[before]));
    let behind = before.is_some_and(|t| (t.part, t.microbatch) == (Part::R, own.microbatch));
    own.part != Part::F || behind
}

/// Whether two runs that read a unit do so on one way, for different micro-batches or, where the first
/// is run for the second, for the same.
fn swept(turns: &[Turn], earlier: usize, run: usize) -> bool {
    let (a, b) = (turns[earlier], turns[run]);
    let back = goes_back(turns, earlier);
    let apart = a.microbatch != b.microbatch || (back && matches!(a.part, Part::F | Part::R));
    apart && back == goes_back(turns, run)
}

/// Whether a unit that was gathered for one run is kept for a later one that reads it.
fn kept(reader: Reader<'_>, units: &[Unit], unit: usize, first: usize, run: usize) -> bool {
    let turns = reader.device.turns;
    let same = turns[first].microbatch == turns[run].microbatch;
    let turn = turns[first].part == Part::F && turns[run].part != Part::F;
    match reader.sharing().keep {
        Keep::Run => false,
        Keep::Backward => same && turn,
        Keep::Root => same && turn && is_root(reader, &units[unit], turns[run].instance),
    }
}

/// Whether a unit belongs to a segment that is not repeated.
fn is_root(reader: Reader<'_>, unit: &Unit, instance: usize) -> bool {
    let instances = reader.model.instances();
    let alone = |segment: usize| instances.iter().filter(|i| i.segment == segment).count() == 1;
    let own = &instances[instance];
    alone(own.segment) && unit.members.iter().any(|m| own.params.values().any(|&p| p == m.param))
}

/// The units whose parameters a run reads, in order. Where nothing is kept from run to run (ZeRO's
/// third stage), a segment's backward has all its parameters gathered, as its forward had.
fn read_units(reader: Reader<'_>, units: &[Unit], turn: Turn) -> Vec<usize> {
    let instance = &reader.model.instances()[turn.instance];
    let program = reader.device.compiled.program(instance.segment, turn.part);
    let again = reader.sharing().keep == Keep::Run && turn.part != Part::W;
    let formed = program.outputs_with(Role::Gradient).filter(|_| again);
    let read: BTreeSet<usize> = (program.inputs_with(Role::Param).chain(formed))
        .filter_map(|port| instance.params.get(&port.name).copied())
        .collect();
    let reads = |unit: &Unit| unit.members.iter().any(|m| read.contains(&m.param));
    (0..units.len()).filter(|&u| reads(&units[u])).collect()
}
