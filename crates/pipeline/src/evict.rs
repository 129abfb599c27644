//! Evictions: a stage group that keeps more micro-batches than it may gives some to a partner, and gets each back for
//! its backward.
//!
//! Stage group x of p and p − 1 − x are partners: in 1F1B they keep p − x and x + 1 micro-batches, together always
//! p + 1. With a bound of ⌈(p + 2) / 2⌉ for each there is one more place than that, for what is on its way. Before a forward
//! for which there is no room, the newest micro-batch leaves, whose backward is last. What the next turn needs
//! comes back one turn early, and the forward makes room for it, too; a backward makes none: if it has no room, the next
//! micro-batch comes when it is over.
//!
//! Both ends of a move are placed by a simulated run: an owner's step before turn t, which starts at T there, is done by
//! the keeper before the turn that it is in at T. So everything waits for what came earlier in that run, and
//! no move can make a cycle of waits.

use phalanx_script::{ParkedMove, Part};

use crate::costs::{Times, TurnCosts};
use crate::error::Result;
use crate::flow::Phase;
use crate::schedule::Schedule;
use crate::simulate::{Timeline, simulate};
use crate::turn::Turn;

/// How many micro-batches a stage group of `p` keeps at most.
pub(crate) const fn bound(p: usize) -> usize {
    (p + 2).div_ceil(2)
}

/// The moves that keep every stage group of a schedule with one chunk each within the bound.
pub(crate) fn moves(schedule: &Schedule) -> Result<Vec<ParkedMove>> {
    let p = schedule.stage_groups();
    let costs = TurnCosts::even(Times { f: 1.0, b: 1.0, w: 1.0 }, 0.0)?;
    let played = simulate(schedule, &costs)?;
    let mut all = Vec::new();
    for from in (0..p / 2).filter(|own| played.peak_in_flight[*own] > bound(p)) {
        all.extend(Pair::new(schedule, &played, from).moves());
    }
    Ok(all)
}

/// An owner and its keeper.
struct Pair<'a> {
    from: usize,
    to: usize,
    bound: usize,
    turns: &'a [Turn],
    /// For each turn of the owner: the turn of the keeper that runs when it starts.
    meets: Vec<usize>,
    /// For each turn of the keeper: micro-batches of its own that it keeps.
    kept: Vec<usize>,
    /// For each guest so far: the keeper's turn before which it is taken, and of those that left the last turn during which
    /// they were there. Both only grow.
    taken: Vec<usize>,
    given: Vec<usize>,
}

impl<'a> Pair<'a> {
    fn new(schedule: &'a Schedule, played: &Timeline, from: usize) -> Self {
        let p = schedule.stage_groups();
        let to = p - 1 - from;
        let (own, other) = (&played.stage_groups[from], &played.stage_groups[to]);
        let meets = |start: f64| other.partition_point(|turn| turn.start <= start);
        let meets = own.iter().map(|turn| meets(turn.start).saturating_sub(1)).collect();
        let mut alive = 0;
        let keeps = |turn: &Turn| {
            let phases = Phase::of(turn.part);
            alive += usize::from(phases.contains(&Phase::F));
            let kept = alive;
            alive -= usize::from(phases.contains(&Phase::B));
            kept
        };
        let kept = schedule.turns(to).iter().map(keeps).collect();
        let (taken, given) = (Vec::new(), Vec::new());
        Self { from, to, bound: bound(p), turns: schedule.turns(from), meets, kept, taken, given }
    }

    fn moves(mut self) -> Vec<ParkedMove> {
        let mut moves: Vec<ParkedMove> = Vec::new();
        // What is here, and what was here before the turn before.
        let (mut here, mut earlier): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        // The moves whose micro-batches are away.
        let mut away: Vec<usize> = Vec::new();
        for (index, turn) in self.turns.iter().enumerate() {
            let forward = turn.part == Part::F;
            let next = self.turns.get(index + 1).filter(|next| next.part != Part::F);
            let next = next.map(|next| next.microbatch);
            let was_here = here.clone();
            if forward {
                here.push(turn.microbatch);
            }
            for wanted in [Some(turn.microbatch), next].into_iter().flatten() {
                let room = forward || wanted == turn.microbatch || here.len() < self.bound;
                let found = away.iter().position(|number| moves[*number].microbatch == wanted);
                if let Some(found) = found.filter(|_| room) {
                    let own = &mut moves[away.remove(found)];
                    let given = self.meets[index];
                    (own.returned, own.given, own.freed) = (index, given, given + 1);
                    self.given.push(given);
                    here.push(wanted);
                }
            }
            let mut early = true;
            while here.len() > self.bound {
                let newest = (here.iter().copied())
                    .filter(|mb| {
                        was_here.contains(mb) && Some(*mb) != next && *mb != turn.microbatch
                    })
                    .max();
                let Some(newest) = newest else { break };
                here.retain(|mb| *mb != newest);
                early &= earlier.contains(&newest) && self.has_room(index);
                let sent = if early { index - 1 } else { index };
                let taken = self.meets[sent];
                self.taken.push(taken);
                away.push(moves.len());
                moves.push(ParkedMove {
                    microbatch: newest,
                    from: self.from,
                    to: self.to,
                    sent,
                    left: index,
                    returned: 0,
                    taken,
                    given: 0,
                    freed: 0,
                });
            }
            earlier = was_here;
            earlier.retain(|mb| here.contains(mb));
            if !forward {
                here.retain(|mb| *mb != turn.microbatch);
            }
        }
        moves
    }

    /// Whether one more guest has room while the turn before this one runs, so that it leaves without a wait.
    fn has_room(&self, turn: usize) -> bool {
        let guests = |at: usize| {
            let came = self.taken.partition_point(|taken| *taken <= at);
            came - self.given.partition_point(|given| *given < at)
        };
        let during = self.meets[turn - 1]..=self.meets[turn];
        during.into_iter().all(|at| self.kept[at] + guests(at) < self.bound)
    }
}
