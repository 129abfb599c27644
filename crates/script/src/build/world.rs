//! What the scripts of all ranks have in common, found once.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use phalanx_call::Message;
use phalanx_ir::Model;

use super::RankPlace;
use super::links::Links;
use super::messages::gaps;
use super::wiring::Wiring;
use crate::action::{Kind, Script};
use crate::device::StageGroup;
use crate::error::ScriptError;
use crate::library::Library;
use crate::names::Names;
use crate::unit::Unit;

/// A model on the stage groups of a step: which group holds what, and what groups send each other.
#[derive(Debug)]
pub struct World<'a> {
    /// The model.
    pub model: &'a Model,
    /// The stage groups that hold its instances: one, or those of a pipeline.
    pub devices: Vec<StageGroup<'a>>,
    /// Its programs.
    pub library: Arc<Library>,
    /// For each parameter: the stage groups whose instances have it.
    pub(crate) holders: Vec<Vec<usize>>,
    /// For each stage group: the instances that its turns work on.
    held: Vec<BTreeSet<usize>>,
    /// For each stage group: how values flow between instances.
    wirings: Vec<Arc<Wiring>>,
    pub(super) links: Links,
}

impl<'a> World<'a> {
    /// Finds what ranks have in common.
    pub fn new(
        model: &'a Model,
        devices: Vec<StageGroup<'a>>,
        library: Arc<Library>,
    ) -> Result<Self, ScriptError> {
        let held =
            |device: &StageGroup<'_>| device.turns.iter().map(|turn| turn.instance).collect();
        let held: Vec<BTreeSet<usize>> = devices.iter().map(held).collect();
        let holders = holders(model, &held);
        shared_alike(model, &devices, &holders)?;
        let wirings = wirings(model, &devices);
        let links = Links::new(model, &devices, &library, &|device| wirings[device].clone())?;
        Ok(Self { model, devices, library, holders, held, wirings, links })
    }

    /// Whether a stage group's turns work on an instance.
    pub fn holds(&self, device: usize, instance: usize) -> bool {
        self.held[device].contains(&instance)
    }

    /// Ranks that do the same, each on its part of the data: those of a stage group. Ranks that
    /// receive values with padding in different places, which they set to zero, are in different
    /// classes.
    pub fn classes(&self) -> Vec<Vec<RankPlace>> {
        let mut classes = Vec::new();
        for (device, own) in self.devices.iter().enumerate() {
            let mut known: HashMap<Vec<Vec<Range<usize>>>, Vec<RankPlace>> = HashMap::new();
            for place in 0..own.ranks.len() {
                let gaps = self.gaps(device, own.ranks[place]);
                known.entry(gaps).or_default().push(RankPlace { device, place });
            }
            // Ranks with different padding may be in one group, so each is compared on its own.
            let alone = known.len() > 1;
            let ranks = 0..own.ranks.len();
            match alone {
                true => classes.extend(ranks.map(|place| vec![RankPlace { device, place }])),
                false => classes.extend(known.into_values()),
            }
        }
        classes
    }

    /// For each crossing into a stage group: the bytes of a rank's buffer that no message fills.
    fn gaps(&self, device: usize, rank: usize) -> Vec<Vec<Range<usize>>> {
        let mut seen = BTreeSet::new();
        let ways = self.links.incoming[device].iter().filter(|link| seen.insert(link.crossing));
        let gaps = ways.map(|link| {
            let crossing = &self.links.crossings[link.crossing];
            let messages = crossing.messages(link, rank, false);
            gaps(crossing.bytes, crossing.arrives.dtype, &messages)
        });
        gaps.collect()
    }

    /// What another rank of a script's class sends and receives in its actions.
    pub fn messages(&self, script: &Script, at: RankPlace) -> Vec<(usize, Vec<Message>)> {
        let Links { incoming, outgoing, crossings } = &self.links;
        let rank = self.devices[at.device].ranks[at.place];
        // Scripts have sends and receives in the order of the links.
        let (mut sent, mut taken) = (outgoing[at.device].iter(), incoming[at.device].iter());
        let mut found = Vec::new();
        for (number, action) in script.actions.iter().enumerate() {
            let (link, sending) = match action.kind {
                Kind::Send { .. } => (sent.next(), true),
                Kind::Receive { .. } => (taken.next(), false),
                _ => continue,
            };
            let link = link.expect("a script sends and receives what its links say");
            found.push((number, crossings[link.crossing].messages(link, rank, sending)));
        }
        found
    }

    pub(super) fn wiring(&self, device: usize) -> &Wiring {
        &self.wirings[device]
    }

    /// A rank's script, still empty.
    pub(super) fn empty_script(&self, at: RankPlace, units: &[Unit]) -> Script {
        let ranks = self.devices[at.device].ranks;
        Script {
            names: Names {
                params: self.model.params().iter().map(|p| p.name.clone()).collect(),
                instances: self.model.instances().iter().map(|i| i.name.clone()).collect(),
                units: units.iter().map(|unit| unit.name.clone()).collect(),
            },
            ..Script::of_rank(ranks[at.place], ranks.into())
        }
    }
}

/// For each stage group: the flow of values. Stage groups with the same programs share it.
fn wirings(model: &Model, devices: &[StageGroup<'_>]) -> Vec<Arc<Wiring>> {
    let mut found: Vec<Arc<Wiring>> = Vec::with_capacity(devices.len());
    for device in devices {
        let same = devices
            .iter()
            .zip(&found)
            .find(|(other, _)| std::ptr::eq(other.compiled, device.compiled));
        let wiring = match same {
            Some((_, wiring)) => wiring.clone(),
            None => Arc::new(Wiring::new(model, device.compiled)),
        };
        found.push(wiring);
    }
    found
}

/// For each parameter: the stage groups whose instances have it.
fn holders(model: &Model, held: &[BTreeSet<usize>]) -> Vec<Vec<usize>> {
    let mut holders: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); model.params().len()];
    for (number, instance) in model.instances().iter().enumerate() {
        for device in (0..held.len()).filter(|&device| held[device].contains(&number)) {
            instance.params.values().for_each(|&param| {
                holders[param].insert(device);
            });
        }
    }
    holders.into_iter().map(|devices| devices.into_iter().collect()).collect()
}

/// Stage groups that share a parameter must hold it in the same way, so that their gradients can be
/// added.
fn shared_alike(
    model: &Model,
    devices: &[StageGroup<'_>],
    holders: &[Vec<usize>],
) -> Result<(), ScriptError> {
    for (param, holders) in model.params().iter().zip(holders) {
        let differs = |d: &&usize| devices[**d].mesh != devices[holders[0]].mesh;
        if let Some(&other) = holders.iter().find(differs) {
            return Err(ScriptError::Schedule(format!(
                "`{}` is shared by stage groups on different meshes, ({}) and ({}): give both the \
                same mesh, or untie it",
                param.name, devices[holders[0]].mesh, devices[other].mesh
            )));
        }
    }
    Ok(())
}
