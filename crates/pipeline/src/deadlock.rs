//! Checks that stage groups never wait for each other forever.
//!
//! Stage groups run their lists in order, and messages use **channels**, one for each ordered pair
//! of stage groups and each direction through the model. A channel delivers in order, and a send
//! ends only when it is received. So messages must be sent in the order in which they are needed,
//! and turns and messages together must not wait for each other in a cycle.
//!
//! With one channel for both directions ZB-V would deadlock: a stage group that is ahead with
//! forwards has sent many that its neighbour needs only after the first gradient.

use std::collections::HashMap;

use phalanx_script::cycle;

use crate::deadlock_remedy::remedy;
use crate::error::{PipelineError, Result};
use crate::flow::{self, At, Direction, StageMessage};
use crate::schedule::Schedule;
use crate::written::Written;

/// Refuses a schedule whose turns and messages would wait for each other in a cycle.
pub(crate) fn check(schedule: &Schedule, written: Written<'_>) -> Result<()> {
    if passes(schedule) {
        return Ok(());
    }
    let graph = Waits::new(schedule);
    match cycle(&graph.on) {
        None => Ok(()),
        Some(cycle) => {
            let lines = cycle.iter().zip(cycle.iter().cycle().skip(1));
            let words = |node: usize| graph.words(schedule, written, node);
            let lines = lines.map(|(a, b)| format!("{} waits for {}", words(*a), words(*b)));
            let ends = graph.ends(&cycle);
            let (at, help) = remedy(schedule, &ends, written);
            let error = PipelineError::Deadlock { cycle: lines.collect(), help };
            Err(at.map_or(error.clone(), |at| written.told(at, error)))
        }
    }
}

/// Whether all turns can run, in the order of their lists and of the channels.
pub(crate) fn passes(schedule: &Schedule) -> bool {
    in_order(&schedule.messages()) && flow::walk(schedule, |_| ())
}

/// Whether the messages of every channel, given in the order in which they are needed, are also
/// sent in that order. Then channels cause no extra waiting.
fn in_order(messages: &[StageMessage]) -> bool {
    let mut last: HashMap<Lane, usize> = HashMap::new();
    let mut later = |message: &StageMessage| {
        let before = last.insert(lane(message), message.from.index);
        before.is_none_or(|before| before < message.from.index)
    };
    messages.iter().all(&mut later)
}

/// A channel: sender, receiver, and direction through the model.
type Lane = (usize, usize, Direction);

fn lane(message: &StageMessage) -> Lane {
    (message.from.stage_group, message.to.stage_group, message.direction)
}

/// What waits for what, to explain a schedule that would deadlock: turns first, then messages.
struct Waits {
    turns: Vec<At>,
    messages: Vec<StageMessage>,
    /// For every turn and message, those it waits for.
    on: Vec<Vec<usize>>,
}

impl Waits {
    fn new(schedule: &Schedule) -> Self {
        let turns: Vec<At> = schedule.all().map(|(at, _)| at).collect();
        let firsts: Vec<usize> = (0..schedule.stage_groups())
            .scan(0, |next, stage_group| {
                Some(std::mem::replace(next, *next + schedule.turns(stage_group).len()))
            })
            .collect();
        let number = |at: At| firsts[at.stage_group] + at.index;
        let messages = schedule.messages();
        let mut on = vec![Vec::new(); turns.len() + messages.len()];
        for (node, at) in turns.iter().enumerate() {
            if at.index > 0 {
                on[node].push(node - 1);
            }
            let own =
                schedule.needs(*at).filter(|(needed, _)| needed.stage_group == at.stage_group);
            on[node].extend(own.map(|(needed, _)| number(needed)));
        }
        for (message, node) in messages.iter().zip(turns.len()..) {
            on[node].push(number(message.from));
            on[number(message.to)].push(node);
        }
        // Messages are listed in the order in which receivers need them; senders may send them in
        // another.
        let received: Vec<usize> = (0..messages.len()).collect();
        let mut sent = received.clone();
        sent.sort_by_key(|&k| messages[k].from);
        for order in [received, sent] {
            let mut last = HashMap::new();
            for k in order {
                let message = &messages[k];
                if let Some(before) = last.insert(lane(message), turns.len() + k) {
                    on[turns.len() + k].push(before);
                }
            }
        }
        Waits { turns, messages, on }
    }

    /// The turns of a cycle between which values pass, as messages or within a stage group. The
    /// other waits of the cycle come from the order of lists, which is all that a user can change.
    fn ends(&self, cycle: &[usize]) -> Vec<At> {
        let pairs = cycle.iter().zip(cycle.iter().cycle().skip(1));
        let ends = pairs.flat_map(|(a, b)| match (self.turns.get(*a), self.turns.get(*b)) {
            (Some(_), Some(_)) if a.checked_sub(1) == Some(*b) => vec![],
            (Some(waiter), Some(needed)) => vec![*waiter, *needed],
            _ => [a, b]
                .into_iter()
                .filter_map(|node| node.checked_sub(self.turns.len()))
                .flat_map(|k| [self.messages[k].from, self.messages[k].to])
                .collect(),
        });
        ends.collect()
    }

    fn words(&self, schedule: &Schedule, written: Written<'_>, node: usize) -> String {
        let place = |at: At| written.place(at, &schedule.turn(at));
        match self.turns.get(node) {
            Some(at) => place(*at),
            None => {
                let StageMessage { from, to, .. } = self.messages[node - self.turns.len()];
                format!("the message from {} to {}", place(from), place(to))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::check::Numbers;
    use crate::placement::Placement;
    use crate::turn::{b, fwd, w};

    /// Running the lists and searching for cycles of waits must give the same answer.
    #[test]
    fn a_schedule_passes_where_there_is_no_circle() {
        let (mut seed, mut passed, mut stuck) = (3_u64, 0, 0);
        let mut below = |n: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as usize % n
        };
        for _ in 0..3000 {
            let (p, m) = (1 + below(3), 1 + below(3));
            let placement = match below(2) {
                0 => Placement::looped(p, 2),
                _ => Placement::vee(p),
            };
            let mut turns = Vec::new();
            for _ in 0..p {
                // Starting from an order that works, a few neighbouring turns of different
                // micro-batches or chunks are swapped.
                let forwards = fwd(0..m).then(fwd(0..m).on(1));
                let backwards = b(0..m).on(1).then(b(0..m)).then(w(0..m)).then(w(0..m).on(1));
                let mut list = forwards.then(backwards).list();
                for _ in 0..below(12) {
                    let k = below(list.len() - 1);
                    let of = |k: usize| (list[k].chunk, list[k].microbatch);
                    if of(k) != of(k + 1) {
                        list.swap(k, k + 1);
                    }
                }
                turns.push(list);
            }
            let numbers = Numbers { real: m, empty: 0 };
            let schedule =
                Schedule::complete("test", numbers, placement.unwrap(), turns, Written::Lists)
                    .unwrap();
            let cycle = cycle(&Waits::new(&schedule).on);
            assert_eq!(passes(&schedule), cycle.is_none(), "{schedule}");
            *if cycle.is_none() { &mut passed } else { &mut stuck } += 1;
        }
        assert!(passed > 300 && stuck > 300, "{passed} passed, {stuck} stuck");
    }
}
