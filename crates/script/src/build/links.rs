//! What stage groups of a pipeline send each other, and when a sent buffer is free again.
//!
//! A boundary value that an instance of another stage group reads is sent there, and its cotangent
//! comes back; what several stage groups read goes from one to the next (`flow.rs`). A send ends when its receiver has taken the value, which the sender does not see.
//! But when the sender receives something that was computed after the value was used, the value
//! must have arrived: from then on the buffer's memory can be reused. So a stage group waits for
//! another one only for data, and a schedule without deadlock cannot deadlock for lack of memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_call::Value;
use phalanx_ir::{Model, Port, Role};

use super::crossing::{Crossing, crossings};
use super::flow::{Flow, Stop};
use super::wiring::Wiring;
use crate::error::ScriptError;
use crate::hash::QuickSet;
use crate::library::Library;
use crate::rolling::RollingTurns;
use crate::schedule::ScheduledRun;
use crate::stage_group::StageGroup;

/// A turn of a stage group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Point {
    pub(super) stage_group: usize,
    pub(super) turn: usize,
}

/// The direction of a value through the model. Each direction has its own channel between two stage
/// groups.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// A value that one stage group has and another one reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Link {
    /// The turn after which it is sent.
    pub(super) from: Point,
    /// The turn that needs it; after the last one if the next script of a row does.
    pub(super) to: Point,
    /// What that turn is.
    pub(super) reader: ScheduledRun,
    /// The receiver's turn before which it is received: a channel delivers in order, so no later than
    /// what was sent behind it.
    pub(super) by: usize,
    pub(super) direction: Direction,
    /// The value, as the receiver holds it. Its port has the same name where it is produced and where it
    /// is read.
    pub(super) value: Value,
    /// The value, as the sender holds it.
    pub(super) held: Value,
    /// The sender's last turn that reads it itself.
    used: usize,
    /// The sender's turn after which it has surely arrived, and is no longer read; none if that is known
    /// only at the step's end.
    pub(super) settled: Option<usize>,
    /// The index of its crossing.
    pub(super) crossing: usize,
}

/// Everything that stage groups send each other in a step, and how: found once for all ranks.
#[derive(Debug, Default)]
pub(super) struct Links {
    /// For each stage group: what it receives, in the order in which it is needed.
    pub(super) incoming: Vec<Vec<Link>>,
    /// For each stage group: what it sends, in the order in which it is produced.
    pub(super) outgoing: Vec<Vec<Link>>,
    /// How values cross between stage groups.
    pub(super) crossings: Vec<Crossing>,
    /// For each turn of each stage group: how many turns, one after the other, end with it at least.
    pub(super) levels: Vec<Vec<usize>>,
    /// Where each instance runs.
    pub(super) flow: Flow,
}

impl Links {
    pub(super) fn new(
        model: &Model,
        stage_groups: &[StageGroup<'_>],
        library: &Library,
        wiring: &dyn Fn(usize) -> Arc<Wiring>,
        rolling: Option<&RollingTurns>,
        real: usize,
    ) -> Result<Self, ScriptError> {
        let mut links = Self {
            incoming: vec![Vec::new(); stage_groups.len()],
            outgoing: vec![Vec::new(); stage_groups.len()],
            crossings: Vec::new(),
            levels: Vec::new(),
            flow: Flow::default(),
        };
        if stage_groups.len() < 2 {
            return Ok(links);
        }
        links.flow = Flow::new(model, stage_groups, rolling, real)?;
        let mut all = found(&links.flow, model, stage_groups, wiring, rolling)?;
        receive_in_order(&mut all);
        links.levels = settle(stage_groups, &mut all)?;
        links.crossings = crossings(model, stage_groups, library, &mut all)?;
        for link in all {
            links.outgoing[link.from.stage_group].push(link.clone());
            links.incoming[link.to.stage_group].push(link);
        }
        let incoming = |a: &Link, b: &Link| (a.by, a.sent()).cmp(&(b.by, b.sent()));
        links.incoming.iter_mut().for_each(|links| links.sort_by(incoming));
        let outgoing = |a: &Link, b: &Link| a.sent().cmp(&b.sent());
        links.outgoing.iter_mut().for_each(|links| links.sort_by(outgoing));
        Ok(links)
    }
}

impl Link {
    /// The order in which values are sent.
    fn sent(&self) -> (Point, &str) {
        (self.from, &self.value.port)
    }
}

/// What each turn of each stage group receives from others. A value is received once, before the
/// first turn that reads it; in a row of scripts, by the script that sends it.
fn found(
    flow: &Flow,
    model: &Model,
    stage_groups: &[StageGroup<'_>],
    wiring: &dyn Fn(usize) -> Arc<Wiring>,
    rolling: Option<&RollingTurns>,
) -> Result<Vec<Link>, ScriptError> {
    let mut found: Vec<Link> = Vec::new();
    for (stage_group, own) in stage_groups.iter().enumerate() {
        let wiring = wiring(stage_group);
        let reads = Reads { flow, model, stage_groups, wiring: &wiring };
        let mut known = QuickSet::default();
        let later = rolling.map_or(&[][..], |rolling| &rolling.next[stage_group]);
        let later = later.iter().map(|step| (own.turns.len(), step));
        for (turn, step) in own.turns.iter().enumerate().chain(later) {
            let to = Point { stage_group, turn };
            for link in reads.received(to, *step)? {
                if known.insert(link.value.clone()) {
                    found.push(link);
                }
            }
        }
    }
    Ok(found)
}

/// What the turns of a stage group read from others.
struct Reads<'a> {
    flow: &'a Flow,
    model: &'a Model,
    stage_groups: &'a [StageGroup<'a>],
    wiring: &'a Wiring,
}

impl Reads<'_> {
    fn received(&self, to: Point, turn: ScheduledRun) -> Result<Vec<Link>, ScriptError> {
        let ScheduledRun { instance, microbatch, part } = turn;
        // Of what the next script of a row runs, only forwards read what this one sends.
        let here = to.turn < self.stage_groups[to.stage_group].turns.len();
        let segment = self.model.instances()[instance].segment;
        let program = self.stage_groups[to.stage_group].compiled.program(segment, part);
        let mut links = Vec::new();
        for port in program.inputs_with(Role::Boundary) {
            let Some(source) = self.wiring.producer(instance, &port.name) else { continue };
            let stops = self.stops(source, &port.name, microbatch)?;
            let own = stops.iter().position(|stop| stop.readers.contains(&instance));
            let Some((own, before)) = own.and_then(|own| Some((own, own.checked_sub(1)?))) else {
                continue;
            };
            let first = if before == 0 { source } else { stops[before].readers[0] };
            let from = self.flow.place(first, microbatch, Direction::Forward);
            // Another script of the row makes it.
            if from.is_none() && self.flow.runs_elsewhere(first, microbatch) {
                continue;
            }
            let from = from.ok_or_else(|| self.nowhere(first, microbatch))?;
            let link = self.link([from, to], Direction::Forward, &port.name, turn);
            links.push(link([&stops[before], &stops[own]]));
        }
        for port in program.inputs_with(Role::Cotangent).filter(|_| here) {
            let stops = self.summed(instance, boundary(port), microbatch)?;
            // Where the producer's stage group reads the value too, it adds to what came.
            if let [own, next, ..] = &stops[..]
                && own.readers.is_empty()
            {
                links.push(self.sum([next, own], to, &port.name, turn)?);
            }
        }
        for port in program.outputs_with(Role::Cotangent).filter(|_| here) {
            let boundary = boundary(port);
            let Some(source) = self.wiring.producer(instance, boundary) else { continue };
            let stops = self.summed(source, boundary, microbatch)?;
            let own = stops.iter().position(|stop| stop.readers.contains(&instance));
            if let Some([own, next]) = own.and_then(|own| stops.get(own..own + 2)) {
                links.push(self.sum([next, own], to, &port.name, turn)?);
            }
        }
        Ok(links)
    }

    /// The stops of a value, with all that read it there.
    fn stops(&self, source: usize, boundary: &str, mb: usize) -> Result<Vec<Stop>, ScriptError> {
        let stops = self.flow.stops(self.wiring, source, boundary, mb);
        stops.map_err(|instance| self.nowhere(instance, mb))
    }

    /// The stops of its cotangent, in the order of the value: where it is read by instances that have a share in
    /// it, and first where the value is produced.
    fn summed(&self, source: usize, boundary: &str, mb: usize) -> Result<Vec<Stop>, ScriptError> {
        let mut stops = self.stops(source, boundary, mb)?;
        let adding = self.wiring.differentiated(source, boundary);
        for stop in &mut stops {
            stop.readers.retain(|reader| adding.contains(reader));
        }
        let mut index = 0;
        stops.retain(|stop| {
            index += 1;
            index == 1 || !stop.readers.is_empty()
        });
        Ok(stops)
    }

    /// The sum of a cotangent, from one stop back to the one before.
    fn sum(
        &self,
        stops: [&Stop; 2],
        to: Point,
        port: &str,
        reader: ScheduledRun,
    ) -> Result<Link, ScriptError> {
        let mb = reader.microbatch;
        let places = stops[0].readers.iter();
        let places = places.map(|&reader| self.place(reader, mb, Direction::Backward));
        let places: Vec<Point> = places.collect::<Result<_, _>>()?;
        let last = places.into_iter().max().expect("a stop of a cotangent has readers");
        Ok(self.link([last, to], Direction::Backward, port, reader)(stops))
    }

    fn link(
        &self,
        [from, to]: [Point; 2],
        direction: Direction,
        port: &str,
        reader: ScheduledRun,
    ) -> impl Fn([&Stop; 2]) -> Link {
        let microbatch = reader.microbatch;
        let turns = self.stage_groups[from.stage_group].turns;
        let port: Arc<str> = port.into();
        move |[giver, taker]| {
            let [held, value] = [giver, taker].map(|stop| {
                let (instance, port) = (stop.holder, port.clone());
                Value { instance, port, microbatch, again: false }
            });
            let reads = |turn: &ScheduledRun| {
                turn.microbatch == microbatch && giver.readers.contains(&turn.instance)
            };
            // A cotangent is read by nobody else.
            let used = match direction {
                Direction::Forward if !giver.readers.is_empty() => turns.iter().rposition(reads),
                _ => None,
            };
            let (used, by) = (used.unwrap_or(from.turn), to.turn);
            let (settled, crossing) = (None, 0);
            Link { from, to, reader, by, direction, value, held, used, settled, crossing }
        }
    }

    fn place(&self, instance: usize, mb: usize, way: Direction) -> Result<Point, ScriptError> {
        let place = self.flow.place(instance, mb, way);
        place.ok_or_else(|| self.nowhere(instance, mb))
    }

    fn nowhere(&self, instance: usize, microbatch: usize) -> ScriptError {
        let name = &self.model.instances()[instance].name;
        ScriptError::Schedule(format!("no stage group runs `{name}` of micro-batch {microbatch}"))
    }
}

/// The boundary value that a cotangent belongs to.
fn boundary(port: &Port) -> &str {
    port.of.as_deref().expect("a cotangent names its boundary value")
}

/// A channel delivers in order, so what is sent before something else is received no later.
fn receive_in_order(links: &mut [Link]) {
    let mut channels: BTreeMap<(usize, usize, Direction), Vec<&mut Link>> = BTreeMap::new();
    for link in links {
        let channel = (link.from.stage_group, link.to.stage_group, link.direction);
        channels.entry(channel).or_default().push(link);
    }
    for links in channels.values_mut() {
        links.sort_by(|a, b| a.sent().cmp(&b.sent()));
        links.iter_mut().rev().fold(usize::MAX, |next, link| {
            link.by = link.by.min(next);
            link.by
        });
    }
}

/// Finds when each sent value is known to have arrived, with vector clocks: for every turn, how
/// many turns of each stage group are over when it begins. Returns the levels of all turns.
fn settle(
    stage_groups: &[StageGroup<'_>],
    links: &mut [Link],
) -> Result<Vec<Vec<usize>>, ScriptError> {
    let mut needs: BTreeMap<Point, Vec<Point>> = BTreeMap::new();
    for link in links.iter() {
        needs.entry(link.to).or_default().push(link.from);
    }
    let mut clocks: Vec<Vec<Vec<usize>>> = vec![Vec::new(); stage_groups.len()];
    let mut levels: Vec<Vec<usize>> = vec![Vec::new(); stage_groups.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for stage_group in 0..stage_groups.len() {
            while clocks[stage_group].len() < stage_groups[stage_group].turns.len() {
                let turn = clocks[stage_group].len();
                let needed = needs.get(&Point { stage_group, turn }).map_or(&[][..], Vec::as_slice);
                if needed.iter().any(|p| clocks[p.stage_group].len() <= p.turn) {
                    break;
                }
                let mut clock =
                    clocks[stage_group].last().cloned().unwrap_or(vec![0; stage_groups.len()]);
                clock[stage_group] = turn;
                for point in needed {
                    for (own, other) in clock.iter_mut().zip(&clocks[point.stage_group][point.turn])
                    {
                        *own = (*own).max(*other);
                    }
                    clock[point.stage_group] = clock[point.stage_group].max(point.turn + 1);
                }
                clocks[stage_group].push(clock);
                let before = needed.iter().map(|p| &levels[p.stage_group][p.turn]);
                let before = before.chain(levels[stage_group].last()).map(|level| level + 1);
                let level = before.fold(0, usize::max);
                levels[stage_group].push(level);
                moved = true;
            }
        }
    }
    let stuck = (0..stage_groups.len()).find(|&d| clocks[d].len() < stage_groups[d].turns.len());
    if let Some(stage_group) = stuck {
        let turn = stage_groups[stage_group].turns[clocks[stage_group].len()];
        return Err(ScriptError::Schedule(format!(
            "stage group {stage_group} waits forever before {} of instance {}, micro-batch {}",
            turn.part, turn.instance, turn.microbatch
        )));
    }
    for link in links {
        let known = |clock: &Vec<usize>| clock[link.to.stage_group] > link.to.turn;
        let own = &clocks[link.from.stage_group];
        // Clocks only grow.
        let first = own.partition_point(|clock| !known(clock));
        link.settled = (first < own.len()).then_some(first.max(link.used));
    }
    Ok(levels)
}
