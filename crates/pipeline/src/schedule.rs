//! A schedule: for every stage group, what it does and in which order.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use phalanx_script::{ParkedMove, Part, Updates};

use crate::check::{self, Numbers};
use crate::deadlock;
use crate::error::{PipelineError, Result};
use crate::flow::{self, At, Direction, Index, Phase, StageMessage};
use crate::placement::Placement;
use crate::turn::{Turn, Turns};
use crate::written::Written;

/// For each stage group an ordered list of turns, and which stages its chunks are.
///
/// A schedule that loses or repeats work, or that would deadlock, cannot be made: on every stage
/// each micro-batch has one F, one B and one W, in that order, with the same version of the
/// weights; and all turns and messages can complete. Messages use channels that deliver in order,
/// one for each ordered pair of stage groups and each direction through the model.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    name: String,
    microbatches: usize,
    /// How many numbers after those of the micro-batches are empty ones.
    empty: usize,
    placement: Placement,
    turns: Vec<Vec<Turn>>,
    index: Index,
    splits: bool,
    pieces: usize,
    /// The first turns of pairs.
    pairs: BTreeSet<At>,
    /// When weights are updated, if not once at the end; delays are by stage.
    updates: Option<Updates>,
    /// Micro-batches that wait on other stage groups.
    moves: Vec<ParkedMove>,
    /// For each turn before which something leaves or comes back: the turns after which that can begin.
    waits: BTreeMap<At, Vec<At>>,
}

impl Schedule {
    /// The schedule in which each stage group follows a rule.
    pub fn new(
        name: impl Into<String>,
        microbatches: usize,
        placement: Placement,
        rule: impl Fn(usize) -> Turns,
    ) -> Result<Self> {
        let turns =
            (0..placement.stage_groups()).map(|stage_group| rule(stage_group).list()).collect();
        Schedule::from_lists(name, microbatches, placement, turns)
    }

    /// The schedule with these lists, one per stage group.
    pub fn from_lists(
        name: impl Into<String>,
        microbatches: usize,
        placement: Placement,
        turns: Vec<Vec<Turn>>,
    ) -> Result<Self> {
        Schedule::checked(name, microbatches, placement, turns, Written::Lists)
    }

    /// The schedule with these lists; errors name the place where they were written.
    pub(crate) fn checked(
        name: impl Into<String>,
        microbatches: usize,
        placement: Placement,
        turns: Vec<Vec<Turn>>,
        written: Written<'_>,
    ) -> Result<Self> {
        let numbers = Numbers { real: microbatches, empty: 0 };
        Schedule::numbered(name, numbers, placement, turns, written)
    }

    /// The same, where some micro-batches are empty.
    pub(crate) fn numbered(
        name: impl Into<String>,
        numbers: Numbers,
        placement: Placement,
        turns: Vec<Vec<Turn>>,
        written: Written<'_>,
    ) -> Result<Self> {
        let schedule = Schedule::complete(name, numbers, placement, turns, written)?;
        deadlock::check(&schedule, written)?;
        Ok(schedule)
    }

    /// The schedule with these lists, not yet checked for deadlock.
    pub(crate) fn complete(
        name: impl Into<String>,
        numbers: Numbers,
        placement: Placement,
        turns: Vec<Vec<Turn>>,
        written: Written<'_>,
    ) -> Result<Self> {
        check::listed(&turns, written)?;
        let index = check::complete(numbers, &placement, &turns, written)?;
        let Numbers { real: microbatches, empty } = numbers;
        let splits = turns.iter().flatten().any(|turn| turn.part == Part::W);
        let (name, pairs) = (name.into(), BTreeSet::new());
        let (pieces, updates) = (1, None);
        let (moves, waits) = (Vec::new(), BTreeMap::new());
        Ok(Schedule {
            name,
            microbatches,
            empty,
            placement,
            turns,
            index,
            splits,
            pieces,
            pairs,
            updates,
            moves,
            waits,
        })
    }

    /// The same with second forwards as separate turns ([`Part::R`]), right before the backwards
    /// that are `chosen`. They need nothing from other stage groups, so they change neither what
    /// waits for what nor how long values are kept: they only take time. This is for simulation and
    /// drawing; [`Schedule::rematerialised`] is for running.
    pub fn with_second_forwards(&self, chosen: impl Fn(At) -> bool) -> Result<Self> {
        let mut turns: Vec<Vec<Turn>> = vec![Vec::new(); self.stage_groups()];
        let again = |at: At| {
            let turn = self.turn(at);
            let back = matches!(turn.part, Part::B | Part::BW);
            (back && chosen(at)).then_some(Turn { part: Part::R, ..turn })
        };
        let mut pairs = BTreeSet::new();
        let mut starts: Vec<Vec<usize>> = vec![Vec::new(); self.stage_groups()];
        for (at, turn) in self.all() {
            let At { stage_group, index } = at;
            let list = &mut turns[stage_group];
            starts[stage_group].push(list.len());
            // What a pair needs again comes before both.
            match (self.pairs.contains(&at), self.is_second(at)) {
                (true, _) => {
                    list.extend([at, at.next()].into_iter().filter_map(again));
                    pairs.insert(At { stage_group, index: list.len() });
                }
                (false, true) => {}
                (false, false) => list.extend(again(At { stage_group, index })),
            }
            list.push(turn);
        }
        let index = check::complete(self.numbers(), &self.placement, &turns, Written::Lists)?;
        let start = |group: usize, turn: usize| match starts[group].get(turn) {
            Some(start) => *start,
            None => turns[group].len(),
        };
        let moves = self.moves.iter().map(|own| own.placed(start)).collect();
        Ok(Schedule { turns, index, pairs, ..self.clone() }.parking(&self.name, moves))
    }

    /// The same, where each of these turns and the one after it are a pair: they begin when both have what they need,
    /// and others get their results when both are over.
    pub(crate) fn in_pairs(self, pairs: BTreeSet<At>) -> Result<Self> {
        let refuse = |at: At, why: &str, help: &str| {
            let At { stage_group, index } = at;
            let (turn, why) = (self.turn(at).to_string(), why.to_owned());
            let help = format!("usual fix: {help}");
            Err(PipelineError::Turn { stage_group, index, turn, why, help })
        };
        for at in &pairs {
            if at.next().index >= self.turns(at.stage_group).len() {
                return refuse(*at, "it is one of a pair, but the last turn", "leave the pair out");
            }
            if pairs.contains(&at.next()) {
                let why = "it is in a pair with the turn before it and with the one after it";
                return refuse(at.next(), why, "leave one of the pairs out");
            }
        }
        let paired = Schedule { pairs, ..self.clone() };
        let mut done = vec![0; self.stage_groups()];
        if flow::walk(&paired, |at| done[at.stage_group] = at.index + 1) {
            return Ok(paired);
        }
        let waits = |(stage_group, index): (usize, &usize)| At { stage_group, index: *index };
        let stuck = done.iter().enumerate().map(waits);
        let stuck = stuck.filter(|at| at.index < self.turns(at.stage_group).len());
        let told =
            |at: At| format!("stage group {} waits before {}", at.stage_group, self.turn(at));
        Err(PipelineError::Deadlock {
            cycle: stuck.map(told).collect(),
            help: "the turns alone would not: usual fix: leave out a pair that comes next"
                .to_owned(),
        })
    }

    /// The same with several updates. A turn's version counts the updates since the start of a run, which begins with
    /// all versions equal.
    pub(crate) fn updating(self, updates: Updates) -> Self {
        let mut turns = self.turns.clone();
        for (at, turn) in self.all() {
            let version = updates.version(self.stage(at), turn.microbatch).max(0);
            turns[at.stage_group][at.index].version = version as usize;
        }
        let updating = Schedule { turns, updates: Some(updates), ..self };
        Schedule { waits: updating.versions_of_others(), ..updating }
    }

    /// The same, if no turn waits forever for what other holders of its stage make of the weights.
    pub(crate) fn running(self, written: Written<'_>) -> Result<Self> {
        let mut done = vec![0; self.stage_groups()];
        if flow::walk(&self, |at| done[at.stage_group] = at.index + 1) {
            return Ok(self);
        }
        let next = |(stage_group, index): (usize, &usize)| At { stage_group, index: *index };
        let stuck = done.iter().enumerate().map(next);
        let stuck: Vec<At> =
            stuck.filter(|at| at.index < self.turns(at.stage_group).len()).collect();
        let told = |at: &At| {
            let turn = self.turn(*at);
            let (place, version) = (written.place(*at, &turn), turn.version);
            match self.waits(*at).is_empty() {
                true => place,
                false => format!("{place} waits for version {version} of its weights"),
            }
        };
        let help = "the turns alone would not: usual fix: an older version, or backwards of the holders that make it \
                    earlier";
        Err(PipelineError::Deadlock {
            cycle: stuck.iter().map(told).collect(),
            help: help.to_owned(),
        })
    }

    /// For each forward: the backwards of other holders of its stage that end the update which makes its version.
    fn versions_of_others(&self) -> BTreeMap<At, Vec<At>> {
        let mut waits = self.waits.clone();
        let Some(updates) = &self.updates else { return waits };
        for (at, turn) in self.all().filter(|(_, turn)| turn.part == Part::F) {
            let stage = self.stage(at);
            let each = updates.round * updates.holders[stage];
            let Some(made) = turn.version.checked_sub(1) else { continue };
            let ends = (made * each..turn.version * each)
                .filter_map(|microbatch| self.index.at(stage, microbatch, Phase::W))
                .filter(|end| end.stage_group != at.stage_group);
            let ends: Vec<At> = ends.collect();
            if !ends.is_empty() {
                waits.entry(at).or_default().extend(ends);
            }
        }
        waits
    }

    /// The same under another name, where some micro-batches wait on other stage groups.
    pub(crate) fn parking(self, name: &str, moves: Vec<ParkedMove>) -> Self {
        let mut waits: BTreeMap<At, Vec<At>> = BTreeMap::new();
        for own in &moves {
            let [owner, keeper] =
                [own.from, own.to].map(|stage_group| move |index: usize| At { stage_group, index });
            let begins = |a: usize, b: usize| {
                let ends = [a.checked_sub(1).map(owner), b.checked_sub(1).map(keeper)];
                ends.into_iter().flatten()
            };
            let backward = |turn: &Turn| {
                turn.microbatch == own.microbatch && Phase::of(turn.part).contains(&Phase::B)
            };
            let read = self.turns[own.from].iter().position(backward).unwrap_or(own.returned);
            let back = || begins(own.returned, own.given);
            waits.entry(owner(own.left)).or_default().extend(begins(own.sent, own.taken));
            waits.entry(owner(read)).or_default().extend(back());
            waits.entry(keeper(own.freed)).or_default().extend(back());
        }
        Schedule { name: name.to_owned(), moves, waits, ..self }
    }

    /// Micro-batches that wait on other stage groups for their backward.
    pub fn moves(&self) -> &[ParkedMove] {
        &self.moves
    }

    /// The turns after whose ends the moves begin that a turn waits for.
    pub(crate) fn waits(&self, at: At) -> &[At] {
        self.waits.get(&at).map_or(&[], Vec::as_slice)
    }

    /// When weights are updated, by stage; none if once, at the end of the step.
    pub fn updates(&self) -> Option<&Updates> {
        self.updates.as_ref()
    }

    /// Versions of the weights that a stage group has buffers for; one if it keeps no older ones.
    pub(crate) fn kept_versions(&self, stage_group: usize) -> usize {
        let Some(updates) = &self.updates else { return 1 };
        let chunks = 0..self.placement.chunks(stage_group);
        let held = chunks.filter_map(|chunk| self.placement.held(stage_group, chunk));
        held.map(|held| updates.older(held.stage) + 1).max().unwrap_or(1)
    }

    /// The same without pairs: each turn begins when it has what it needs itself.
    pub fn apart(self) -> Self {
        Schedule { pairs: BTreeSet::new(), ..self }
    }

    /// Whether a turn and the one after it are a pair.
    pub fn is_first(&self, at: At) -> bool {
        self.pairs.contains(&at)
    }

    /// Whether a turn and the one before it are a pair.
    pub fn is_second(&self, at: At) -> bool {
        let At { stage_group, index } = at;
        index.checked_sub(1).is_some_and(|index| self.is_first(At { stage_group, index }))
    }

    /// Whether there are pairs.
    pub fn has_pairs(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// The same, where each micro-batch is one of so many pieces of one that the user counts.
    pub(crate) fn in_pieces(self, pieces: usize) -> Self {
        Schedule { pieces, ..self }
    }

    /// In how many pieces a micro-batch of the user is cut; each of them is a micro-batch here.
    pub fn pieces(&self) -> usize {
        self.pieces
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many stage groups there are.
    pub fn stage_groups(&self) -> usize {
        self.turns.len()
    }

    /// How many micro-batches go through.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Whether a turn has no micro-batch: it computes on zeros, because all stage groups do the same at the same time.
    pub fn is_empty(&self, turn: &Turn) -> bool {
        turn.microbatch >= self.microbatches
    }

    /// Whether there are turns without a micro-batch.
    pub fn has_empty(&self) -> bool {
        self.empty > 0
    }

    /// How much a step computes, in that of its micro-batches: 1 if there are no turns without one.
    pub fn work(&self) -> f64 {
        let all = self.all().count() as f64;
        all / self.all().filter(|(_, turn)| !self.is_empty(turn)).count() as f64
    }

    pub(crate) fn numbers(&self) -> Numbers {
        Numbers { real: self.microbatches, empty: self.empty }
    }

    /// The most chunks that a stage group holds.
    pub fn chunks(&self) -> usize {
        (0..self.stage_groups())
            .map(|stage_group| self.placement.chunks(stage_group))
            .max()
            .unwrap_or(0)
    }

    /// Which stage each chunk is.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What a stage group does, in order.
    pub fn turns(&self, stage_group: usize) -> &[Turn] {
        &self.turns[stage_group]
    }

    /// Every turn with its place, one stage group after the other.
    pub fn all(&self) -> impl Iterator<Item = (At, Turn)> + '_ {
        self.turns.iter().enumerate().flat_map(|(stage_group, turns)| {
            turns.iter().enumerate().map(move |(index, turn)| (At { stage_group, index }, *turn))
        })
    }

    /// The turn at a place.
    pub fn turn(&self, at: At) -> Turn {
        self.turns[at.stage_group][at.index]
    }

    /// The stage that a turn works on.
    pub fn stage(&self, at: At) -> usize {
        let held = self.placement.held(at.stage_group, self.turn(at).chunk);
        held.map_or(0, |held| held.stage)
    }

    /// Whether weight gradients (W) are separate from input gradients (B).
    pub fn splits(&self) -> bool {
        self.splits
    }

    /// Everything that stage groups send each other, in the order in which each receiver needs it.
    pub fn messages(&self) -> Vec<StageMessage> {
        flow::messages(self)
    }

    /// The turns that a turn waits for, besides those before it in its list; with a direction where
    /// the value goes from one stage to another.
    pub fn needs(&self, at: At) -> impl Iterator<Item = (At, Option<Direction>)> + '_ {
        let turn = self.turn(at);
        let needs = self.index.needs(turn.part, self.stage(at), turn.microbatch);
        needs.filter(move |(needed, _)| *needed != at)
    }
}

impl fmt::Display for Schedule {
    /// A line per stage group: `0: F0 F1 BW0 BW1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (stage_group, turns) in self.turns.iter().enumerate() {
            let words: Vec<String> = turns.iter().map(Turn::to_string).collect();
            writeln!(f, "{stage_group}: {}", words.join(" "))?;
        }
        Ok(())
    }
}
