//! The measured timeline above the predicted one.
//!
//! A turn of the schedule is what the first rank of a stage group did from the start of the turn's
//! first action to the end of its last. Where a head's forward and backward are one program, that
//! counts as backward. A forward that is run again is a separate turn, drawn when it ran: it needs
//! nothing from other stage groups, so it may end before the gradient arrives.
//!
//! The prediction is a simulation of the same turns, each with the median time of its stage and
//! part, and with messages that take no time. The measured timeline is longer because of noise,
//! messages, and ranks that share a core.

use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_pipeline::picture::{Panel, svg};
use phalanx_pipeline::{At, Schedule, Timeline, TurnCosts, simulate};
use phalanx_script::Part;

use phalanx_error::Result;
use phalanx_session::{Timetable, Trace};

/// A schedule as it was measured and as it was predicted, in milliseconds.
#[derive(Clone, Debug)]
pub struct Timelines {
    /// The schedule of the trace, with the second forwards that were run.
    pub schedule: Schedule,
    /// As it was measured.
    pub measured: Timeline,
    /// As it was predicted.
    pub predicted: Timeline,
}

impl Timelines {
    /// The timelines of a trace.
    pub fn new(trace: &Trace) -> Result<Self> {
        let Timetable { schedule, stages, .. } = &trace.timetable;
        let ran: Vec<RankTimes> = (0..schedule.stage_groups())
            .map(|stage_group| RankTimes::new(trace, stage_group))
            .collect();
        let schedule = schedule.with_second_forwards(|at| {
            let (stage, microbatch) = (&stages[schedule.stage(at)], schedule.turn(at).microbatch);
            ran[at.stage_group].stretch(stage, microbatch, Part::R).is_some()
        })?;
        let times: Vec<Vec<Stretch>> = ran.iter().map(|ran| ran.turns(&schedule, stages)).collect();
        let measured =
            Timeline::measured(&schedule, |At { stage_group, index }| times[stage_group][index]);
        let predicted = simulate(&schedule, &TurnCosts::measured(&measured, 0.0)?)?;
        Ok(Self { schedule, measured, predicted })
    }
}

/// Both timelines on one scale.
pub fn picture(Timelines { schedule, measured, predicted }: &Timelines) -> String {
    let panel = |label, timeline| Panel {
        label: Some(label),
        unit: "ms",
        ..Panel::new(schedule, timeline)
    };
    svg(&[panel("measured", measured), panel("predicted", predicted)])
}

/// Start and end.
type Stretch = (f64, f64);

/// What the first rank of a stage group ran, by instance and micro-batch.
struct RankTimes {
    stage_group: usize,
    parts: BTreeMap<(usize, usize), Vec<(Part, Stretch)>>,
}

impl RankTimes {
    fn new(trace: &Trace, stage_group: usize) -> Self {
        let Timetable { stages, places, .. } = &trace.timetable;
        let first = places
            .iter()
            .position(|at| at.stage_group == stage_group && at.place == 0)
            .unwrap_or(0);
        let turns = || trace.ranks.iter().flatten().filter_map(|traced| traced.turn);
        // Where stages are recomputed, the model's last instance runs its forward right before its
        // backward, and that forward counts as backward, as it does where both are one program.
        let again = turns().any(|turn| turn.part == Part::R);
        let late = stages.last().map(|stage| stage.end - 1).filter(|_| again);
        let mut parts: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for traced in &trace.ranks[first] {
            let [start, end] =
                [traced.times.started, traced.times.ended].map(|t| 1e3 * t.as_secs_f64());
            if let Some(turn) = traced.turn {
                let fused = turn.part == Part::F && late == Some(turn.instance);
                let part = if fused { Part::FBW } else { turn.part };
                let own = parts.entry((turn.instance, turn.microbatch)).or_default();
                own.push((part, (start, end)));
            }
        }
        Self { stage_group, parts }
    }

    /// When each turn of the stage group's list ran.
    fn turns(&self, schedule: &Schedule, stages: &[Range<usize>]) -> Vec<Stretch> {
        let of = |index: usize| {
            let at = At { stage_group: self.stage_group, index };
            let turn = schedule.turn(at);
            self.stretch(&stages[schedule.stage(at)], turn.microbatch, turn.part)
        };
        filled((0..schedule.turns(self.stage_group).len()).map(of).collect())
    }

    /// From the start of the first action of a turn to the end of its last, if it has any.
    fn stretch(&self, stage: &Range<usize>, microbatch: usize, part: Part) -> Option<Stretch> {
        let own = stage.clone().filter_map(|instance| self.parts.get(&(instance, microbatch)));
        let shown = own.flatten().filter(|(own, _)| shown_as(*own, part)).map(|(_, s)| *s);
        shown.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }
}

/// Whether an instance's part belongs to a turn of this part: if forward and backward of a head are
/// one program, it belongs to the backward.
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
