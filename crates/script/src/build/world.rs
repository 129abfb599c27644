//! What the scripts of all ranks have in common, found once.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use phalanx_call::Message;
use phalanx_ir::{Instance, Model, Program, Role};

use super::RankPlace;
use super::links::Links;
use super::messages::gaps;
use super::moves::OUT;
use super::ties::{self, Tie};
use super::wiring::Wiring;
use crate::action::{Kind, Script};
use crate::error::ScriptError;
use crate::key::{BufferKey, Number, Scalar};
use crate::library::Library;
use crate::names::Names;
use crate::parked::ParkedMove;
use crate::rolling::RollingTurns;
use crate::schedule::Part;
use crate::stage_group::StageGroup;
use crate::unit::Unit;
use crate::updates::{UnitTiming, Updates};

/// A model on the stage groups of a step: which group holds what, and what groups send each other.
#[derive(Debug)]
pub struct World<'a> {
    /// The model.
    pub model: &'a Model,
    /// The stage groups that hold its instances: one, or those of a pipeline.
    pub stage_groups: Vec<StageGroup<'a>>,
    /// Its programs.
    pub library: Arc<Library>,
    /// When weights are updated, if not once at the end of each script.
    pub updates: Option<Updates>,
    /// Whether a step may begin before the update of the one before is certain.
    pub previews: bool,
    /// Micro-batches that wait on other stage groups for their backward; turns are those of stage groups.
    pub moves: Vec<ParkedMove>,
    /// Micro-batches from this number on are empty: they compute on zeros.
    real: usize,
    /// Which script of an endless row this is, if it is one.
    pub(crate) rolling: Option<&'a RollingTurns>,
    /// For each parameter: the stage groups whose instances have it.
    pub(crate) holders: Vec<Vec<usize>>,
    /// For each stage group: the instances that its turns work on.
    held: Vec<BTreeSet<usize>>,
    /// For each stage group: how values flow between instances.
    wirings: Vec<Arc<Wiring>>,
    pub(super) links: Links,
    /// The parameters that stage groups on different meshes share.
    pub(super) ties: Vec<Tie>,
}

impl<'a> World<'a> {
    /// Whether the model counts rows of experts that found no room.
    pub(super) fn counts_lacking(&self) -> bool {
        let counts = |program: &Program| {
            let mut losses = program.outputs_with(Role::Loss);
            losses.any(|port| Number::of_loss(&port.name) == Number::Lacking)
        };
        self.model.segments().iter().any(counts)
    }

    /// Finds what ranks have in common.
    pub fn new(
        model: &'a Model,
        stage_groups: Vec<StageGroup<'a>>,
        library: Arc<Library>,
    ) -> Result<Self, ScriptError> {
        Self::in_row(model, stage_groups, library, (None, usize::MAX))
    }

    /// The same in a step of so many micro-batches. Turns may be of others, with higher numbers, which are empty: what
    /// comes from no turn is zero, and so is the gradient of what no turn reads.
    pub fn stepping(
        model: &'a Model,
        stage_groups: Vec<StageGroup<'a>>,
        library: Arc<Library>,
        microbatches: usize,
    ) -> Result<Self, ScriptError> {
        Self::in_row(model, stage_groups, library, (None, microbatches))
    }

    /// The same in one script of an endless row.
    pub fn rolling(
        model: &'a Model,
        stage_groups: Vec<StageGroup<'a>>,
        library: Arc<Library>,
        rolling: &'a RollingTurns,
    ) -> Result<Self, ScriptError> {
        Self::in_row(model, stage_groups, library, (Some(rolling), usize::MAX))
    }

    fn in_row(
        model: &'a Model,
        stage_groups: Vec<StageGroup<'a>>,
        library: Arc<Library>,
        (rolling, real): (Option<&'a RollingTurns>, usize),
    ) -> Result<Self, ScriptError> {
        let held = |stage_group: &StageGroup<'_>| {
            stage_group.turns.iter().map(|turn| turn.instance).collect()
        };
        let held: Vec<BTreeSet<usize>> = stage_groups.iter().map(held).collect();
        let holders = holders(model, &held);
        let wirings = wirings(model, &stage_groups);
        let wiring = |stage_group: usize| wirings[stage_group].clone();
        let links = Links::new(model, &stage_groups, &library, &wiring, rolling, real)?;
        let (updates, moves) = (None, Vec::new());
        let (previews, ties) = (false, Vec::new());
        let mut world = Self {
            model,
            stage_groups,
            library,
            updates,
            previews,
            moves,
            real,
            rolling,
            holders,
            held,
            wirings,
            links,
            ties,
        };
        world.ties = ties::ties(&world)?;
        Ok(world)
    }

    /// The same, where weights are updated by this rule.
    pub fn updated(self, updates: Option<Updates>) -> Self {
        Self { updates, ..self }
    }

    /// The same, where a step may begin before the update of the one before is certain.
    pub fn previewing(self, previews: bool) -> Self {
        Self { previews, ..self }
    }

    /// The same, where some micro-batches wait on other stage groups, whose meshes are the same.
    pub fn parking(self, moves: Vec<ParkedMove>) -> Self {
        Self { moves, ..self }
    }

    /// Whether a micro-batch is empty: it computes on zeros.
    pub(super) fn is_empty(&self, microbatch: usize) -> bool {
        microbatch >= self.real
    }

    /// The round of a script that a micro-batch belongs to, counted from 0.
    pub(crate) fn round_of(&self, microbatch: usize) -> usize {
        match &self.updates {
            Some(updates) => updates.round_of(microbatch),
            None => 0,
        }
    }

    /// The update of a unit that a micro-batch contributes to, counted from 0.
    pub(crate) fn update_of(&self, timing: UnitTiming, microbatch: usize) -> usize {
        self.round_of(microbatch) / timing.holders
    }

    /// The forwards (instance, micro-batch) whose backwards a stage group runs in this script.
    pub(crate) fn forwards(&self, stage_group: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let turns = self.stage_groups[stage_group].turns.iter();
        let forward = turns.filter(|turn| matches!(turn.part, Part::F | Part::FBW));
        let ended = |microbatch| {
            self.rolling.is_none_or(|rolling| microbatch < rolling.window.microbatches)
        };
        let own = forward.map(|turn| (turn.instance, turn.microbatch)).filter(move |f| ended(f.1));
        let before = self.rolling.into_iter();
        own.chain(before.flat_map(move |rolling| rolling.in_flight[stage_group].iter().copied()))
    }

    /// The key of a scalar that the host provides for an update, which takes so many rounds.
    pub(super) fn scalar_key(&self, scalar: Scalar, update: usize, rounds: usize) -> BufferKey {
        match self.updates {
            None => BufferKey::Scalar(scalar),
            Some(_) => BufferKey::UpdateScalar { scalar, update, rounds },
        }
    }

    /// The last round whose backwards a stage group runs in this script.
    pub(crate) fn last_round(&self, stage_group: usize) -> usize {
        // A forward ahead contributes to an update of the next script.
        let turns = self.stage_groups[stage_group].turns.iter();
        let turns = turns.filter(|turn| !matches!(turn.part, Part::F | Part::R));
        turns.map(|turn| self.round_of(turn.microbatch)).fold(0, usize::max)
    }

    /// How many updates of a unit a script has.
    pub(crate) fn update_count(&self, timing: UnitTiming, stage_group: usize) -> usize {
        self.last_round(stage_group) / timing.holders + 1
    }

    /// When a unit is updated. That is the same for all its parameters, because an update takes the gradients of all
    /// that read them.
    pub(crate) fn timing(&self, unit: &Unit) -> Result<UnitTiming, ScriptError> {
        let usual = UnitTiming::AT_ONCE;
        let Some(updates) = &self.updates else { return Ok(usual) };
        let reads = |(_, instance): &(usize, &Instance)| {
            unit.members.iter().any(|own| instance.params.values().any(|&p| p == own.param))
        };
        let readers = self.model.instances().iter().enumerate().filter(reads);
        let timing = |index: usize| updates.timing(index);
        let timings: BTreeSet<UnitTiming> = readers.map(|(index, _)| timing(index)).collect();
        match timings.len() {
            0 | 1 => Ok(timings.into_iter().next().unwrap_or(usual)),
            _ => Err(ScriptError::Schedule(format!(
                "`{}` is read at different times, {timings:?}: parameters that several stages share need one delay, \
                 and as many holders",
                unit.name
            ))),
        }
    }

    /// Whether a stage group's turns work on an instance.
    pub fn holds(&self, stage_group: usize, instance: usize) -> bool {
        self.held[stage_group].contains(&instance)
    }

    /// The instances that a stage group's turns work on.
    pub(crate) fn held(&self, stage_group: usize) -> &BTreeSet<usize> {
        &self.held[stage_group]
    }

    /// Ranks that do the same, each on its part of the data: those of a stage group. Ranks that
    /// receive values with padding in different places, which they set to zero, are in different
    /// classes, and so is a rank that updates for others.
    pub fn classes(&self) -> Vec<Vec<RankPlace>> {
        let mut classes = Vec::new();
        for (stage_group, own) in self.stage_groups.iter().enumerate() {
            type Differences = (Vec<Vec<Range<usize>>>, bool);
            let mut known: HashMap<Differences, Vec<RankPlace>> = HashMap::new();
            for place in 0..own.ranks.len() {
                let gaps = self.gaps(stage_group, own.ranks[place]);
                let key = (gaps, own.sharing.facts().updates(own.mesh, place));
                known.entry(key).or_default().push(RankPlace { stage_group, place });
            }
            // Ranks that differ may be in one group, so each is compared on its own.
            let alone = known.len() > 1;
            let ranks = 0..own.ranks.len();
            match alone {
                true => classes.extend(ranks.map(|place| vec![RankPlace { stage_group, place }])),
                false => classes.extend(known.into_values()),
            }
        }
        classes
    }

    /// For each crossing into a stage group: the bytes of a rank's buffer that no message fills.
    fn gaps(&self, stage_group: usize, rank: usize) -> Vec<Vec<Range<usize>>> {
        let mut seen = BTreeSet::new();
        let ways =
            self.links.incoming[stage_group].iter().filter(|link| seen.insert(link.crossing));
        let gaps = ways.map(|link| {
            let crossing = &self.links.crossings[link.crossing];
            let messages = crossing.messages(link, rank, false);
            gaps(crossing.bytes, crossing.arrives.dtype, &messages)
        });
        gaps.collect()
    }

    /// What another rank of a script's class sends and receives in its actions.
    pub fn messages(&self, script: &Script, at: RankPlace) -> Vec<(usize, Vec<Message>)> {
        let Links { incoming, outgoing, crossings, .. } = &self.links;
        let rank = self.stage_groups[at.stage_group].ranks[at.place];
        // Scripts have sends and receives in the order of the links.
        let (mut sent, mut taken) =
            (outgoing[at.stage_group].iter(), incoming[at.stage_group].iter());
        let mut found = Vec::new();
        for (number, action) in script.actions.iter().enumerate() {
            if let Some(own) = ties::messages_of(self, script, &action.kind, at) {
                found.push((number, own));
                continue;
            }
            let (link, sending) = match &action.kind {
                Kind::Send { messages, .. } | Kind::Receive { messages, .. }
                    if messages.iter().any(|message| message.channel >= OUT) =>
                {
                    found.push((number, self.parked(messages, at)));
                    continue;
                }
                Kind::Send { .. } => (sent.next(), true),
                Kind::Receive { .. } => (taken.next(), false),
                _ => continue,
            };
            let link = link.expect("a script sends and receives what its links say");
            found.push((number, crossings[link.crossing].messages(link, rank, sending)));
        }
        found
    }

    /// The messages of a move, for the rank at another place of the stage group: everything goes to the same place.
    fn parked(&self, messages: &[Message], at: RankPlace) -> Vec<Message> {
        let group = |rank| self.stage_groups.iter().find(|group| group.ranks.contains(&rank));
        let other = |message: &Message| {
            let peer = group(message.peer).expect("a peer is in a stage group").ranks[at.place];
            Message { peer, ..message.clone() }
        };
        messages.iter().map(other).collect()
    }

    pub(super) fn wiring(&self, stage_group: usize) -> &Wiring {
        &self.wirings[stage_group]
    }

    /// A rank's script, still empty.
    pub(super) fn empty_script(&self, at: RankPlace, units: &[Unit]) -> Script {
        let ranks = self.stage_groups[at.stage_group].ranks;
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
fn wirings(model: &Model, stage_groups: &[StageGroup<'_>]) -> Vec<Arc<Wiring>> {
    let mut found: Vec<Arc<Wiring>> = Vec::with_capacity(stage_groups.len());
    for stage_group in stage_groups {
        let same = stage_groups
            .iter()
            .zip(&found)
            .find(|(other, _)| std::ptr::eq(other.compiled, stage_group.compiled));
        let wiring = match same {
            Some((_, wiring)) => wiring.clone(),
            None => Arc::new(Wiring::new(model, stage_group.compiled)),
        };
        found.push(wiring);
    }
    found
}

/// For each parameter: the stage groups whose instances have it.
fn holders(model: &Model, held: &[BTreeSet<usize>]) -> Vec<Vec<usize>> {
    let mut holders: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); model.params().len()];
    for (number, instance) in model.instances().iter().enumerate() {
        for stage_group in
            (0..held.len()).filter(|&stage_group| held[stage_group].contains(&number))
        {
            instance.params.values().for_each(|&param| {
                holders[param].insert(stage_group);
            });
        }
    }
    holders.into_iter().map(|stage_groups| stage_groups.into_iter().collect()).collect()
}
