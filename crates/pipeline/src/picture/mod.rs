//! Pictures of schedules: one row per stage group, time to the right.
//!
//! [`text`] is for terminals, plain or coloured; [`svg`] is for pages and papers. Both take several
//! schedules and draw them below each other, with one time scale.

mod beside;
mod devices;
mod guests;
mod legend;
mod palette;
mod scale;
mod svg;
mod svg_page;
mod text;

pub use svg::svg;
pub use svg_page::{Anchor, Page, Weight};
pub use text::{TextOptions, text};

use phalanx_script::Part;

use crate::placement::Placement;
use crate::schedule::Schedule;
use crate::simulate::{Timed, Timeline};
use crate::turn::Turn;
use crate::words::{counted, listed};

/// A schedule with its times, ready to draw.
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a> {
    /// The schedule.
    pub schedule: &'a Schedule,
    /// Its times.
    pub timeline: &'a Timeline,
    /// Its name, if that is not the schedule's name: `measured`.
    pub label: Option<&'a str>,
    /// The unit of times: `ms`, or empty if only their ratios matter.
    pub unit: &'a str,
    /// For each stage group: what it does besides its turns; empty if that is not known.
    pub beside: &'a [Vec<BesideTurns>],
    /// For each stage group: the ranks that its row stands for; empty if that is not known.
    pub ranks: &'a [Vec<usize>],
}

/// Something that a stage group does besides its turns.
#[derive(Clone, PartialEq, Debug)]
pub struct BesideTurns {
    /// What it is for.
    pub kind: BesideKind,
    /// When it starts.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// In words: `blocks.3 gather`.
    pub what: String,
}

/// What an action besides the turns is for, in the order of the lines that pictures give them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum BesideKind {
    /// Weights are gathered.
    Gather,
    /// Gradients are summed over ranks.
    Sum,
    /// Values go to another stage group.
    Message,
    /// Programs between the last turn and the next step: norms, scaling and updates.
    Update,
}

impl BesideKind {
    /// Every kind.
    pub const ALL: [BesideKind; 4] =
        [BesideKind::Gather, BesideKind::Sum, BesideKind::Message, BesideKind::Update];
}

impl<'a> Panel<'a> {
    /// A schedule under its own name, with times that have no unit.
    pub fn new(schedule: &'a Schedule, timeline: &'a Timeline) -> Self {
        Panel { schedule, timeline, label: None, unit: "", beside: &[], ranks: &[] }
    }

    /// The name above the picture.
    fn name(&self) -> &'a str {
        self.label.unwrap_or(self.schedule.name())
    }

    /// The size as text, such as `4 stage_groups, 8 micro-batches`.
    fn title(&self) -> String {
        let Panel { schedule, .. } = self;
        let placement = schedule.placement();
        let chunks = match (placement.share(0, 0), placement.replicas()) {
            (_, 2..) if !placement.goes_both_ways() => {
                format!(", stages on {}", listed(&placement.holders()))
            }
            (1, 1) => String::new(),
            (v, 1) => format!(" of {v} chunks"),
            (1, replicas) => format!(", {replicas} pipelines"),
            (v, replicas) => format!(" of {v} chunks, {replicas} pipelines"),
        };
        let (p, m) = (schedule.stage_groups(), schedule.microbatches() / schedule.pieces());
        let (stage_groups, batches) = (counted(p, "device"), counted(m, "micro-batch"));
        let named = match self.label {
            Some(_) => format!("{}, ", schedule.name()),
            None => String::new(),
        };
        format!("{named}{stage_groups}{chunks}, {batches}")
    }

    /// When a stage group ends each step of a row, except the last: with the last of its backwards.
    fn step_ends(&self, stage_group: usize) -> Vec<f64> {
        let step = self.schedule.updates().map_or(usize::MAX, |updates| updates.step);
        let turns = &self.timeline.stage_groups[stage_group];
        let ends = |own: usize| {
            let of_step = |timed: &&Timed| {
                timed.turn.microbatch / step == own
                    && matches!(timed.turn.part, Part::B | Part::W | Part::BW | Part::FBW)
            };
            turns.iter().filter(of_step).map(|timed| timed.end).reduce(f64::max)
        };
        let steps = self.schedule.microbatches().div_ceil(step);
        (0..steps.saturating_sub(1)).filter_map(ends).collect()
    }

    /// A time with its unit.
    fn time(&self, time: f64) -> String {
        match self.unit {
            "" => short(time),
            unit => format!("{} {unit}", short(time)),
        }
    }

    /// The results as text.
    fn results(&self) -> String {
        let Timeline { makespan, span, bubble_total, .. } = self.timeline;
        // A bubble is a share of the time between a device's first start and its last end.
        let span = match span == makespan {
            true => String::new(),
            false => format!(" of the longest device's {}", self.time(*span)),
        };
        let work = match self.schedule.has_empty() {
            true => format!(", {} times the work", short(self.schedule.work())),
            false => String::new(),
        };
        let makespan = self.time(*makespan);
        format!("makespan {makespan}, bubble {:.1}%{span}{work}", 100.0 * bubble_total)
    }

    /// The largest number of micro-batches that a stage group keeps, each counted for all chunks of its replica
    /// together: until their B, and until their W.
    fn peaks(&self, stage_group: usize) -> (f64, f64) {
        let share = self.schedule.placement().share(stage_group, 0) * self.schedule.pieces();
        let chunks = share as f64;
        let Timeline { peak_in_flight, peak_until_w, .. } = self.timeline;
        (peak_in_flight[stage_group] as f64 / chunks, peak_until_w[stage_group] as f64 / chunks)
    }
}

/// When the last of several schedules ends.
fn longest(panels: &[Panel<'_>]) -> f64 {
    panels.iter().map(|panel| panel.timeline.makespan).fold(0.0, f64::max)
}

/// The shortest turn that takes any time.
fn shortest(panels: &[Panel<'_>]) -> f64 {
    let turns = panels.iter().flat_map(|panel| panel.timeline.stage_groups.iter().flatten());
    let times = turns.map(|turn| turn.end - turn.start).filter(|time| *time > 0.0);
    times.fold(longest(panels), f64::min)
}

/// Whether turns read different versions of the weights.
fn has_versions(panels: &[Panel<'_>]) -> bool {
    let mut turns = panels.iter().flat_map(|panel| panel.schedule.all());
    turns.any(|(_, turn)| turn.version > 0)
}

/// Whether several steps follow each other without a flush.
fn has_steps(panels: &[Panel<'_>]) -> bool {
    let mut rows = panels.iter().flat_map(|panel| {
        (0..panel.schedule.stage_groups()).map(|stage_group| panel.step_ends(stage_group))
    });
    rows.any(|ends| !ends.is_empty())
}

/// Whether a stage group keeps older weights.
fn keeps_versions(panel: &Panel<'_>) -> bool {
    (0..panel.schedule.stage_groups())
        .any(|stage_group| panel.schedule.kept_versions(stage_group) > 1)
}

/// Whether there are second forwards to draw.
fn any_again(panels: &[Panel<'_>]) -> bool {
    let mut turns = panels.iter().flat_map(|panel| panel.schedule.all());
    turns.any(|(_, turn)| turn.part == Part::R)
}

/// Whether there are whole backwards, and whether there are weight gradients by themselves.
fn backwards(panels: &[Panel<'_>]) -> (bool, bool) {
    let any = |parts: &[Part]| {
        let mut turns = panels.iter().flat_map(|panel| panel.schedule.all());
        turns.any(|(_, turn)| parts.contains(&turn.part))
    };
    (any(&[Part::BW, Part::FBW]), any(&[Part::W]))
}

/// What the shades of a block mean, if there are several.
fn shades(panels: &[Panel<'_>]) -> Option<&'static str> {
    let placements = || panels.iter().map(|panel| panel.schedule.placement());
    match placements().any(Placement::goes_both_ways) {
        true => Some("light: pipeline that goes down; dark: up"),
        false if panels.iter().any(|panel| panel.schedule.chunks() > 1) => {
            Some("later chunks are darker")
        }
        false => None,
    }
}

/// The kinds of turns that pictures distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TurnKind {
    Forward,
    /// A second forward, for a backward whose stage kept only its input.
    Again,
    /// Gradient of the inputs alone, or the whole backward.
    Backward,
    Weights,
}

impl TurnKind {
    fn of(turn: &Turn) -> TurnKind {
        match turn.part {
            Part::F => TurnKind::Forward,
            Part::R => TurnKind::Again,
            Part::B | Part::BW | Part::FBW => TurnKind::Backward,
            Part::W => TurnKind::Weights,
        }
    }

    fn letter(self) -> char {
        match self {
            TurnKind::Forward => 'F',
            TurnKind::Again => 'R',
            TurnKind::Backward => 'B',
            TurnKind::Weights => 'W',
        }
    }
}

/// A number without needless digits.
fn short(number: f64) -> String {
    if number != 0.0 && !(5e-4..1e9).contains(&number.abs()) {
        return format!("{number:.2e}");
    }
    let text = format!("{number:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
