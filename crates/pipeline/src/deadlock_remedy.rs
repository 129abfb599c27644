//! What would free devices that wait for each other in a circle: one turn moved within its list.
//!
//! Only the order of lists can be changed, and only where a circle enters a device and leaves it again
//! does that matter. So each move of one such turn before or behind another is tried, and one after
//! which all turns can be run is offered.

use std::collections::BTreeSet;

use crate::deadlock::passes;
use crate::flow::At;
use crate::schedule::Schedule;
use crate::written::Written;

/// Turns that are looked at while moves are tried, so that a large schedule is refused as quickly as a
/// small one.
const EFFORT: usize = 1 << 22;

/// The turn to move, where one is enough, and what to do in words. `ends` are the turns between which
/// values go in the circle.
pub(crate) fn remedy(
    schedule: &Schedule,
    ends: &[At],
    written: Written<'_>,
) -> (Option<At>, String) {
    let ends: BTreeSet<At> = ends.iter().copied().collect();
    let pairs = ends.iter().flat_map(|early| {
        let later = ends.range(*early..).skip(1);
        later.take_while(|late| late.device == early.device).map(|late| (*early, *late))
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
            let fix = "usual fix: on every device first all F, in the order of stages and \
                       micro-batches, then all BW in the order of stages backwards, as \
                       breadth-first has them";
            (ends.first().copied(), fix.to_owned())
        }
    }
}

/// A turn takes the place of another of its device, and those between move up.
#[derive(Clone, Copy)]
struct Move {
    turn: At,
    to: At,
}

impl Move {
    /// Whether all turns could be run after it.
    fn helps(&self, schedule: &Schedule) -> bool {
        let lists = (0..schedule.devices()).map(|device| schedule.turns(device).to_vec());
        let mut lists: Vec<_> = lists.collect();
        let list = &mut lists[self.turn.device];
        let turn = list.remove(self.turn.index);
        list.insert(self.to.index, turn);
        let (m, placement) = (schedule.microbatches(), schedule.placement().clone());
        let moved = Schedule::complete(schedule.name(), m, placement, lists, Written::Lists);
        moved.is_ok_and(|moved| passes(&moved))
    }
}
