//! What devices of a pipeline send each other, and when a sent buffer is free again.
//!
//! A boundary value that an instance of another device reads is sent there, and its cotangent comes
//! back. A send ends when its receiver has taken the value, which the sender does not see. But when
//! something reaches the sender that was made after the value was used, the value must have arrived: from
//! then on the buffer's memory is used again. So no device ever waits for another one but for data,
//! and what cannot deadlock on paper does not deadlock for want of memory.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_autodiff::{boundary_name, cotangent_name};
use phalanx_ir::{Model, Role};

use crate::build::Compiled;
use crate::device::Device;
use crate::error::ScriptError;
use crate::schedule::{Part, Turn};

/// A turn of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Point {
    pub(super) device: usize,
    pub(super) turn: usize,
}

/// Where a value goes in the model. Each direction has a channel of its own between two devices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// A value that one device makes and another one reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Link {
    /// The turn after which it is sent.
    pub(super) from: Point,
    /// The turn before which it is received.
    pub(super) to: Point,
    pub(super) direction: Direction,
    /// The port that gives it, which is also the port that reads it.
    pub(super) port: String,
    /// The buffer's name, on both devices.
    pub(super) buffer: String,
    /// The sender's turn after which it has surely arrived; none if only the step's end tells.
    pub(super) settled: Option<usize>,
}

/// Everything that devices send each other in a step.
pub(super) fn links(model: &Model, devices: &[Device<'_>]) -> Result<Vec<Link>, ScriptError> {
    if devices.len() < 2 {
        return Ok(Vec::new());
    }
    let flow = Flow::new(model, devices)?;
    let mut found: Vec<Link> = Vec::new();
    for (device, own) in devices.iter().enumerate() {
        // A value is received once, before the first turn that reads it.
        let mut known = BTreeSet::new();
        for (turn, step) in own.turns.iter().enumerate() {
            let to = Point { device, turn };
            for link in flow.received(to, *step)? {
                if known.insert(link.buffer.clone()) {
                    found.push(link);
                }
            }
        }
    }
    in_order(&found)?;
    settle(devices, &mut found)?;
    Ok(found)
}

/// The last instance before this one that gives a boundary value.
pub(super) fn producer(
    model: &Model,
    compiled: &Compiled,
    instance: usize,
    name: &str,
) -> Option<usize> {
    (0..instance).rev().find(|&i| {
        let forward = compiled.program(model.instances()[i].segment, Part::F);
        forward.outputs_with(Role::Boundary).any(|p| p.name == name)
    })
}

/// The instances that give summands of the cotangent of a boundary value which an instance gives.
pub(super) fn differentiated(
    model: &Model,
    compiled: &Compiled,
    instance: usize,
    boundary: &str,
) -> Vec<usize> {
    let wanted = cotangent_name(boundary);
    let gives = |later: &usize| {
        let backward = compiled.program(model.instances()[*later].segment, Part::BW);
        backward.outputs_with(Role::Cotangent).any(|p| p.name == wanted)
            && producer(model, compiled, *later, boundary) == Some(instance)
    };
    (instance + 1..model.instances().len()).filter(gives).collect()
}

/// Where each instance's forward and backward of each micro-batch are.
struct Flow<'a> {
    model: &'a Model,
    devices: &'a [Device<'a>],
    places: BTreeMap<(usize, usize, Direction), Point>,
}

impl<'a> Flow<'a> {
    fn new(model: &'a Model, devices: &'a [Device<'a>]) -> Result<Self, ScriptError> {
        let mut places = BTreeMap::new();
        for (device, own) in devices.iter().enumerate() {
            for (turn, step) in own.turns.iter().enumerate() {
                for direction in directions(step.part) {
                    let key = (step.instance, step.microbatch, *direction);
                    if places.insert(key, Point { device, turn }).is_some() {
                        let name = &model.instances()[step.instance].name;
                        let mb = step.microbatch;
                        return Err(ScriptError::Schedule(format!(
                            "`{name}` does the {direction:?} of micro-batch {mb} twice"
                        )));
                    }
                }
            }
        }
        Ok(Self { model, devices, places })
    }

    fn place(
        &self,
        instance: usize,
        microbatch: usize,
        direction: Direction,
    ) -> Result<Point, ScriptError> {
        self.places.get(&(instance, microbatch, direction)).copied().ok_or_else(|| {
            let name = &self.model.instances()[instance].name;
            ScriptError::Schedule(format!("no device does `{name}` of micro-batch {microbatch}"))
        })
    }

    /// What a turn reads that other devices make.
    fn received(&self, to: Point, turn: Turn) -> Result<Vec<Link>, ScriptError> {
        let (model, compiled) = (self.model, self.devices[to.device].compiled);
        let own = &model.instances()[turn.instance];
        let program = compiled.program(own.segment, turn.part);
        let mut links = Vec::new();
        let link = |from, direction, port: &str, name: &str| {
            let buffer = format!("{name}/{port}@mb{}", turn.microbatch);
            Link { from, to, direction, port: port.to_owned(), buffer, settled: None }
        };
        for port in program.inputs_with(Role::Boundary) {
            let Some(source) = producer(model, compiled, turn.instance, &port.name) else {
                continue;
            };
            let from = self.place(source, turn.microbatch, Direction::Forward)?;
            if from.device != to.device {
                links.push(link(
                    from,
                    Direction::Forward,
                    &port.name,
                    &model.instances()[source].name,
                ));
            }
        }
        for port in program.inputs_with(Role::Cotangent) {
            let Some(boundary) = boundary_name(&port.name) else { continue };
            let users = differentiated(model, compiled, turn.instance, boundary);
            let places: Vec<Point> = (users.iter())
                .map(|&user| self.place(user, turn.microbatch, Direction::Backward))
                .collect::<Result<_, _>>()?;
            let Some(&last) = places.iter().max() else { continue };
            if let Some(other) = places.iter().find(|p| p.device != last.device) {
                return Err(ScriptError::Schedule(format!(
                    "`{}` of `{}` is read on the devices {} and {}; its gradient would have to be \
                     summed over both: let one device read it and hand it on",
                    boundary, own.name, other.device, last.device
                )));
            }
            if last.device != to.device {
                links.push(link(last, Direction::Backward, &port.name, &own.name));
            }
        }
        Ok(links)
    }
}

/// The directions in which a part passes an instance.
fn directions(part: Part) -> &'static [Direction] {
    match part {
        Part::F => &[Direction::Forward],
        Part::B | Part::BW => &[Direction::Backward],
        Part::FBW => &[Direction::Forward, Direction::Backward],
        // What others need of a forward, its first run gives.
        Part::W | Part::R => &[],
    }
}

/// A channel delivers in order, so values must be made in the order in which they are needed.
fn in_order(links: &[Link]) -> Result<(), ScriptError> {
    let mut channels: BTreeMap<(usize, usize, Direction), Vec<&Link>> = BTreeMap::new();
    for link in links {
        channels.entry((link.from.device, link.to.device, link.direction)).or_default().push(link);
    }
    for ((from, to, _), mut links) in channels {
        links.sort_by_key(|link| (link.from, &link.port));
        if let Some(pair) =
            links.windows(2).find(|pair| (pair[0].to, &pair[0].port) > (pair[1].to, &pair[1].port))
        {
            return Err(ScriptError::Schedule(format!(
                "device {from} makes `{}` before `{}`, but device {to} needs them the other way round",
                pair[0].buffer, pair[1].buffer
            )));
        }
    }
    Ok(())
}

/// Finds out when each sent value is known to have arrived: by clocks that tell, for every turn, how many
/// turns of each device are over when it begins.
fn settle(devices: &[Device<'_>], links: &mut [Link]) -> Result<(), ScriptError> {
    let mut needs: BTreeMap<Point, Vec<Point>> = BTreeMap::new();
    for link in links.iter() {
        needs.entry(link.to).or_default().push(link.from);
    }
    let mut clocks: Vec<Vec<Vec<usize>>> = vec![Vec::new(); devices.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for device in 0..devices.len() {
            while clocks[device].len() < devices[device].turns.len() {
                let turn = clocks[device].len();
                let needed = needs.get(&Point { device, turn }).map_or(&[][..], Vec::as_slice);
                if needed.iter().any(|p| clocks[p.device].len() <= p.turn) {
                    break;
                }
                let mut clock = clocks[device].last().cloned().unwrap_or(vec![0; devices.len()]);
                clock[device] = turn;
                for point in needed {
                    for (own, other) in clock.iter_mut().zip(&clocks[point.device][point.turn]) {
                        *own = (*own).max(*other);
                    }
                    clock[point.device] = clock[point.device].max(point.turn + 1);
                }
                clocks[device].push(clock);
                moved = true;
            }
        }
    }
    let stuck = (0..devices.len()).find(|&d| clocks[d].len() < devices[d].turns.len());
    if let Some(device) = stuck {
        let turn = devices[device].turns[clocks[device].len()];
        return Err(ScriptError::Schedule(format!(
            "device {device} waits for ever before {} of instance {}, micro-batch {}",
            turn.part, turn.instance, turn.microbatch
        )));
    }
    for link in links {
        let known = |clock: &Vec<usize>| clock[link.to.device] > link.to.turn;
        let own = &clocks[link.from.device];
        // Clocks only grow.
        let first = own.partition_point(|clock| !known(clock));
        link.settled = (first < own.len()).then_some(first);
    }
    Ok(())
}
