//! Happens-before: the one rule that runtime, planner and simulator share.
//!
//! An action starts when its lane is free and its inputs are ready. So it comes after the previous
//! action of its lane, after every earlier action that wrote what it reads or writes, after every
//! earlier action that read what it writes, and after its explicit edges. Messages are an exception:
//! a send ends only when its receiver takes it, which may be long after the next one is made, so the
//! lanes of messages keep the order of starts, and not of ends.
//!
//! What ends in order needs no list of all that came before: one number for each lane says how much
//! of it is over. Of a message it is known who waits for it. So the order of a script takes memory
//! in proportion to its actions and the edges between them.

use std::collections::{BTreeMap, HashMap};

use phalanx_call::Lane;

use crate::action::{BufferId, Script};
use crate::error::ScriptError;

/// The order of a script's actions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HappensBefore {
    /// By action: those that it waits for, without those that come before another of them.
    direct: Vec<Vec<u32>>,
    /// By action: how many actions of each lane that ends in order are over when it starts.
    over: Vec<[u32; Lane::ALL.len()]>,
    /// By action: its lane, and its number there.
    places: Vec<(Lane, u32)>,
    /// How many actions each lane has.
    issued: [u32; Lane::ALL.len()],
    /// By message: the actions that wait for its end by name, in their order.
    waiters: HashMap<usize, Vec<u32>>,
}

impl HappensBefore {
    /// The order that a script implies. Explicit edges must point backwards.
    pub fn of(script: &Script) -> Result<Self, ScriptError> {
        let mut lanes: BTreeMap<Lane, usize> = BTreeMap::new();
        let mut writers: Vec<Option<usize>> = vec![None; script.buffers.len()];
        let mut readers: Vec<Vec<usize>> = vec![Vec::new(); script.buffers.len()];
        let mut order = Self::default();
        for (index, action) in script.actions.iter().enumerate() {
            let mut before = Vec::new();
            for &on in &action.after {
                if on >= index {
                    return Err(ScriptError::Cycle {
                        action: index,
                        what: action.label.clone(),
                        on,
                    });
                }
                before.push(on);
            }
            if action.lane.ends_in_order() {
                before.extend(lanes.insert(action.lane, index));
            }
            for BufferId(buffer) in action.reads() {
                before.extend(writers[buffer]);
            }
            // Ending a life is ordered as a write is: after all uses, and before the next write.
            let changes: Vec<BufferId> = action.writes().into_iter().chain(action.ends()).collect();
            for &BufferId(buffer) in &changes {
                before.extend(writers[buffer]);
                before.append(&mut readers[buffer]);
            }
            for BufferId(buffer) in action.reads() {
                readers[buffer].push(index);
            }
            for BufferId(buffer) in changes {
                writers[buffer] = Some(index);
            }
            before.retain(|&b| b != index);
            order.push(action.lane, before);
        }
        Ok(order)
    }

    /// Adds an action that comes after these ones. Latest first, an action that is already known to
    /// come before is implied by a later one, so it need not be waited for by name.
    fn push(&mut self, lane: Lane, mut before: Vec<usize>) {
        before.sort_unstable_by(|a, b| b.cmp(a));
        before.dedup();
        let own = self.places.len();
        let mut over = [0; Lane::ALL.len()];
        let mut direct: Vec<usize> = Vec::with_capacity(before.len());
        for earlier in before {
            if self.is_over(&over, &direct, earlier) {
                continue;
            }
            for (own, known) in over.iter_mut().zip(&self.over[earlier]) {
                *own = (*own).max(*known);
            }
            let (lane, number) = self.places[earlier];
            if lane.ends_in_order() {
                over[lane as usize] = over[lane as usize].max(number + 1);
            }
            direct.push(earlier);
        }
        for &message in direct.iter().filter(|&&earlier| !self.places[earlier].0.ends_in_order()) {
            self.waiters.entry(message).or_default().push(own as u32);
        }
        let issued = &mut self.issued[lane as usize];
        self.places.push((lane, *issued));
        *issued += 1;
        self.over.push(over);
        self.direct.push(direct.into_iter().rev().map(|before| before as u32).collect());
    }

    /// Whether an action has ended before one starts that waits for `direct` and knows `over`.
    fn is_over(&self, over: &[u32; Lane::ALL.len()], direct: &[usize], action: usize) -> bool {
        let (lane, number) = self.places[action];
        match lane.ends_in_order() {
            true => over[lane as usize] > number,
            false => direct.iter().any(|&later| later == action || self.before(action, later)),
        }
    }

    /// The actions that this one waits for, without those that come before another of them. Waiting
    /// for these is waiting for all that [`HappensBefore::before`] names.
    pub fn direct(&self, action: usize) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.direct[action].iter().map(|&before| before as usize)
    }

    /// Whether `a` ends before `b` starts, on every execution.
    pub fn before(&self, a: usize, b: usize) -> bool {
        let (lane, number) = self.places[a];
        match lane.ends_in_order() {
            true => self.over[b][lane as usize] > number,
            // Somebody waited for the message, and that one is over, or is `b` itself.
            false => self.waiters.get(&a).is_some_and(|waiters| {
                waiters
                    .iter()
                    .any(|&waiter| waiter as usize == b || self.before(waiter as usize, b))
            }),
        }
    }

    /// Numbers that it keeps: it grows with the actions and the edges between them, not with their square.
    pub fn size(&self) -> usize {
        let edges = self.direct.iter().map(Vec::len).sum::<usize>();
        let waiters = self.waiters.values().map(Vec::len).sum::<usize>();
        self.over.len() * Lane::ALL.len() + self.places.len() + edges + waiters
    }
}
