//! Happens-before: the one rule that runtime, planner and simulator share.
//!
//! An action starts when its lane is free and its inputs are ready. So it comes after the previous
//! action of its lane, after every earlier action that wrote what it reads or writes, after every
//! earlier action that read what it writes, and after its explicit edges. Messages are an exception:
//! a send ends only when its receiver takes it, which may be long after the next one is made, so the
//! lanes of messages keep the order of starts, and not of ends.
//!
//! Actions that end in order need no list of everything before them: one number per lane says how
//! many of its actions are over. For a message, the actions that wait for it are stored. So the
//! order of a script takes memory proportional to its actions and the edges between them.

use std::collections::{BTreeMap, HashMap};

use phalanx_call::Lane;

use crate::action::{BufferId, Script};
use crate::error::ScriptError;

/// The order of a script's actions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HappensBefore {
    /// For each action: those that it waits for, without those that are implied by others.
    direct: Vec<Vec<u32>>,
    /// For each action: how many actions of each lane that ends in order are over when it starts.
    over: Vec<[u32; Lane::ALL.len()]>,
    /// For each action: its lane, and its number there.
    places: Vec<(Lane, u32)>,
    /// How many actions each lane has.
    issued: [u32; Lane::ALL.len()],
    /// For each message: the actions that explicitly wait for its end, in order.
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
            // Ending a live range is ordered like a write: after all uses, and before the next
            // write.
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

    /// Adds an action that comes after these ones. They are visited latest first: an earlier one
    /// that is implied by a later one needs no explicit wait.
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

    /// Whether `action` has ended before the start of an action that waits for `direct` and has
    /// `over`.
    fn is_over(&self, over: &[u32; Lane::ALL.len()], direct: &[usize], action: usize) -> bool {
        let (lane, number) = self.places[action];
        match lane.ends_in_order() {
            true => over[lane as usize] > number,
            false => direct.iter().any(|&later| later == action || self.before(action, later)),
        }
    }

    /// The actions that this one waits for, without those that are implied by others. Waiting for
    /// these means waiting for all actions for which [`HappensBefore::before`] is true.
    pub fn direct(&self, action: usize) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.direct[action].iter().map(|&before| before as usize)
    }

    /// Whether `a` ends before `b` starts, on every execution.
    pub fn before(&self, a: usize, b: usize) -> bool {
        let (lane, number) = self.places[a];
        match lane.ends_in_order() {
            true => self.over[b][lane as usize] > number,
            // An action waited for the message, and that action is over, or is `b` itself.
            false => self.waiters.get(&a).is_some_and(|waiters| {
                waiters
                    .iter()
                    .any(|&waiter| waiter as usize == b || self.before(waiter as usize, b))
            }),
        }
    }

    /// How many numbers it keeps: proportional to the actions and the edges between them, not to
    /// their square.
    pub fn size(&self) -> usize {
        let edges = self.direct.iter().map(Vec::len).sum::<usize>();
        let waiters = self.waiters.values().map(Vec::len).sum::<usize>();
        self.over.len() * Lane::ALL.len() + self.places.len() + edges + waiters
    }
}
