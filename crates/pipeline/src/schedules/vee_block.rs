//! Schedules from a building block (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).
//!
//! A block says when one micro-batch passes each stage group of a V: forward down (chunk 0) and up
//! (chunk 1), then backward down (chunk 1) and up (chunk 0). The next micro-batch follows six turns later with
//! the same block, so the forwards and input gradients of all of them are in order. The time
//! between F and B of a chunk is what decides its memory; a block that turns around sooner keeps
//! less.
//!
//! Weight gradients wait for nobody, so they fill the gaps: where a stage group would wait, and
//! before a forward that would keep more than the block allows.

use std::collections::VecDeque;

use phalanx_script::Part;

use crate::error::Result;
use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::turn::Turn;

/// The turns between a micro-batch and the next: three parts of two chunks.
const PERIOD: usize = 6;

/// When a micro-batch passes a stage group, in turns: F down, F up, B down, B up.
pub(super) type Block = [usize; 4];

/// The schedule of a block, in which no stage group keeps more than `limit` chunks from F to W.
pub(super) fn from_block(
    name: &str,
    p: usize,
    microbatches: usize,
    limit: usize,
    block: impl Fn(usize) -> Block,
) -> Result<Schedule> {
    let placement = Placement::vee(p)?;
    let groups = (0..p).map(|group| Group::new(block(group), microbatches)).collect();
    let turns = Play { p, limit, done: vec![None; 4 * p * microbatches], groups }.run();
    Schedule::from_lists(name, microbatches, placement, turns)
}

/// The four kinds of turns of a block, in order.
const KINDS: [(Part, usize); 4] = [(Part::F, 0), (Part::F, 1), (Part::B, 1), (Part::B, 0)];

/// A turn of a block: its kind and its micro-batch.
#[derive(Clone, Copy)]
struct Step {
    kind: usize,
    microbatch: usize,
}

/// A stage group while the schedule is made.
struct Group {
    /// Forwards and input gradients that are still to come, in the order of the block.
    ahead: VecDeque<Step>,
    /// Weight gradients that could run.
    pending: VecDeque<Step>,
    /// Chunks between F and W.
    kept: usize,
    turns: Vec<Turn>,
}

impl Group {
    fn new(block: Block, microbatches: usize) -> Self {
        let all = (0..microbatches)
            .flat_map(|microbatch| (0..KINDS.len()).map(move |kind| Step { kind, microbatch }));
        let mut ahead: Vec<Step> = all.collect();
        ahead.sort_by_key(|step| (block[step.kind] + PERIOD * step.microbatch, step.kind));
        Self { ahead: ahead.into(), pending: VecDeque::new(), kept: 0, turns: Vec::new() }
    }

    fn take(&mut self, part: Part, Step { kind, microbatch }: Step) {
        self.turns.push(Turn { part, microbatch, chunk: KINDS[kind].1, version: 0 });
        match part {
            Part::F => self.kept += 1,
            Part::B => self.pending.push_back(Step { kind, microbatch }),
            _ => self.kept -= 1,
        }
    }
}

/// All stage groups, turn by turn, where every part of a chunk takes one turn.
struct Play {
    p: usize,
    limit: usize,
    /// After which turn each step has ended, by kind, micro-batch and stage group.
    done: Vec<Option<usize>>,
    groups: Vec<Group>,
}

impl Play {
    fn run(mut self) -> Vec<Vec<Turn>> {
        let mut now = 0;
        while self.groups.iter().any(|group| !group.ahead.is_empty() || !group.pending.is_empty()) {
            (0..self.p).for_each(|group| self.turn(group, now));
            now += 1;
        }
        self.groups.into_iter().map(|group| group.turns).collect()
    }

    /// What a stage group does in a turn.
    fn turn(&mut self, group: usize, now: usize) {
        let next = self.groups[group].ahead.front().copied();
        let next = next.filter(|step| self.is_ready(*step, group, now));
        let own = &mut self.groups[group];
        let full = |step: &Step| KINDS[step.kind].0 == Part::F && own.kept >= self.limit;
        let waits = next.as_ref().is_none_or(full);
        match (next, own.pending.pop_front()) {
            (Some(step), pending) if !waits || pending.is_none() => {
                pending.into_iter().for_each(|pending| own.pending.push_front(pending));
                own.ahead.pop_front();
                own.take(KINDS[step.kind].0, step);
                let place = self.place(step, group);
                self.done[place] = Some(now);
            }
            (_, Some(pending)) => own.take(Part::W, pending),
            (_, None) => {}
        }
    }

    /// Whether what a step needs has ended before this turn.
    fn is_ready(&self, Step { kind, microbatch }: Step, group: usize, now: usize) -> bool {
        let last = self.p - 1;
        let (kind, group) = match (kind, group) {
            (0, 0) => return true,
            // Forward through the groups and back, and the same way backward.
            (0 | 2, group) if group > 0 => (kind, group - 1),
            (1 | 3, group) if group < last => (kind, group + 1),
            // The V turns around in the last group, and in the first one.
            _ => (kind - 1, group),
        };
        self.done[self.place(Step { kind, microbatch }, group)].is_some_and(|end| end < now)
    }

    fn place(&self, Step { kind, microbatch }: Step, group: usize) -> usize {
        (microbatch * KINDS.len() + kind) * self.p + group
    }
}
