//! Finds one turn that can be moved within its list to break a cycle of waits.
//!
//! Only the order of lists can be changed, and that matters only where a cycle enters a stage group
//! and leaves it again. So each move of one such turn before or after another is tried, and one
//! after which all turns can run is proposed.

use std::collections::BTreeSet;

use crate::deadlock::passes;
use crate::flow::At;
use crate::schedule::Schedule;
use crate::written::Written;

/// The most turns that are visited while moves are tried, so that a large schedule is refused
/// quickly too.
const EFFORT: usize = 1 << 22;

/// The turn to move, if one is enough, and the fix as text. `ends` are the turns of the cycle
/// between which values pass.
pub(crate) fn remedy(
    schedule: &Schedule,
    ends: &[At],
    written: Written<'_>,
) -> (Option<At>, String) {
    let ends: BTreeSet<At> = ends.iter().copied().collect();
    let pairs = ends.iter().flat_map(|early| {
        let later = ends.range(*early..).skip(1);
        later.take_while(|late| late.stage_group == early.stage_group).map(|late| (*early, *late))
    });
    let moves = pairs
        .flat_map(|(early, late)| [Move { turn: late, to: early }, Move { turn: early, to: late }]);
    let affordable = EFFORT / schedule.all().count().max(1);
    let found = moves.take(affordable.max(1)).find(|step| step.helps(schedule));
    match found {
        Some(Move { turn, to }) => {
            let side = if to < turn { "before" } else { "behind" };
            let place = |at: At| written.place(at, &schedule.turn(at));
            (Some(turn), format!("usual fix: move {} {side} {}", place(turn), place(to)))
        }
        None => {
            let fix = "usual fix: in every stage group run first all F, in the order of stages \
                and micro-batches, then all BW, in the reverse order of stages, as breadth-first \
                does";
            (ends.first().copied(), fix.to_owned())
        }
    }
}

/// A turn takes the place of another turn of its list, and the turns between them move by one.
#[derive(Clone, Copy)]
struct Move {
    turn: At,
    to: At,
}

impl Move {
    /// Whether all turns can run after this move.
    fn helps(&self, schedule: &Schedule) -> bool {
        let lists =
            (0..schedule.stage_groups()).map(|stage_group| schedule.turns(stage_group).to_vec());
        let mut lists: Vec<_> = lists.collect();
        let list = &mut lists[self.turn.stage_group];
        let turn = list.remove(self.turn.index);
        list.insert(self.to.index, turn);
        let placement = schedule.placement().clone();
        let moved = Schedule::complete(
            schedule.name(),
            schedule.numbers(),
            placement,
            lists,
            Written::Lists,
        );
        moved.is_ok_and(|moved| passes(&moved))
    }
}
