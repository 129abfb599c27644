//! Happens-before: the one rule that runtime, planner and simulator share.
//!
//! An action starts when its lane is free and its inputs are ready. So it comes after the previous
//! action of its lane, after every earlier action that wrote what it reads or writes, after every
//! earlier action that read what it writes, and after its explicit edges.

use std::collections::BTreeMap;

use crate::action::{BufferId, Lane, Script};
use crate::error::ScriptError;

/// The order of a script's actions: direct predecessors, and all of them as bit sets.
#[derive(Clone, Debug)]
pub struct HappensBefore {
    direct: Vec<Vec<usize>>,
    all: Vec<Vec<u64>>,
}

impl HappensBefore {
    /// The order that a script implies. Explicit edges must point backwards.
    pub fn of(script: &Script) -> Result<Self, ScriptError> {
        let n = script.actions.len();
        let words = n.div_ceil(64);
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
            before.extend(lanes.insert(action.lane, index));
            for buffer in action.reads() {
                before.extend(writers.get(&buffer));
            }
            for buffer in action.writes() {
                before.extend(writers.get(&buffer));
                before.extend(readers.remove(&buffer).unwrap_or_default());
            }
            for buffer in action.reads() {
                readers.entry(buffer).or_default().push(index);
            }
            for buffer in action.writes() {
                writers.insert(buffer, index);
            }
            before.sort_unstable();
            before.dedup();
            before.retain(|&b| b != index);
            let mut all = vec![0; words];
            for &b in &before {
                all[b / 64] |= 1 << (b % 64);
                for (word, earlier) in all.iter_mut().zip(&order.all[b]) {
                    *word |= earlier;
                }
            }
            order.direct.push(before);
            order.all.push(all);
        }
        Ok(order)
    }

    /// The actions that must end before this one starts, without those implied by others.
    pub fn direct(&self, action: usize) -> &[usize] {
        &self.direct[action]
    }

    /// Whether `a` ends before `b` starts, on every execution.
    pub fn before(&self, a: usize, b: usize) -> bool {
        self.all[b][a / 64] >> (a % 64) & 1 == 1
    }
}
