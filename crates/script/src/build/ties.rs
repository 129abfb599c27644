//! Sums of gradients that stage groups of different shapes share: tied weights.
//!
//! Where meshes are the same, ranks at the same place hold the same elements, and one collective sums them. Otherwise
//! the first stage group that has the parameter receives what each other one adds, in its own layout, adds it to its own
//! in their order, and sends the sum to all. So every copy gets the same bits, and for each other stage group the
//! gradient crosses twice, however many ranks hold it: what ranks send each other follows from both types, as for
//! boundary values.

use std::ops::Range;

use phalanx_call::{Message, Value};
use phalanx_ir::DType;
use phalanx_spmd::Share;

use super::messages::gaps;
use super::{
    Action, Binder, Buffer, Category, Kind, Lane, RankOnMesh, RankPlace, Run, ScriptError, Source,
    Tier, TrainingScript, Unit, UnitBuffers, View, World, Write, hold, programs,
};
use crate::action::{Accumulator, BufferId, Contribution, Script};
use crate::edge::{EdgePiece, edge_of_parts};
use crate::key::BufferKey;
use crate::message::blocks;
use crate::unit;

/// The channel of sums. Lower channels carry the model's values and parked micro-batches.
pub(super) const TIED: u32 = 4;

/// A parameter of stage groups on different meshes.
#[derive(Debug)]
pub(crate) struct Tie {
    param: usize,
    /// An instance that reads it, and its name there.
    value: Value,
    /// The stage groups that have it, with the unit that it is there. The first one adds up.
    ends: Vec<(usize, Unit)>,
    /// For each of the others: what it sends to the first one, and what it gets from there.
    ways: Vec<[Vec<EdgePiece>; 2]>,
}

/// Whether a parameter is in stage groups on different meshes.
pub(crate) fn is_apart(world: &World<'_>, param: usize) -> bool {
    let mut meshes = world.holders[param].iter().map(|&group| world.stage_groups[group].mesh);
    let first = meshes.next();
    meshes.any(|mesh| Some(mesh) != first)
}

/// What stage groups on different meshes send each other of the parameters that they share.
pub(super) fn ties(world: &World<'_>) -> Result<Vec<Tie>, ScriptError> {
    let params = (0..world.model.params().len()).filter(|&param| is_apart(world, param));
    params.filter_map(|param| tie(world, param).transpose()).collect()
}

/// The same for one of them; nothing if it is not trained.
fn tie(world: &World<'_>, param: usize) -> Result<Option<Tie>, ScriptError> {
    let unit = |&group: &usize| Ok((group, unit::alone(world, group, param)?));
    let ends: Vec<(usize, Unit)> =
        world.holders[param].iter().map(unit).collect::<Result<_, ScriptError>>()?;
    let mut uses = world.model.instances().iter().enumerate().flat_map(|(number, instance)| {
        instance.params.iter().map(move |(local, own)| (*own, number, local))
    });
    let used = uses.find(|(own, ..)| *own == param);
    let trained = ends.iter().all(|(_, unit)| unit.members[0].trained);
    let (Some((_, instance, local)), Some((first, others)), true) =
        (used, ends.split_first(), trained)
    else {
        return Ok(None);
    };
    let both = |other| Ok([pieces(world, other, first)?, pieces(world, first, other)?]);
    let ways = others.iter().map(both).collect::<Result<_, ScriptError>>()?;
    let value = Value { instance, port: local.as_str().into(), microbatch: 0, again: false };
    Ok(Some(Tie { param, value, ends, ways }))
}

/// What ranks of one stage group send to those of another.
fn pieces(
    world: &World<'_>,
    from: &(usize, Unit),
    to: &(usize, Unit),
) -> Result<Vec<EdgePiece>, ScriptError> {
    let group = |(group, _): &(usize, Unit)| world.stage_groups[*group];
    let layout = |end: &(usize, Unit)| {
        let ty = unit::layout(world.model, group(end).compiled, end.1.members[0].param);
        ty.expect("a program reads a parameter that is trained")
    };
    let parts = |end: &(usize, Unit)| -> Vec<Range<usize>> {
        let mesh = group(end).mesh;
        (0..mesh.ranks()).map(|rank| part(&end.1, RankOnMesh { mesh, rank })).collect()
    };
    let [a, b] = [from, to].map(group);
    let ends = [(layout(from), a.mesh, a.ranks), (layout(to), b.mesh, b.ranks)];
    edge_of_parts(ends[0], ends[1], [&parts(from), &parts(to)])
}

/// The elements of a unit whose gradient a rank sums with other stage groups.
fn part(unit: &Unit, ranks: RankOnMesh<'_>) -> Range<usize> {
    match unit.facts.state.share {
        Share::Shard => hold::own(unit, ranks),
        Share::Root if !unit.updates(ranks) => 0..0,
        Share::Whole | Share::Root => 0..unit.elements,
    }
}

impl Tie {
    /// The sum of a unit, if it is one of a single parameter that stage groups of different shapes share.
    pub(super) fn of<'w>(world: &'w World<'_>, unit: &Unit) -> Option<&'w Tie> {
        world.ties.iter().find(|tie| unit.members.iter().any(|member| member.param == tie.param))
    }

    /// The messages of a rank, with this buffer: to or from the first stage group, or with the others if it is in that.
    fn messages(&self, world: &World<'_>, at: RankPlace, way: &TieWay) -> Vec<Message> {
        let group = &world.stage_groups[at.stage_group];
        let (mesh, rank) = (group.mesh, group.ranks[at.place]);
        let Some((_, unit)) = self.ends.iter().find(|(own, _)| *own == at.stage_group) else {
            return Vec::new();
        };
        let part = part(unit, RankOnMesh { mesh, rank: at.place });
        // A whole gradient lies where its block does, a shard at the beginning of its buffer.
        let before = match way.in_whole && !unit.facts.gradient.is_shard() {
            true => 0,
            false => part.start,
        };
        let adds_up = at.stage_group == self.ends[0].0;
        let with = |other: usize| way.with.is_none_or(|only| only == other);
        let ways = self.ends[1..].iter().zip(&self.ways).filter(|((other, _), _)| match adds_up {
            true => with(*other),
            false => *other == at.stage_group,
        });
        // What goes to the first stage group is the first of both.
        let own = ways.flat_map(|(_, ways)| &ways[usize::from(adds_up == way.sends)]);
        let own = own.filter(|piece| rank == if way.sends { piece.from } else { piece.to });
        let message = |piece: &EdgePiece| {
            let mut piece = piece.clone();
            for stretch in &mut piece.stretches {
                let end = if way.sends { &mut stretch.source } else { &mut stretch.target };
                *end -= before;
            }
            Message {
                peer: if way.sends { piece.to } else { piece.from },
                channel: TIED,
                value: self.value.clone(),
                dtype: way.dtype,
                blocks: blocks(&piece, way.sends),
            }
        };
        own.map(message).collect()
    }
}

/// Which messages of a sum.
struct TieWay {
    sends: bool,
    /// With this stage group alone.
    with: Option<usize>,
    /// Whether the buffer is that of the gradient.
    in_whole: bool,
    dtype: DType,
}

/// What another rank of a script's class sends and receives in an action that is part of such a sum; none if it is not.
pub(super) fn messages_of(
    world: &World<'_>,
    script: &Script,
    kind: &Kind,
    at: RankPlace,
) -> Option<Vec<Message>> {
    let (buffer, sends) = match kind {
        Kind::Send { buffer, .. } => (*buffer, true),
        Kind::Receive { buffer, .. } => (*buffer, false),
        _ => return None,
    };
    let own = script.accumulators.iter().find(|own| own.buffer == buffer)?;
    let param = own.brought.iter().flatten().next()?.param;
    let tie = world.ties.iter().find(|tie| tie.param == param)?;
    let (with, in_whole) = match script.buffers[buffer.0].key {
        BufferKey::Tied { stage_group, .. } => (Some(stage_group), false),
        _ => (None, true),
    };
    Some(tie.messages(world, at, &TieWay { sends, with, in_whole, dtype: own.dtype }))
}

/// A sum of one unit on one rank.
pub(super) struct TiedSum<'a> {
    pub(super) training: TrainingScript<'a>,
    /// The unit's number, and its buffers.
    pub(super) unit: usize,
    pub(super) buffers: &'a UnitBuffers,
    /// The update that it is for.
    pub(super) update: usize,
}

impl TiedSum<'_> {
    /// Appends the sum; `brought` tells what a stage group contributes.
    pub(super) fn append(
        &self,
        spec: &Unit,
        tie: &Tie,
        brought: impl Fn(usize) -> Vec<Contribution>,
        binder: &mut Binder<'_>,
    ) -> Result<(), ScriptError> {
        let (at, dtype) = (self.training.at, self.training.precision.grads);
        if !spec.updates(self.training.ranks()) {
            return Ok(());
        }
        let gradient = self.buffers.trained();
        let whole = |sends| TieWay { sends, with: None, in_whole: true, dtype };
        let script = &mut binder.script;
        if at.stage_group != tie.ends[0].0 {
            self.send(script, gradient.buffer, tie, &whole(true));
            self.receive(script, gradient.buffer, tie, &whole(false));
            return Ok(());
        }
        let own = View { buffer: gradient.buffer, offset: gradient.at * dtype.size() };
        let program = programs::as_it_is(spec, dtype, self.training.stage_group().mesh)?;
        let program = script.program(self.training.world.library.placed(&program));
        for &(other, _) in &tie.ends[1..] {
            let summand = self.summand(script, spec, tie, other, brought(other))?;
            let from = View { buffer: summand, offset: 0 };
            let outputs = vec![(own, Write::Add)];
            let run = Run { program, inputs: vec![from], outputs, contributes: vec![] };
            let label = format!("add {}", script.name(summand));
            let kind = Kind::Reduce { run, from: summand, into: gradient.buffer };
            script.actions.push(Action { label, lane: Lane::Reduce, kind, after: vec![] });
        }
        self.send(script, gradient.buffer, tie, &whole(true));
        Ok(())
    }

    /// Receives what another stage group adds.
    fn summand(
        &self,
        script: &mut Script,
        spec: &Unit,
        tie: &Tie,
        other: usize,
        brought: Vec<Contribution>,
    ) -> Result<BufferId, ScriptError> {
        let (dtype, world) = (self.training.precision.grads, self.training.world);
        let bytes = part(spec, self.training.ranks()).len() * dtype.size();
        let buffer = script.buffer(Buffer {
            key: BufferKey::Tied { unit: self.unit, stage_group: other, update: self.update },
            category: Category::Communication,
            bytes,
            source: Source::Script,
            tier: Tier::Device,
            padding: vec![],
        });
        let (complete, brought) = (vec![vec![]], vec![brought]);
        let (left, shared) = (false, Default::default());
        script.accumulators.push(Accumulator { buffer, dtype, complete, brought, left, shared });
        let way = TieWay { sends: false, with: Some(other), in_whole: false, dtype };
        // Padding is not sent. Ranks that have it in different places do the same.
        let places = 0..self.training.stage_group().ranks.len();
        let mut each = places.map(|place| RankPlace { place, ..self.training.at });
        if each.any(|at| !gaps(bytes, dtype, &tie.messages(world, at, &way)).is_empty()) {
            let label = format!("clear {}", script.name(buffer));
            let all = 0..bytes;
            programs::clear(world, script, &label, buffer, dtype, std::slice::from_ref(&all))?;
        }
        self.receive(script, buffer, tie, &way);
        Ok(buffer)
    }

    fn send(&self, script: &mut Script, buffer: BufferId, tie: &Tie, way: &TieWay) {
        let messages = tie.messages(self.training.world, self.training.at, way);
        let label = format!("send {}", script.name(buffer));
        let kind = Kind::Send { buffer, messages };
        script.actions.push(Action { label, lane: Lane::Send, kind, after: vec![] });
    }

    fn receive(&self, script: &mut Script, buffer: BufferId, tie: &Tie, way: &TieWay) {
        let messages = tie.messages(self.training.world, self.training.at, way);
        // It may reuse the memory of buffers that were released before, so it waits for these.
        let computed = |action: &Action| action.lane == Lane::Compute;
        let after = script.actions.iter().rposition(computed).into_iter().collect();
        let label = format!("receive {}", script.name(buffer));
        let kind = Kind::Receive { buffer, messages };
        script.actions.push(Action { label, lane: Lane::Receive, kind, after });
    }
}
