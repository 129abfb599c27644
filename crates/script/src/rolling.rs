//! Pipelines that do not drain between scripts: an endless row of turns, cut into scripts.
//!
//! Every stage group's turns are cut right after its last backward of a step. So all scripts but the first and the last are
//! the same: the backwards of one step and, between them, as many forwards as stages follow ahead of it, which belong to
//! the step after. What a forward keeps for its backward, and what arrived for a forward that comes later, is carried from
//! a script to the next in buffers of their own kind ([`Source::Carried`](crate::Source::Carried)). The checker knows of each
//! of them which micro-batch it holds, and that a script leaves there what the next one reads.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::action::{Action, BufferId, Kind, Script, Source};
use crate::error::ScriptError;
use crate::key::BufferKey;
use crate::schedule::{Part, ScheduledRun};

/// Which script of an endless row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RollPart {
    /// The first one: nothing is in flight when it begins.
    First,
    /// Any number of them.
    Middle,
    /// The last one: it runs no forwards ahead, so nothing is in flight when it ends.
    Last,
}

impl RollPart {
    /// Every part.
    pub const ALL: [RollPart; 3] = [RollPart::First, RollPart::Middle, RollPart::Last];

    /// Whether forwards of the script before wait for their backwards.
    pub fn begins_in_flight(self) -> bool {
        self != RollPart::First
    }

    /// Whether forwards are left to the next script.
    pub fn ends_in_flight(self) -> bool {
        self != RollPart::Last
    }
}

/// A script of an endless row: which, and how many micro-batches it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowWindow {
    /// Which script.
    pub part: RollPart,
    /// Micro-batches whose backwards it runs. Those of the next script are counted on from here.
    pub microbatches: usize,
}

/// The turns of all stage groups in one script of an endless row.
#[derive(Clone, Debug)]
pub struct RollingTurns {
    /// Which script.
    pub window: RowWindow,
    /// For each stage group: its turns.
    pub turns: Vec<Vec<ScheduledRun>>,
    /// For each stage group: the forwards (instance, micro-batch) that scripts before have run, and whose backwards this
    /// one runs.
    pub(crate) in_flight: Vec<BTreeSet<(usize, usize)>>,
    /// For each stage group: the forwards of the next script, which read what this one may have to receive.
    pub(crate) next: Vec<Vec<ScheduledRun>>,
}

impl RollingTurns {
    /// Cuts the turns of three scripts, each of so many micro-batches, into the first, any one in the middle and
    /// the last.
    pub fn cut(turns: &[Vec<ScheduledRun>], microbatches: usize) -> Result<[Self; 3], ScriptError> {
        let pieces: Vec<[Range<usize>; 3]> =
            turns.iter().map(|own| pieces(own, microbatches)).collect::<Result<_, _>>()?;
        let of = |number: usize| {
            let part = RollPart::ALL[number];
            let first = number * microbatches;
            let renumbered = |turn: &ScheduledRun| {
                let microbatch = turn.microbatch.checked_sub(first)?;
                Some(ScheduledRun { microbatch, ..*turn })
            };
            let own = |(all, pieces): (&Vec<ScheduledRun>, &[Range<usize>; 3])| {
                all[pieces[number].clone()].iter().filter_map(renumbered).collect()
            };
            let before = |(all, pieces): (&Vec<ScheduledRun>, &[Range<usize>; 3])| {
                let ended = &all[..pieces[number].start];
                let ahead = ended.iter().filter(|turn| forward(turn)).filter_map(renumbered);
                ahead.map(|turn| (turn.instance, turn.microbatch)).collect()
            };
            let after = |(all, pieces): (&Vec<ScheduledRun>, &[Range<usize>; 3])| {
                let Some(next) = pieces.get(number + 1) else { return Vec::new() };
                all[next.clone()]
                    .iter()
                    .filter(|turn| forward(turn))
                    .filter_map(renumbered)
                    .collect()
            };
            let both = || turns.iter().zip(&pieces);
            Self {
                window: RowWindow { part, microbatches },
                turns: both().map(own).collect(),
                in_flight: both().map(before).collect(),
                next: both().map(after).collect(),
            }
        };
        Ok([0, 1, 2].map(of))
    }
}

fn forward(turn: &ScheduledRun) -> bool {
    matches!(turn.part, Part::F | Part::FBW)
}

/// The turns of the three scripts: each ends right after the last gradient of its micro-batches.
fn pieces(turns: &[ScheduledRun], microbatches: usize) -> Result<[Range<usize>; 3], ScriptError> {
    let mut from = 0;
    let mut piece = |number: usize| -> Result<Range<usize>, ScriptError> {
        let own = number * microbatches..(number + 1) * microbatches;
        let ends = |turn: &ScheduledRun| {
            own.contains(&turn.microbatch) && matches!(turn.part, Part::W | Part::BW | Part::FBW)
        };
        let last = turns.iter().rposition(ends).filter(|last| *last >= from).ok_or_else(|| {
            ScriptError::Schedule(format!(
                "a stage group has no backward of the micro-batches {own:?}, so its turns cannot be cut there"
            ))
        })?;
        let piece = from..last + 1;
        from = last + 1;
        Ok(piece)
    };
    Ok([piece(0)?, piece(1)?, piece(2)?])
}

impl Script {
    /// Whether the script finds carried buffers written.
    pub(crate) fn begins_in_flight(&self) -> bool {
        self.window.is_some_and(|window| window.part.begins_in_flight())
    }

    /// The buffers that are carried from a script to the next.
    pub(crate) fn carried(&self) -> impl Iterator<Item = BufferId> + '_ {
        let carried =
            |(_, buffer): &(usize, &crate::action::Buffer)| buffer.source == Source::Carried;
        self.buffers.iter().enumerate().filter(carried).map(|(index, _)| BufferId(index))
    }

    /// Marks the buffers that another script of the row carries. If the next script finds them here, each of them
    /// must be here.
    pub(crate) fn carry_as(&mut self, other: &Script) -> Result<(), ScriptError> {
        let mut wanted: BTreeMap<&BufferKey, usize> = (other.carried())
            .map(|own| (&other.buffers[own.0].key, other.buffers[own.0].bytes))
            .collect();
        for buffer in &mut self.buffers {
            let Some(bytes) = wanted.remove(&buffer.key) else { continue };
            if bytes != buffer.bytes {
                return Err(ScriptError::Schedule(format!(
                    "a script carries {bytes} bytes of {:?}, another one {}",
                    buffer.key, buffer.bytes
                )));
            }
            buffer.source = Source::Carried;
        }
        let ends = self.window.is_some_and(|window| window.part.ends_in_flight());
        match wanted.into_keys().next().filter(|_| ends) {
            Some(missing) => Err(ScriptError::Schedule(format!(
                "the next script reads {missing:?}, which this one does not leave"
            ))),
            None => Ok(()),
        }
    }
}

/// The checker of carried buffers, action by action: which micro-batch each of them holds.
pub(crate) struct Carried<'a> {
    script: &'a Script,
    turns: BTreeMap<usize, ScheduledRun>,
    /// What each carried buffer holds now; nothing before it is written.
    holds: BTreeMap<BufferId, Option<Held>>,
}

/// What a carried buffer holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// A value of a micro-batch, counted in this script.
    Of(usize),
    /// Numbers of the script before.
    Old,
    /// Numbers of this script.
    New,
}

impl<'a> Carried<'a> {
    pub(crate) fn new(script: &'a Script) -> Self {
        let found = |buffer: BufferId| match &script.buffers[buffer.0].key {
            BufferKey::Value(value) => Held::Of(value.microbatch),
            _ => Held::Old,
        };
        let begins = |buffer| (buffer, script.begins_in_flight().then(|| found(buffer)));
        let turns = script.turns.iter().copied().collect();
        Self { script, turns, holds: script.carried().map(begins).collect() }
    }

    pub(crate) fn apply(&mut self, index: usize, action: &Action) -> Result<(), ScriptError> {
        if self.holds.is_empty() {
            return Ok(());
        }
        let microbatch = self.microbatch(index, action);
        for buffer in action.reads() {
            let Some(found) = self.holds.get(&buffer) else { continue };
            let wrong = match (found, microbatch) {
                (Some(Held::Of(found)), Some(wanted)) => *found != wanted,
                (None, _) => true,
                _ => false,
            };
            if wrong {
                let found = self.told(*found);
                let why = match microbatch {
                    Some(wanted) => format!("{found}; it needs micro-batch {wanted}"),
                    None => found,
                };
                return Err(self.error(index, &action.label, buffer, why));
            }
        }
        for buffer in action.writes() {
            let value = matches!(self.script.buffers[buffer.0].key, BufferKey::Value(_));
            let Some(holds) = self.holds.get_mut(&buffer) else { continue };
            *holds = match (value, microbatch) {
                (true, Some(own)) => Some(Held::Of(own)),
                (true, None) => None,
                (false, _) => Some(Held::New),
            };
        }
        if let Some(holds) = action.ends().and_then(|ended| self.holds.get_mut(&ended)) {
            *holds = None;
        }
        Ok(())
    }

    /// The next script finds each value of its micro-batches.
    pub(crate) fn end(&self) -> Result<(), ScriptError> {
        let Some(window) = self.script.window.filter(|own| own.part.ends_in_flight()) else {
            return Ok(());
        };
        for (&buffer, found) in &self.holds {
            let wanted = match &self.script.buffers[buffer.0].key {
                BufferKey::Value(value) => Held::Of(value.microbatch + window.microbatches),
                _ => Held::New,
            };
            if *found != Some(wanted) {
                let (found, wanted) = (self.told(*found), self.told(Some(wanted)));
                let why = format!("{found} at the end; the next script needs that {wanted}");
                let end = self.script.actions.len();
                return Err(self.error(end, "the end of the script", buffer, why));
            }
        }
        Ok(())
    }

    /// The micro-batch that an action works on.
    fn microbatch(&self, index: usize, action: &Action) -> Option<usize> {
        if let Some(turn) = self.turns.get(&index) {
            return Some(turn.microbatch);
        }
        match &action.kind {
            Kind::Send { messages, .. } | Kind::Receive { messages, .. } => {
                messages.first().map(|message| message.value.microbatch)
            }
            // The slices of a value that arrived.
            Kind::Gather(run) => {
                run.inputs.iter().find_map(|view| match &self.script.buffers[view.buffer.0].key {
                    BufferKey::Slice(value) => Some(value.microbatch),
                    _ => None,
                })
            }
            _ => None,
        }
    }

    fn told(&self, held: Option<Held>) -> String {
        match held {
            None => "it holds nothing".to_owned(),
            Some(Held::Of(microbatch)) => format!("it holds micro-batch {microbatch}"),
            Some(Held::Old) => "it holds numbers of the script before".to_owned(),
            Some(Held::New) => "it holds numbers of this script".to_owned(),
        }
    }

    fn error(&self, action: usize, what: &str, buffer: BufferId, why: String) -> ScriptError {
        let name = self.script.name(buffer);
        ScriptError::Carried {
            action,
            what: what.to_owned(),
            why: format!("`{name}` is carried: {why}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn turn(part: Part, microbatch: usize) -> ScheduledRun {
        ScheduledRun { instance: 0, part, microbatch }
    }

    /// 1F1B with two forwards ahead, over steps of three micro-batches, by hand.
    #[test]
    fn a_row_is_cut_after_the_last_backward_of_a_step() {
        let mut all: Vec<ScheduledRun> = vec![turn(Part::F, 0), turn(Part::F, 1)];
        for microbatch in 0..9 {
            if microbatch + 2 < 9 {
                all.push(turn(Part::F, microbatch + 2));
            }
            all.push(turn(Part::BW, microbatch));
        }
        let parts = RollingTurns::cut(&[all], 3).unwrap();
        let told = |own: &RollingTurns| {
            let text = own.turns[0].iter().map(|turn| format!("{}{}", turn.part, turn.microbatch));
            text.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(told(&parts[0]), "F0 F1 F2 BW0 F3 BW1 F4 BW2");
        assert_eq!(told(&parts[1]), "F2 BW0 F3 BW1 F4 BW2");
        assert_eq!(told(&parts[2]), "F2 BW0 BW1 BW2");
        let flying: Vec<_> = parts[1].in_flight[0].iter().copied().collect();
        assert_eq!((flying, parts[0].in_flight[0].len()), (vec![(0, 0), (0, 1)], 0));
        let next: Vec<usize> = parts[1].next[0].iter().map(|turn| turn.microbatch).collect();
        assert_eq!(next, [5]);
    }

    #[test]
    fn what_has_no_backward_is_not_cut() {
        let all = vec![turn(Part::F, 0), turn(Part::BW, 0), turn(Part::F, 1)];
        let said = RollingTurns::cut(&[all], 1).unwrap_err().to_string();
        assert!(said.contains("no backward of the micro-batches 1..2"), "{said}");
    }
}
