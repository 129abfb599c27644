//! The way of a boundary value through the stage groups that read it.
//!
//! A value goes from the instance that produces it to its readers in the order of the model, and from one
//! stage group to the next where these change: the cross-attention of a decoder reads the encoder's result
//! on every stage, a skip connection is read far behind. Its cotangent comes back the same way, and each
//! stage group adds the shares of its own readers, the last first. So a sum of cotangents has the order
//! that it has on one rank, in every schedule.

use phalanx_ir::Model;

use super::links::{Direction, Point};
use super::wiring::Wiring;
use crate::error::ScriptError;
use crate::hash::QuickMap;
use crate::rolling::RollingTurns;
use crate::schedule::Part;
use crate::stage_group::StageGroup;

/// Where each instance's forward and backward of each micro-batch are; empty if there is one stage group.
#[derive(Debug, Default)]
pub(super) struct Flow {
    places: QuickMap<(usize, usize, Direction), Point>,
    /// In a row of scripts: the stage group of each instance, whose forward may be in the script before or after. None
    /// if several hold it.
    groups: QuickMap<usize, Option<usize>>,
    /// In a row of scripts: the stage group of each instance and micro-batch whose forward is in the script before or
    /// after.
    elsewhere: QuickMap<(usize, usize), usize>,
    /// Micro-batches from this number on are empty: they go through some instances only.
    real: usize,
}

/// Readers of a value, one after the other in the model, on the same stage group.
#[derive(PartialEq, Debug)]
pub(super) struct Stop {
    stage_group: usize,
    /// The instance under whose name the stage group holds the value: its producer, or the first reader if the
    /// stage group had the value before.
    pub(super) holder: usize,
    pub(super) readers: Vec<usize>,
}

impl Flow {
    pub(super) fn new(
        model: &Model,
        stage_groups: &[StageGroup<'_>],
        rolling: Option<&RollingTurns>,
        real: usize,
    ) -> Result<Self, ScriptError> {
        let (mut places, mut elsewhere) = (QuickMap::default(), QuickMap::default());
        let mut groups: QuickMap<usize, Option<usize>> = QuickMap::default();
        for (stage_group, own) in stage_groups.iter().enumerate() {
            if let Some(rolling) = rolling {
                let next = &rolling.next[stage_group];
                let next = next.iter().map(|turn| (turn.instance, turn.microbatch));
                let other = rolling.in_flight[stage_group].iter().copied().chain(next);
                elsewhere.extend(other.map(|forward| (forward, stage_group)));
            }
            for (turn, step) in own.turns.iter().enumerate() {
                if rolling.is_some() {
                    let known = groups.entry(step.instance).or_insert(Some(stage_group));
                    *known = known.filter(|first| *first == stage_group);
                }
                for direction in directions(step.part) {
                    let key = (step.instance, step.microbatch, *direction);
                    if places.insert(key, Point { stage_group, turn }).is_some() {
                        let name = &model.instances()[step.instance].name;
                        let mb = step.microbatch;
                        return Err(ScriptError::Schedule(format!(
                            "`{name}` runs the {direction:?} of micro-batch {mb} twice"
                        )));
                    }
                }
            }
        }
        Ok(Self { places, groups, elsewhere, real })
    }

    /// Whether another script of a row runs an instance's forward.
    pub(super) fn runs_elsewhere(&self, instance: usize, microbatch: usize) -> bool {
        self.elsewhere(instance, microbatch).is_some()
    }

    fn elsewhere(&self, instance: usize, microbatch: usize) -> Option<usize> {
        let only = self.groups.get(&instance).copied().flatten();
        only.or_else(|| self.elsewhere.get(&(instance, microbatch)).copied())
    }

    pub(super) fn place(
        &self,
        instance: usize,
        microbatch: usize,
        direction: Direction,
    ) -> Option<Point> {
        self.places.get(&(instance, microbatch, direction)).copied()
    }

    /// Where a value goes. The first stop is where it is produced, with or without readers; of an empty micro-batch,
    /// nothing is produced by instances that it does not go through. If an instance runs nowhere, that instance.
    pub(super) fn stops(
        &self,
        wiring: &Wiring,
        source: usize,
        boundary: &str,
        microbatch: usize,
    ) -> Result<Vec<Stop>, usize> {
        let group = |instance: usize| {
            let place = self.place(instance, microbatch, Direction::Forward);
            let found = place.map(|place| place.stage_group);
            found.or_else(|| self.elsewhere(instance, microbatch))
        };
        let empty = microbatch >= self.real;
        let Some(first) = group(source) else {
            return if empty { Ok(Vec::new()) } else { Err(source) };
        };
        let mut stops = vec![Stop { stage_group: first, holder: source, readers: Vec::new() }];
        for &reader in wiring.readers(source, boundary) {
            let Some(stage_group) = group(reader) else {
                if empty {
                    continue;
                }
                return Err(reader);
            };
            match stops.last_mut() {
                Some(last) if last.stage_group == stage_group => last.readers.push(reader),
                _ => {
                    let known = stops.iter().any(|stop| stop.stage_group == stage_group);
                    let holder = if known { reader } else { source };
                    stops.push(Stop { stage_group, holder, readers: vec![reader] });
                }
            }
        }
        Ok(stops)
    }

    /// The instance under whose name a reader's stage group holds a value.
    pub(super) fn holder(
        &self,
        wiring: &Wiring,
        [source, reader]: [usize; 2],
        boundary: &str,
        microbatch: usize,
    ) -> usize {
        if self.places.is_empty() || wiring.readers(source, boundary).len() < 2 {
            return source;
        }
        let stops = self.stops(wiring, source, boundary, microbatch);
        let own = |stop: &Stop| stop.readers.contains(&reader).then_some(stop.holder);
        // What runs nowhere was refused when the links were found.
        stops.into_iter().flatten().find_map(|stop| own(&stop)).unwrap_or(source)
    }
}

/// The directions in which a part goes through an instance.
fn directions(part: Part) -> &'static [Direction] {
    match part {
        Part::F => &[Direction::Forward],
        Part::B | Part::BW => &[Direction::Backward],
        Part::FBW => &[Direction::Forward, Direction::Backward],
        // What other stage groups need from a forward comes from its first run.
        Part::W | Part::R => &[],
    }
}
