//! What stage groups of a pipeline send each other, and when a sent buffer is free again.
//!
//! A boundary value that an instance of another stage group reads is sent there, and its cotangent
//! comes back. A send ends when its receiver has taken the value, which the sender does not see.
//! But when the sender receives something that was computed after the value was used, the value
//! must have arrived: from then on the buffer's memory can be reused. So a stage group waits for
//! another one only for data, and a schedule without deadlock cannot deadlock for lack of memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_call::Value;
use phalanx_ir::{Model, Role};

use super::crossing::{Crossing, crossings};
use super::wiring::Wiring;
use crate::error::ScriptError;
use crate::hash::{QuickMap, QuickSet};
use crate::library::Library;
use crate::schedule::{Part, ScheduledRun};
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

/// A value that one stage group produces and another one reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Link {
    /// The turn after which it is sent.
    pub(super) from: Point,
    /// The turn before which it is received.
    pub(super) to: Point,
    pub(super) direction: Direction,
    /// The value. Its port has the same name where it is produced and where it is read.
    pub(super) value: Value,
    /// The sender's turn after which it has surely arrived; none if that is known only at the
    /// step's end.
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
}

impl Links {
    pub(super) fn new(
        model: &Model,
        stage_groups: &[StageGroup<'_>],
        library: &Library,
        wiring: &dyn Fn(usize) -> Arc<Wiring>,
    ) -> Result<Self, ScriptError> {
        let mut links = Self {
            incoming: vec![Vec::new(); stage_groups.len()],
            outgoing: vec![Vec::new(); stage_groups.len()],
            crossings: Vec::new(),
            levels: Vec::new(),
        };
        if stage_groups.len() < 2 {
            return Ok(links);
        }
        let mut all = found(model, stage_groups, wiring)?;
        in_order(model, &all)?;
        links.levels = settle(stage_groups, &mut all)?;
        links.crossings = crossings(model, stage_groups, library, &mut all)?;
        for link in all {
            links.outgoing[link.from.stage_group].push(link.clone());
            links.incoming[link.to.stage_group].push(link);
        }
        let incoming = |a: &Link, b: &Link| (a.to, &a.value.port).cmp(&(b.to, &b.value.port));
        links.incoming.iter_mut().for_each(|links| links.sort_by(incoming));
        let outgoing = |a: &Link, b: &Link| (a.from, &a.value.port).cmp(&(b.from, &b.value.port));
        links.outgoing.iter_mut().for_each(|links| links.sort_by(outgoing));
        Ok(links)
    }
}

/// What each turn of each stage group receives from others. A value is received once, before the
/// first turn that reads it.
fn found(
    model: &Model,
    stage_groups: &[StageGroup<'_>],
    wiring: &dyn Fn(usize) -> Arc<Wiring>,
) -> Result<Vec<Link>, ScriptError> {
    let flow = Flow::new(model, stage_groups)?;
    let mut found: Vec<Link> = Vec::new();
    for (stage_group, own) in stage_groups.iter().enumerate() {
        let wiring = wiring(stage_group);
        let mut known = QuickSet::default();
        for (turn, step) in own.turns.iter().enumerate() {
            let to = Point { stage_group, turn };
            for link in flow.received(to, *step, &wiring)? {
                if known.insert(link.value.clone()) {
                    found.push(link);
                }
            }
        }
    }
    Ok(found)
}

/// Where each instance's forward and backward of each micro-batch are.
struct Flow<'a> {
    model: &'a Model,
    stage_groups: &'a [StageGroup<'a>],
    places: QuickMap<(usize, usize, Direction), Point>,
}

impl<'a> Flow<'a> {
    fn new(model: &'a Model, stage_groups: &'a [StageGroup<'a>]) -> Result<Self, ScriptError> {
        let mut places = QuickMap::default();
        for (stage_group, own) in stage_groups.iter().enumerate() {
            for (turn, step) in own.turns.iter().enumerate() {
                for direction in directions(step.part) {
                    let key = (step.instance, step.microbatch, *direction);
                    if places.insert(key, Point { stage_group, turn }).is_some() {
                        let name = &model.instances()[step.instance].name;
                        let mb = step.microbatch;
                        return Err(ScriptError::Schedule(format!(
                            "`{name}` runs the {direction:?} of micro-batch {mb} twice"
                        )));
                    }
                }
            }
        }
        Ok(Self { model, stage_groups, places })
    }

    fn place(
        &self,
        instance: usize,
        microbatch: usize,
        direction: Direction,
    ) -> Result<Point, ScriptError> {
        self.places.get(&(instance, microbatch, direction)).copied().ok_or_else(|| {
            let name = &self.model.instances()[instance].name;
            ScriptError::Schedule(format!(
                "no stage group runs `{name}` of micro-batch {microbatch}"
            ))
        })
    }

    /// What a turn reads from other stage groups.
    fn received(
        &self,
        to: Point,
        turn: ScheduledRun,
        wiring: &Wiring,
    ) -> Result<Vec<Link>, ScriptError> {
        let (model, ScheduledRun { instance, microbatch, .. }) = (self.model, turn);
        let own = &model.instances()[instance];
        let program = self.stage_groups[to.stage_group].compiled.program(own.segment, turn.part);
        let mut links = Vec::new();
        let mut link = |from: Point, direction, port: &str, instance| {
            let value = Value { instance, port: port.into(), microbatch, again: false };
            if from.stage_group != to.stage_group {
                links.push(Link { from, to, direction, value, settled: None, crossing: 0 });
            }
        };
        for port in program.inputs_with(Role::Boundary) {
            let Some(source) = wiring.producer(instance, &port.name) else { continue };
            let from = self.place(source, microbatch, Direction::Forward)?;
            link(from, Direction::Forward, &port.name, source);
        }
        for port in program.inputs_with(Role::Cotangent) {
            let boundary = port.of.as_deref().expect("a cotangent names its boundary value");
            let places: Vec<Point> = (wiring.differentiated(instance, boundary).iter())
                .map(|&user| self.place(user, microbatch, Direction::Backward))
                .collect::<Result<_, _>>()?;
            let Some(&last) = places.iter().max() else { continue };
            if let Some(other) = places.iter().find(|p| p.stage_group != last.stage_group) {
                return Err(ScriptError::Schedule(format!(
                    "`{}` of `{}` is read by the stage groups {} and {}; its gradient would have \
                    to be summed over both: let one stage group read it and pass it on",
                    boundary, own.name, other.stage_group, last.stage_group
                )));
            }
            link(last, Direction::Backward, &port.name, instance);
        }
        Ok(links)
    }
}

/// The directions in which a part goes through an instance.
fn directions(part: Part) -> &'static [Direction] {
    match part {
        Part::F => &[Direction::Forward],
        Part::B | Part::BW => &[Direction::Backward],
        Part::FBW => &[Direction::Forward, Direction::Backward],
        // What other stage groups need from a forward comes from its first run.
        Part::W | Part::R => &[],
    }
}

/// A channel delivers in order, so values must be produced in the order in which they are needed.
fn in_order(model: &Model, links: &[Link]) -> Result<(), ScriptError> {
    let mut channels: BTreeMap<(usize, usize, Direction), Vec<&Link>> = BTreeMap::new();
    for link in links {
        channels
            .entry((link.from.stage_group, link.to.stage_group, link.direction))
            .or_default()
            .push(link);
    }
    let needed = |link: &Link| (link.to, link.value.port.clone());
    for ((from, to, _), mut links) in channels {
        links.sort_by_key(|link| (link.from, &link.value.port));
        if let Some(pair) = links.windows(2).find(|pair| needed(pair[0]) > needed(pair[1])) {
            let name = |link: &Link| {
                let Value { instance, port, microbatch, .. } = &link.value;
                format!("{}/{port}@mb{microbatch}", model.instances()[*instance].name)
            };
            return Err(ScriptError::Schedule(format!(
                "stage group {from} produces `{}` before `{}`, but stage group {to} needs them in \
                the opposite order",
                name(pair[0]),
                name(pair[1])
            )));
        }
    }
    Ok(())
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
        link.settled = (first < own.len()).then_some(first);
    }
    Ok(levels)
}
