//! What a turn waits for: earlier turns of its own stage group, and messages from other stage
//! groups.
//!
//! The forward of a stage needs the forward of the stage before; the backward needs the forward of its
//! own stage and the backward of the stage after; the weights' gradient needs the backward. A part
//! that does several of these at once needs what each of them needs. Where a micro-batch does not go through the
//! stage before or after, because it is empty, there is nothing to wait for.

use phalanx_script::Part;

use crate::schedule::Schedule;

/// The place of a turn: a stage group, and the turn's index in its list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct At {
    pub stage_group: usize,
    pub index: usize,
}

impl At {
    /// The place after it.
    pub(crate) fn next(self) -> At {
        At { index: self.index + 1, ..self }
    }
}

/// The direction of a message through the model.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Direction {
    /// Outputs of a stage, to the next.
    Forward,
    /// Gradients of a stage's inputs, to the stage before.
    Backward,
}

/// What one turn produces and a turn of another stage group waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageMessage {
    /// The turn that produces it.
    pub from: At,
    /// The turn that waits for it.
    pub to: At,
    /// Its direction.
    pub direction: Direction,
    /// The stage that produces it.
    pub stage: usize,
    /// The micro-batch.
    pub microbatch: usize,
}

/// One of the three kinds of work on a micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Phase {
    F,
    B,
    W,
}

impl Phase {
    /// All of them, in the only possible order.
    pub(crate) const ALL: [Phase; 3] = [Phase::F, Phase::B, Phase::W];

    /// The phases of a part.
    pub(crate) fn of(part: Part) -> &'static [Phase] {
        match part {
            Part::F => &Phase::ALL[..1],
            Part::B => &Phase::ALL[1..2],
            Part::W => &Phase::ALL[2..],
            Part::BW => &Phase::ALL[1..],
            Part::FBW => &Phase::ALL,
            // A second forward completes no phase.
            Part::R => &[],
        }
    }

    /// The letter.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Phase::F => "F",
            Phase::B => "B",
            Phase::W => "W",
        }
    }
}

/// Where every phase of every micro-batch runs: by stage, micro-batch and phase. Empty ones run on some stages.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Index {
    places: Vec<Option<[At; 3]>>,
    microbatches: usize,
    stages: usize,
}

impl Index {
    pub(crate) fn new(places: Vec<Option<[At; 3]>>, microbatches: usize, stages: usize) -> Self {
        Index { places, microbatches, stages }
    }

    pub(crate) fn at(&self, stage: usize, microbatch: usize, phase: Phase) -> Option<At> {
        self.places[stage * self.microbatches + microbatch].map(|places| places[phase as usize])
    }

    /// The turns that a turn with this part waits for, itself not included, with the direction if
    /// the value passes from one stage to another.
    pub(crate) fn needs(
        &self,
        part: Part,
        stage: usize,
        microbatch: usize,
    ) -> impl Iterator<Item = (At, Option<Direction>)> + '_ {
        let own = move |phase| Some((self.at(stage, microbatch, phase)?, None));
        let other = move |stage, phase, direction| {
            Some((self.at(stage, microbatch, phase)?, Some(direction)))
        };
        Phase::of(part)
            .iter()
            .flat_map(move |phase| match phase {
                Phase::F => [
                    stage
                        .checked_sub(1)
                        .and_then(|before| other(before, Phase::F, Direction::Forward)),
                    None,
                ],
                Phase::B => [
                    own(Phase::F),
                    (stage + 1 < self.stages)
                        .then(|| other(stage + 1, Phase::B, Direction::Backward))
                        .flatten(),
                ],
                Phase::W => [own(Phase::B), None],
            })
            .flatten()
    }
}

/// Everything that stage groups send each other, in the order in which receivers need it.
pub(crate) fn messages(schedule: &Schedule) -> Vec<StageMessage> {
    let mut found = Vec::new();
    for (to, turn) in schedule.all() {
        let stage = schedule.stage(to);
        for (from, direction) in schedule.needs(to) {
            if let (Some(direction), true) = (direction, from.stage_group != to.stage_group) {
                let stage = match direction {
                    Direction::Forward => stage - 1,
                    Direction::Backward => stage + 1,
                };
                found.push(StageMessage {
                    from,
                    to,
                    direction,
                    stage,
                    microbatch: turn.microbatch,
                });
            }
        }
    }
    found
}

/// Visits turns in an order in which they can run, those of each stage group in the order of its
/// list; `false` if some can never run.
pub(crate) fn walk(schedule: &Schedule, mut visit: impl FnMut(At)) -> bool {
    let mut done = vec![0; schedule.stage_groups()];
    let mut moved = true;
    while moved {
        moved = false;
        // Goes through the stage groups up and down, as values do, so that one sweep brings a
        // micro-batch through all of them.
        for stage_group in (0..done.len()).chain((0..done.len()).rev()) {
            while done[stage_group] < schedule.turns(stage_group).len() {
                let at = At { stage_group, index: done[stage_group] };
                let ready = |at| {
                    let mut needs = schedule.needs(at);
                    let over = |needed: At| needed.index < done[needed.stage_group];
                    needs.all(|(needed, _)| over(needed))
                        && schedule.waits(at).iter().all(|needed| over(*needed))
                };
                if !ready(at) || (schedule.is_first(at) && !ready(at.next())) {
                    break;
                }
                visit(at);
                done[stage_group] += 1;
                moved = true;
            }
        }
    }
    done.iter().enumerate().all(|(stage_group, done)| *done == schedule.turns(stage_group).len())
}
