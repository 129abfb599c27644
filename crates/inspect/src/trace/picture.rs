//! The measured timeline above the predicted one.
//!
//! A turn of the schedule is what the first rank of a stage group did from the start of the turn's
//! first action to the end of its last. Where a head's forward and backward are one program, that
//! counts as backward. A forward that is run again is a separate turn, drawn when it ran: it needs
//! nothing from other stage groups, so it may end before the gradient arrives.
//!
//! The prediction is the same scripts, played with the median time of each program, message and
//! collective. The measured timeline is longer because of noise, and of ranks that share a core.
//! Below the turns are what the script does besides: weights that are gathered, gradients that are
//! summed, messages, updates.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use phalanx_pipeline::picture::{BesideKind, BesideTurns, Panel, svg};
use phalanx_pipeline::{At, Schedule, Timeline};
use phalanx_script::{Class, Kind, Lane, Part, ScheduledRun};
use phalanx_sim::{ActionTimes, MeasuredTimes, Playback};

use super::replay::{Replay, turns};
use phalanx_error::Result;
use phalanx_session::{Timetable, Trace};

/// A step as it was measured and as it was predicted, in milliseconds from the first issue of any
/// rank.
#[derive(Clone, Debug)]
pub struct Timelines {
    /// The schedule of the trace, with the second forwards that were run.
    pub schedule: Schedule,
    /// As it was measured.
    pub measured: Timeline,
    /// As it was predicted.
    pub predicted: Timeline,
    /// By stage group: what is done besides the turns, as measured and as predicted.
    pub beside: [Vec<Vec<BesideTurns>>; 2],
    /// By stage group: its ranks.
    pub ranks: Vec<Vec<usize>>,
    /// The step beside what its scripts say.
    pub replay: Replay,
}

impl Timelines {
    /// The timelines of a trace.
    pub fn new(trace: &Trace) -> Result<Self> {
        let (replay, all) = (Replay::new(trace)?, trace.classes());
        let rows = Rows::new(&trace.timetable, &all)?;
        let played = playback_times(&replay.predicted);
        let measured = rows.timeline(&replay.measured, replay.step);
        let predicted = rows.timeline(&played, replay.predicted.makespan);
        let beside = [&replay.measured, &played].map(|times| rows.beside(times));
        let (schedule, ranks) = (rows.schedule, ranks_of(&trace.timetable));
        drop(all);
        Ok(Self { schedule, measured, predicted, beside, ranks, replay })
    }
}

/// What a picture has a row for: one class of ranks of each stage group. Other replicas do the same.
struct Rows<'a> {
    timetable: &'a Timetable,
    classes: Vec<(usize, &'a Class<'a>)>,
    schedule: Schedule,
}

impl<'a> Rows<'a> {
    fn new(timetable: &'a Timetable, all: &'a [Class<'a>]) -> Result<Self> {
        let class = |stage_group: usize| {
            let of = |class: &Class<'_>| timetable.places[class.script.rank].stage_group;
            let mut all = all.iter().enumerate();
            all.find(|(_, class)| of(class) == stage_group).expect("a stage group has ranks")
        };
        let classes: Vec<_> = (0..timetable.schedule.stage_groups()).map(class).collect();
        let own: Vec<&Class<'_>> = classes.iter().map(|(_, class)| *class).collect();
        let schedule = with_second_forwards(timetable, &own)?;
        Ok(Self { timetable, classes, schedule })
    }

    /// The turns of a step, by the times of all classes.
    fn timeline(&self, times: &[MeasuredTimes], step: f64) -> Timeline {
        let (timetable, schedule) = (self.timetable, &self.schedule);
        let again = schedule.all().any(|(_, turn)| turn.part == Part::R);
        let of = |(stage_group, (at, class)): (usize, &(usize, &Class<'_>))| {
            let mut ran = RankTimes::default();
            ran.add(timetable, again, turns(class, &times[*at]));
            ran.turns(schedule, stage_group, &timetable.stages)
        };
        let times: Vec<Vec<Stretch>> = self.classes.iter().enumerate().map(of).collect();
        timeline(schedule, &times, step)
    }

    fn beside(&self, times: &[MeasuredTimes]) -> Vec<Vec<BesideTurns>> {
        self.classes.iter().map(|(at, class)| beside(class, &times[*at])).collect()
    }
}

/// Scripts that were played one after the other with given durations, in milliseconds on one clock. Each has so many
/// micro-batches; the timetable has all of them.
pub(crate) fn played_picture(
    timetable: &Timetable,
    scripts: &[(&[Class<'_>], &Playback)],
    microbatches: usize,
) -> Result<String> {
    let rows: Vec<Rows<'_>> =
        scripts.iter().map(|(classes, _)| Rows::new(timetable, classes)).collect::<Result<_>>()?;
    let times: Vec<Vec<MeasuredTimes>> =
        scripts.iter().map(|(_, playback)| playback_times(playback)).collect();
    let step = scripts.iter().map(|(_, playback)| playback.makespan).fold(0.0, f64::max);
    let first = &rows[0];
    let again = first.schedule.all().any(|(_, turn)| turn.part == Part::R);
    let stretches = (0..first.classes.len()).map(|stage_group| {
        let mut ran = RankTimes::default();
        for (number, (rows, times)) in rows.iter().zip(&times).enumerate() {
            let (at, class) = rows.classes[stage_group];
            let own = turns(class, &times[at]).map(|(turn, times)| {
                let microbatch = turn.microbatch + number * microbatches;
                (ScheduledRun { microbatch, ..turn }, times)
            });
            ran.add(timetable, again, own);
        }
        ran.turns(&first.schedule, stage_group, &timetable.stages)
    });
    let timeline = timeline(&first.schedule, &stretches.collect::<Vec<_>>(), step);
    let mut beside = vec![Vec::new(); first.classes.len()];
    for (rows, times) in rows.iter().zip(&times) {
        beside.iter_mut().zip(rows.beside(times)).for_each(|(all, own)| all.extend(own));
    }
    let ranks = ranks_of(timetable);
    let panel = Panel::new(&first.schedule, &timeline);
    Ok(svg(&[Panel { unit: "ms", beside: &beside, ranks: &ranks, ..panel }]))
}

/// For each stage group: its ranks, those of all replicas.
fn ranks_of(timetable: &Timetable) -> Vec<Vec<usize>> {
    let of = |group: usize| {
        let places = timetable.places.iter().enumerate();
        places.filter(|(_, at)| at.stage_group == group).map(|(rank, _)| rank).collect()
    };
    (0..timetable.schedule.stage_groups()).map(of).collect()
}

/// The turns of stage groups on one clock, in a step that takes so long.
fn timeline(schedule: &Schedule, times: &[Vec<Stretch>], step: f64) -> Timeline {
    let first = times.iter().flatten().map(|(start, _)| *start).fold(f64::INFINITY, f64::min);
    let at = |At { stage_group, index }| times[stage_group][index];
    let turns = Timeline::measured(schedule, at);
    let after = step - first - turns.makespan;
    turns.within(first, after)
}

/// Both timelines on one scale.
pub fn picture(timelines: &Timelines) -> String {
    let Timelines { schedule, measured, predicted, beside, ranks, .. } = timelines;
    let panel = |label, timeline, beside| Panel {
        label: Some(label),
        unit: "ms",
        beside,
        ranks,
        ..Panel::new(schedule, timeline)
    };
    let [seen, played] = beside;
    svg(&[panel("measured", measured, seen), panel("predicted", predicted, played)])
}

/// The schedule with the second forwards that its scripts have.
fn with_second_forwards(timetable: &Timetable, classes: &[&Class<'_>]) -> Result<Schedule> {
    let Timetable { schedule, stages, .. } = timetable;
    Ok(schedule.with_second_forwards(|at| {
        let (stage, microbatch) = (&stages[schedule.stage(at)], schedule.turn(at).microbatch);
        let mut turns = classes[at.stage_group].script.turns.iter().map(|(_, turn)| turn);
        turns.any(|turn| {
            turn.part == Part::R && turn.microbatch == microbatch && stage.contains(&turn.instance)
        })
    })?)
}

/// What was played, as if it had been measured.
fn playback_times(playback: &Playback) -> Vec<MeasuredTimes> {
    playback.classes.iter().map(|own| own.iter().copied().map(Some).collect()).collect()
}

/// What a script does besides its turns.
fn beside(class: &Class<'_>, times: &MeasuredTimes) -> Vec<BesideTurns> {
    let turns: BTreeSet<usize> = class.script.turns.iter().map(|(action, _)| *action).collect();
    let own = |(number, action): (usize, &phalanx_script::Action)| {
        let kind = match (&action.kind, action.lane) {
            (Kind::Gather(_), _) | (_, Lane::Gather) => BesideKind::Gather,
            (Kind::Reduce { .. }, _) | (_, Lane::Reduce) => BesideKind::Sum,
            (Kind::Send { .. }, Lane::Send) => BesideKind::Message,
            (Kind::Run(_) | Kind::Update { .. } | Kind::Clear { .. }, _) => BesideKind::Update,
            _ => return None,
        };
        let ActionTimes { started, ended, .. } =
            times[number].filter(|_| !turns.contains(&number))?;
        Some(BesideTurns { kind, start: started, end: ended, what: action.label.clone() })
    };
    class.script.actions.iter().enumerate().filter_map(own).collect()
}

/// Start and end.
type Stretch = (f64, f64);

/// What the first rank of a stage group ran, by instance and micro-batch.
#[derive(Default)]
struct RankTimes {
    parts: BTreeMap<(usize, usize), Vec<(Part, Stretch)>>,
}

impl RankTimes {
    fn add(
        &mut self,
        timetable: &Timetable,
        again: bool,
        turns: impl Iterator<Item = (ScheduledRun, ActionTimes)>,
    ) {
        // Where stages are recomputed, the model's last instance runs its forward right before its
        // backward, and that forward counts as backward, as it does where both are one program.
        let late = timetable.stages.last().map(|stage| stage.end - 1).filter(|_| again);
        for (turn, ActionTimes { started, ended, .. }) in turns {
            let fused = turn.part == Part::F && late == Some(turn.instance);
            let part = if fused { Part::FBW } else { turn.part };
            let own = self.parts.entry((turn.instance, turn.microbatch)).or_default();
            own.push((part, (started, ended)));
        }
    }

    /// When each turn of the stage group's list ran.
    fn turns(
        &self,
        schedule: &Schedule,
        stage_group: usize,
        stages: &[Range<usize>],
    ) -> Vec<Stretch> {
        let of = |index: usize| {
            let at = At { stage_group, index };
            let turn = schedule.turn(at);
            self.stretch(&stages[schedule.stage(at)], turn.microbatch, turn.part)
        };
        filled((0..schedule.turns(stage_group).len()).map(of).collect())
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
