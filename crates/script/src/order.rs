//! Happens-before: the one rule that runtime, planner and simulator share.
//!
//! An action starts when its lane is free and its inputs are ready. So it comes after the previous
//! action of its lane, after every earlier action that wrote what it reads or writes, after every
//! earlier action that read what it writes, and after its explicit edges. Messages are an exception:
//! a send ends only when its receiver takes it, which may be long after the next one is made, so the
//! lanes of messages keep the order of starts, and not of ends.

use std::collections::BTreeMap;

use phalanx_call::Lane;

use crate::action::{BufferId, Script};
use crate::error::ScriptError;

/// The order of a script's actions: direct predecessors, and all of them as bit sets. A
/// set is as long as there are earlier actions.
#[derive(Clone, Debug)]
pub struct HappensBefore {
    direct: Vec<Vec<usize>>,
    all: Vec<Vec<u64>>,
}

impl HappensBefore {
    /// The order that a script implies. Explicit edges must point backwards.
    pub fn of(script: &Script) -> Result<Self, ScriptError> {
        let n = script.actions.len();
        let mut lanes: BTreeMap<Lane, usize> = BTreeMap::new();
        let mut writers: BTreeMap<BufferId, usize> = BTreeMap::new();
        let mut readers: BTreeMap<BufferId, Vec<usize>> = BTreeMap::new();
        let mut order = Self { direct: Vec::with_capacity(n), all: Vec::with_capacity(n) };
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
            if !matches!(action.lane, Lane::Send | Lane::Receive) {
                before.extend(lanes.insert(action.lane, index));
            }
            for buffer in action.reads() {
                before.extend(writers.get(&buffer));
            }
            // Ending a life is ordered as a write is: after all uses, and before the next write.
            let changes: Vec<BufferId> = action.writes().into_iter().chain(action.ends()).collect();
            for buffer in &changes {
                before.extend(writers.get(buffer));
                before.extend(readers.remove(buffer).unwrap_or_default());
            }
            for buffer in action.reads() {
                readers.entry(buffer).or_default().push(index);
            }
            for buffer in changes {
                writers.insert(buffer, index);
            }
            before.retain(|&b| b != index);
            order.push(before);
        }
        Ok(order)
    }

    /// Adds an action that comes after these ones. Latest first, an action that is already known to
    /// come before is implied by a later one, so it need not be waited for by name.
    fn push(&mut self, mut before: Vec<usize>) {
        before.sort_unstable_by(|a, b| b.cmp(a));
        let mut all = vec![0u64; self.all.len().div_ceil(64)];
        before.retain(|&b| {
            let implied = all[b / 64] >> (b % 64) & 1 == 1;
            if !implied {
                all[b / 64] |= 1 << (b % 64);
                for (word, earlier) in all.iter_mut().zip(&self.all[b]) {
                    *word |= earlier;
                }
            }
            !implied
        });
        before.reverse();
        self.direct.push(before);
        self.all.push(all);
    }

    /// The actions that this one waits for, without those that come before another of them. Waiting
    /// for these is waiting for all that [`HappensBefore::before`] names.
    pub fn direct(&self, action: usize) -> &[usize] {
        &self.direct[action]
    }

    /// Whether `a` ends before `b` starts, on every execution.
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.all[b].get(a / 64).is_some_and(|word| word >> (a % 64) & 1 == 1)
    }
}
