//! The measured timeline above the predicted one.
//!
//! A schedule's turn is what a device's first rank did from the start of the turn's first action to the
//! end of its last. Where a head's forward and backward are one program, that counts as backward; and so
//! does a forward that is run again, as if right before it. The
//! prediction is what the simulator makes of the same schedule if every turn took the mean time of its
//! stage and part, and messages none: what is longer in reality is noise, messages, and ranks that share
//! a core.

use std::collections::BTreeMap;

use phalanx_pipeline::picture::{Panel, svg};
use phalanx_pipeline::{At, Costs, Timeline, simulate};
use phalanx_script::Part;

use crate::error::Result;
use crate::session::{Timetable, Trace};

/// A schedule as it was measured and as it was predicted, in milliseconds.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Played {
    pub measured: Timeline,
    pub predicted: Timeline,
}

impl Played {
    /// The timelines of a trace.
    pub fn new(trace: &Trace) -> Result<Self> {
        let schedule = &trace.timetable.schedule;
        let times: Vec<Vec<Stretch>> =
            (0..schedule.devices()).map(|device| turns(trace, device)).collect();
        let measured = Timeline::measured(schedule, |At { device, index }| times[device][index]);
        let predicted = simulate(schedule, &Costs::measured(&measured, 0.0)?)?;
        Ok(Self { measured, predicted })
    }
}

/// Both timelines on one scale.
pub fn picture(trace: &Trace, Played { measured, predicted }: &Played) -> String {
    let schedule = &trace.timetable.schedule;
    let panel = |label, timeline| Panel {
        label: Some(label),
        unit: "ms",
        ..Panel::new(schedule, timeline)
    };
    svg(&[panel("measured", measured), panel("predicted", predicted)])
}

/// Start and end.
type Stretch = (f64, f64);

/// When a device's first rank did each turn of its list.
fn turns(trace: &Trace, device: usize) -> Vec<Stretch> {
    let Timetable { schedule, stages, places, .. } = &trace.timetable;
    let first = places.iter().position(|at| at.device == device && at.place == 0).unwrap_or(0);
    let mut ran: BTreeMap<(usize, usize), Vec<(Part, Stretch)>> = BTreeMap::new();
    for traced in &trace.ranks[first] {
        let [start, end] =
            [traced.times.started, traced.times.ended].map(|t| 1e3 * t.as_secs_f64());
        if let Some(turn) = traced.turn {
            let own = ran.entry((turn.instance, turn.microbatch)).or_default();
            own.push((turn.part, (start, end)));
        }
    }
    let stretch = |index: usize| -> Option<Stretch> {
        let at = At { device, index };
        let turn = schedule.turn(at);
        let instances = stages[schedule.stage(at)].clone();
        let own = || {
            let ran = |instance| ran.get(&(instance, turn.microbatch));
            instances.clone().filter_map(ran).flatten()
        };
        let shown = own().filter(|(part, _)| shown_as(*part, turn.part)).map(|(_, s)| *s);
        let (start, end) = shown.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
        // A forward that is run again may be over long before its backward can begin.
        let backward = matches!(turn.part, Part::B | Part::BW);
        let again = own().filter(|(part, _)| backward && *part == Part::R);
        Some((start - again.map(|(_, (start, end))| end - start).sum::<f64>(), end))
    };
    filled((0..schedule.turns(device).len()).map(stretch).collect())
}

/// Whether an instance's part belongs to a turn of this part: where both ways of a head are one program,
/// to its backward.
fn shown_as(part: Part, turn: Part) -> bool {
    part == turn || (part == Part::FBW && matches!(turn, Part::B | Part::BW))
}

/// Turns without actions, as a head's forward may be, take no time between their neighbours.
fn filled(stretches: Vec<Option<Stretch>>) -> Vec<Stretch> {
    let first = stretches.iter().flatten().next().map_or(0.0, |(start, _)| *start);
    let mut end = first;
    let fill = |stretch: Option<Stretch>| {
        let stretch = stretch.unwrap_or((end, end));
        end = stretch.1;
        stretch
    };
    stretches.into_iter().map(fill).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_without_actions_lie_between_their_neighbours() {
        let found = filled(vec![None, Some((2.0, 3.0)), None, Some((4.0, 5.0)), None]);
        assert_eq!(found, [(2.0, 2.0), (2.0, 3.0), (3.0, 3.0), (4.0, 5.0), (5.0, 5.0)]);
    }
}
