//! An event simulator: when every turn starts and ends.
//!
//! A stage group runs its list in order. A turn starts when its group is free and everything it
//! needs has arrived; a message from another group arrives one hop after it was sent. A pair of turns starts when both have what
//! they need, and their messages are sent when both have ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use phalanx_script::Updates;

use crate::costs::TurnCosts;
use crate::error::Result;
use crate::flow::{self, At, Phase};
use crate::schedule::Schedule;
use crate::turn::Turn;

/// A turn with its times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timed {
    /// The turn.
    pub turn: Turn,
    /// The stage that it works on.
    pub stage: usize,
    /// When it starts.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// Whether it has no micro-batch, and computes on zeros.
    pub empty: bool,
}

/// The times of all turns, and the numbers that follow from them.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// For each stage group: its turns in order.
    pub stage_groups: Vec<Vec<Timed>>,
    /// When the last stage group ends; the first starts at 0.
    pub makespan: f64,
    /// The longest time of a stage group from its first start to its last end. Shorter than the
    /// makespan if groups start and end at different times, as in ZB-H2 and ZB-V.
    pub span: f64,
    /// The work of the busiest stage group, without waiting and without what is computed on zeros.
    pub ideal: f64,
    /// `(span − ideal) ÷ ideal`, the bubble as Megatron reports it.
    pub bubble_ideal: f64,
    /// `(span − ideal) ÷ span`, the bubble as GPipe and Zero Bubble report it.
    pub bubble_total: f64,
    /// For each stage group: the largest number of forwards whose B has not ended, in chunks.
    pub peak_in_flight: Vec<usize>,
    /// For each stage group: the largest number of forwards whose W has not ended, in chunks.
    pub peak_until_w: Vec<usize>,
    /// For each stage group: the most versions of the weights that it holds.
    pub weight_versions: Vec<usize>,
}

/// Simulates a schedule.
pub fn simulate(schedule: &Schedule, costs: &TurnCosts) -> Result<Timeline> {
    costs.fit(schedule)?;
    let work = |stage_group: usize, timed: &Timed| costs.of(schedule, stage_group, &timed.turn);
    let timeline = Timeline::of(schedule, play(schedule, costs), work);
    match timeline.makespan.is_finite() {
        true => Ok(timeline),
        false => Err(costs.too_long(schedule)),
    }
}

impl Timeline {
    /// The timeline of a schedule that was run: `times` gives the start and the end of a turn, in
    /// any unit and from any origin. The first start becomes 0.
    pub fn measured(schedule: &Schedule, times: impl Fn(At) -> (f64, f64)) -> Self {
        let mut stage_groups: Vec<Vec<Timed>> = vec![Vec::new(); schedule.stage_groups()];
        for (at, turn) in schedule.all() {
            let (start, end) = times(at);
            stage_groups[at.stage_group].push(Timed {
                turn,
                stage: schedule.stage(at),
                start,
                end,
                empty: schedule.is_empty(&turn),
            });
        }
        let all = || stage_groups.iter().flatten();
        let origin = all().map(|timed| timed.start).fold(f64::INFINITY, f64::min);
        for timed in stage_groups.iter_mut().flatten() {
            (timed.start, timed.end) = (timed.start - origin, timed.end - origin);
        }
        Timeline::of(schedule, stage_groups, |_, timed| timed.end - timed.start)
    }

    /// The same turns in a step that begins so long before the first of them, and ends so long after
    /// the last.
    pub fn within(mut self, before: f64, after: f64) -> Self {
        for timed in self.stage_groups.iter_mut().flatten() {
            (timed.start, timed.end) = (timed.start + before, timed.end + before);
        }
        self.makespan += before + after;
        self
    }

    /// What follows from the times of all turns, and the work in each of them.
    fn of(
        schedule: &Schedule,
        stage_groups: Vec<Vec<Timed>>,
        work: impl Fn(usize, &Timed) -> f64,
    ) -> Self {
        let (mut makespan, mut span, mut ideal) = (0.0_f64, 0.0_f64, 0.0_f64);
        for (stage_group, turns) in stage_groups.iter().enumerate() {
            let (Some(first), Some(last)) = (turns.first(), turns.last()) else { continue };
            makespan = makespan.max(last.end);
            span = span.max(last.end - first.start);
            let useful = turns.iter().filter(|timed| !timed.empty);
            ideal = ideal.max(useful.map(|timed| work(stage_group, timed)).sum());
        }
        // Sums in another order differ in their last bits, but a span must not be below its work.
        span = span.max(ideal);
        let peaks = |end: Phase| {
            (0..schedule.stage_groups()).map(|group| peak(schedule, group, end)).collect()
        };
        Timeline {
            stage_groups,
            makespan,
            span,
            ideal,
            bubble_ideal: (span - ideal) / ideal,
            bubble_total: (span - ideal) / span,
            peak_in_flight: peaks(Phase::B),
            peak_until_w: peaks(Phase::W),
            weight_versions: (0..schedule.stage_groups())
                .map(|stage_group| versions(schedule, stage_group))
                .collect(),
        }
    }
}

/// The times of all turns.
fn play(schedule: &Schedule, costs: &TurnCosts) -> Vec<Vec<Timed>> {
    let mut stage_groups: Vec<Vec<Timed>> = vec![Vec::new(); schedule.stage_groups()];
    flow::walk(schedule, |at| {
        let turn = schedule.turn(at);
        let free = stage_groups[at.stage_group].last().map_or(0.0, |before| before.end);
        let arrives = |(needed, _): (At, _)| {
            let hop = if needed.stage_group == at.stage_group { 0.0 } else { costs.hop() };
            let last = if schedule.is_first(needed) { needed.next() } else { needed };
            stage_groups[last.stage_group][last.index].end + hop
        };
        // A move takes as long as any message, and begins when both of its ends do.
        let moved = |at: &At| stage_groups[at.stage_group][at.index].end + costs.hop();
        let arrived = |at: At| {
            let needs = schedule.needs(at).map(arrives).fold(free, f64::max);
            schedule.waits(at).iter().map(moved).fold(needs, f64::max)
        };
        let start = match (schedule.is_first(at), schedule.is_second(at)) {
            (true, _) => arrived(at).max(arrived(at.next())),
            (_, true) => free,
            _ => arrived(at),
        };
        let end = start + costs.of(schedule, at.stage_group, &turn);
        let (stage, empty) = (schedule.stage(at), schedule.is_empty(&turn));
        stage_groups[at.stage_group].push(Timed { turn, stage, start, end, empty });
    });
    stage_groups
}

/// The most forwards started whose `end` is not done yet. A stage group does one thing at a time,
/// so only the order of its list matters, not the times. What another stage group keeps counts there.
fn peak(schedule: &Schedule, stage_group: usize, end: Phase) -> usize {
    let turns = schedule.turns(stage_group);
    // Before which turns guests arrive and own micro-batches come back, and when they go.
    let mut come = vec![0_usize; turns.len() + 1];
    let mut go = come.clone();
    for own in schedule.moves() {
        let between = match stage_group {
            group if group == own.from => (own.returned, own.left),
            group if group == own.to => (own.taken, own.freed),
            _ => continue,
        };
        come[between.0.min(turns.len())] += 1;
        go[between.1.min(turns.len())] += 1;
    }
    let (mut alive, mut most) = (0_usize, 0);
    for (index, turn) in turns.iter().enumerate() {
        let phases = Phase::of(turn.part);
        alive += usize::from(phases.contains(&Phase::F)) + come[index];
        alive -= go[index];
        most = most.max(alive);
        alive -= usize::from(phases.contains(&end));
    }
    most
}

/// The most versions of the weights that are alive at once: each from when it is made to its last use, and the newest
/// always. Of a table, which does not say when versions are made: from the first use to the last.
fn versions(schedule: &Schedule, stage_group: usize) -> usize {
    let turns = schedule.turns(stage_group);
    match schedule.updates() {
        None => {}
        // Stages that change versions together also keep those in between, which nobody reads.
        Some(updates) if updates.together > 1 => return schedule.kept_versions(stage_group),
        Some(updates) => return updated_versions(turns, updates),
    }
    let mut lives: HashMap<usize, (usize, usize)> = HashMap::new();
    for (index, turn) in turns.iter().enumerate() {
        lives.entry(turn.version).or_insert((index, index)).1 = index;
    }
    let alive = |now: usize| lives.values().filter(|(a, z)| (*a..=*z).contains(&now)).count();
    lives.values().map(|(first, _)| alive(*first)).max().unwrap_or(0)
}

/// The same where weights are updated after the last backward of each round.
fn updated_versions(turns: &[Turn], updates: &Updates) -> usize {
    let last: BTreeMap<usize, usize> =
        turns.iter().enumerate().map(|(index, turn)| (turn.version, index)).collect();
    // Backwards so far, the newest version, and those before it that are read again.
    let (mut done, mut newest, mut older, mut most) = (0, 0, BTreeSet::new(), 0);
    for (index, turn) in turns.iter().enumerate() {
        most = most.max(1 + older.len());
        if last.get(&turn.version) == Some(&index) {
            older.remove(&turn.version);
        }
        done += usize::from(Phase::of(turn.part).contains(&Phase::W));
        if done / updates.round > newest {
            older.extend(last.get(&newest).filter(|last| **last > index).map(|_| newest));
            newest += 1;
        }
    }
    most
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::{NamedSchedule, ScheduleShape, Times};

    /// A simulated timeline, shifted and in other units, is used as a measured one: the picture is
    /// the same.
    #[test]
    fn a_measured_timeline_is_the_one_that_was_played() {
        let stage = |x: f64| Times { f: x, b: 2.0 * x, w: 0.5 * x };
        for named in [NamedSchedule::ZbH1, NamedSchedule::OneFOneB, NamedSchedule::Interleaved] {
            let schedule = named.build(ScheduleShape::new(2, 4)).unwrap();
            let stages = schedule.placement().stages();
            let times = (0..stages).map(|s| stage(1.0 + s as f64)).collect();
            let played = simulate(&schedule, &TurnCosts::uneven(times, 0.25).unwrap()).unwrap();
            let measured = Timeline::measured(&schedule, |at| {
                let Timed { start, end, .. } = played.stage_groups[at.stage_group][at.index];
                (8.0 + 2.0 * start, 8.0 + 2.0 * end)
            });
            assert_eq!(measured.makespan, 2.0 * played.makespan);
            assert_eq!(measured.span, 2.0 * played.span);
            assert!((measured.bubble_total - played.bubble_total).abs() < 1e-12);
            assert_eq!(measured.peak_until_w, played.peak_until_w);
            // A step that begins before its first turn and ends after its last one.
            let step = measured.clone().within(1.0, 0.5);
            assert_eq!(step.makespan, measured.makespan + 1.5);
            for (a, b) in step.stage_groups.iter().zip(&measured.stage_groups) {
                assert!(
                    a.iter().zip(b).all(|(a, b)| (a.start, a.end) == (b.start + 1.0, b.end + 1.0))
                );
            }
        }
    }

    /// Second forwards run while gradients are in flight: stage group 0 has finished each one when
    /// the gradient arrives, at 6 and at 9, so only those of the last group make the step longer.
    #[test]
    fn second_forwards_wait_for_nobody() {
        let plain = NamedSchedule::GPipe.build(ScheduleShape::new(2, 2)).unwrap();
        let costs = TurnCosts::even(Times { f: 1.0, b: 2.0, w: 0.0 }, 0.0).unwrap();
        let schedule = plain.with_second_forwards(|_| true).unwrap();
        let words = schedule.to_string();
        assert_eq!(words, "0: F0 F1 R0 BW0 R1 BW1\n1: F0 F1 R0 BW0 R1 BW1\n");
        let found = simulate(&schedule, &costs).unwrap();
        let starts = |stage_group: usize| -> Vec<f64> {
            found.stage_groups[stage_group].iter().map(|timed| timed.start).collect()
        };
        assert_eq!(starts(1), [1.0, 2.0, 3.0, 4.0, 6.0, 7.0]);
        assert_eq!(starts(0), [0.0, 1.0, 2.0, 6.0, 8.0, 9.0]);
        assert_eq!((found.makespan, found.ideal), (11.0, 8.0));
        let without = simulate(&plain, &costs).unwrap();
        assert_eq!(found.peak_in_flight, without.peak_in_flight);
        assert_eq!(plain.with_second_forwards(|_| false).unwrap(), plain);
    }

    #[test]
    fn a_turn_may_be_gone() {
        let schedule = NamedSchedule::Naive.build(ScheduleShape::new(1, 1)).unwrap();
        let measured = Timeline::measured(&schedule, |at| [(3.0, 3.0), (3.0, 5.0)][at.index]);
        assert_eq!((measured.makespan, measured.bubble_total), (2.0, 0.0));
    }
}
