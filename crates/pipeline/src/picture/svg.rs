//! A schedule as a drawing.
//!
//! Every stage group is a row; its waiting times are hatched; bars on the right show the most that
//! it keeps, on one scale. The numbers in the blocks are micro-batches.

use super::beside;
use super::guests::guests;
use super::legend::Legend;
use super::scale::ticks;
use super::svg_page::{Anchor, Page, Weight};
use super::{Panel, TurnKind, keeps_versions, longest, short, shortest};
use crate::simulate::Timed;
use phalanx_script::Part;

/// The height of a row and the space between two rows, in pixels.
pub(super) const ROW: f64 = 24.0;
pub(super) const GAP: f64 = 4.0;
/// The height of the narrow row of micro-batches that wait elsewhere.
const NARROW: f64 = 14.0;
/// From the left edge to time 0.
pub(super) const LEFT: f64 = 74.0;
/// From the last end to the right edge: room for bars and their numbers.
const RIGHT: f64 = 190.0;
const BARS: f64 = 92.0;
const HEAD: f64 = 44.0;
const FOOT: f64 = 34.0;
const LEGEND: f64 = 34.0;
const PANEL_GAP: f64 = 14.0;

/// Draws schedules below each other, with one time scale.
pub fn svg(panels: &[Panel<'_>]) -> String {
    let long = longest(panels);
    // Blocks are wide enough for two digits, if the drawing does not get too wide.
    let width = (long / shortest(panels) * 19.0).clamp(620.0, 1500.0);
    let heights: Vec<f64> = panels.iter().map(|panel| HEAD + rows(panel)).collect();
    let between = PANEL_GAP * panels.len().saturating_sub(1) as f64;
    let legend = Legend::new(panels, LEFT + width + RIGHT - 8.0);
    let height = heights.iter().sum::<f64>() + between + FOOT + LEGEND + legend.more();
    let most = |panel: &Panel<'_>| {
        let until_w = |stage_group| panel.peaks(stage_group).1.max(panel.peaks(stage_group).0);
        (0..panel.schedule.stage_groups()).map(until_w).fold(0.0, f64::max)
    };
    let last = panels.iter().map(|panel| panel.schedule.microbatches() - 1).max().unwrap_or(0);
    let mut drawing = Drawing {
        page: Page::new(LEFT + width + RIGHT, height),
        scale: width / long,
        width,
        most: panels.iter().map(most).fold(1.0, f64::max),
        digits: last.to_string().len(),
    };
    let mut top = 0.0;
    for (panel, height) in panels.iter().zip(heights) {
        drawing.panel(panel, top);
        top += height + PANEL_GAP;
    }
    let unit = panels.first().map_or("", |panel| panel.unit);
    drawing.axis(long, unit, top - PANEL_GAP);
    drawing.legend(&legend, top - PANEL_GAP + FOOT);
    drawing.page.finish()
}

/// When a stage group updates its weights, if not once at the end of a step.
fn updates<'a>(panel: &Panel<'_>, turns: &'a [Timed]) -> impl Iterator<Item = f64> + 'a {
    let round = panel.schedule.updates().map_or(usize::MAX, |updates| updates.round);
    let backwards = turns.iter().filter(|timed| timed.turn.part == Part::BW);
    let ends = backwards.enumerate().filter(move |(number, _)| (number + 1).is_multiple_of(round));
    ends.map(|(_, timed)| timed.end)
}

/// What a turn without a micro-batch does.
fn without(panel: &Panel<'_>, timed: &Timed) -> String {
    let Timed { turn, stage, start, end, .. } = timed;
    format!(
        "{} on zeros, without a micro-batch, stage {stage}, {} to {}",
        turn.part,
        short(*start),
        panel.time(*end)
    )
}

fn rows(panel: &Panel<'_>) -> f64 {
    panel.schedule.stage_groups() as f64 * pitch(panel)
}

/// From one row to the next.
fn pitch(panel: &Panel<'_>) -> f64 {
    let narrow = if panel.schedule.moves().is_empty() { 0.0 } else { NARROW + GAP };
    ROW + GAP + narrow + beside::height(panel)
}

pub(super) struct Drawing {
    pub(super) page: Page,
    /// Pixels per unit of time.
    pub(super) scale: f64,
    width: f64,
    /// The value of the longest bar.
    most: f64,
    /// Digits of the largest micro-batch: blocks of one width are written in one size.
    digits: usize,
}

impl Drawing {
    fn panel(&mut self, panel: &Panel<'_>, top: f64) {
        let page = &mut self.page;
        page.text((LEFT, top + 20.0), 14.0, Weight::Bold, Anchor::Start, panel.name());
        let wide = |letter: char| if matches!(letter, 'm' | 'w') { 13.0 } else { 8.6 };
        let name = panel.name().chars().map(wide).sum::<f64>() + 12.0;
        let words = format!("{}; {}", panel.title(), panel.results());
        page.text((LEFT + name, top + 20.0), 11.5, Weight::Soft, Anchor::Start, &words);
        let until = match (panel.schedule.splits(), keeps_versions(panel)) {
            (true, _) => "peak memory: until B, until W",
            (false, false) => "peak memory, micro-batches",
            (false, true) => "peak: micro-batches, weights",
        };
        let bars = LEFT + self.width + 16.0;
        page.text((bars, top + 36.0), 10.5, Weight::Soft, Anchor::Start, until);
        for stage_group in 0..panel.schedule.stage_groups() {
            self.row(panel, stage_group, top + HEAD + stage_group as f64 * pitch(panel));
        }
        // Where this schedule ends; others on the same scale may be longer.
        let end = LEFT + panel.timeline.makespan * self.scale;
        self.page.line((end, top + HEAD - 6.0), (end, top + HEAD + rows(panel) - GAP + 3.0));
        let label = panel.time(panel.timeline.makespan);
        self.page.text((end, top + 36.0), 10.5, Weight::Plain, Anchor::End, &label);
    }

    fn row(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        self.device(panel, stage_group, y);
        self.page.waiting((LEFT, y), (panel.timeline.makespan * self.scale, ROW));
        let chunks = panel.schedule.placement().chunks(stage_group);
        let turns = &panel.timeline.stage_groups[stage_group];
        for timed in turns {
            self.block(panel, timed, chunks, y);
        }
        for time in updates(panel, turns) {
            let x = LEFT + time * self.scale;
            self.page.line((x, y - GAP), (x, y + 3.0));
        }
        self.step_ends(panel, stage_group, y);
        self.guests(panel, stage_group, y + ROW + GAP / 2.0);
        self.beside(panel, stage_group, y + pitch(panel) - GAP - beside::height(panel));
        self.bars(panel, stage_group, y);
    }

    /// What waits elsewhere: grey where it is kept for another stage group, white on its way.
    fn guests(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        let (guests, lines) = guests(panel, stage_group);
        let high = NARROW / lines.max(1) as f64;
        for guest in guests {
            let x = LEFT + guest.start * self.scale;
            let width = ((guest.end - guest.start) * self.scale).max(2.5);
            let y = y + guest.line as f64 * high;
            let fill = if guest.kept { "#c8c8c8" } else { "#ffffff" };
            self.page.block((x, y), (width, high), fill, &guest.what);
            let size = (high + 1.0).min(9.0);
            if size >= 5.0 && width >= size * self.digits as f64 {
                let place = (x + width / 2.0, y + high / 2.0 + 0.36 * size);
                let label = guest.microbatch.to_string();
                self.page.text(place, size, Weight::Plain, Anchor::Middle, &label);
            }
        }
    }

    fn block(&mut self, panel: &Panel<'_>, timed: &Timed, chunks: usize, y: f64) {
        let (x, width) = (LEFT + timed.start * self.scale, (timed.end - timed.start) * self.scale);
        if width <= 0.0 {
            return;
        }
        let (fill, white) = TurnKind::of(&timed.turn).fill(timed.turn.chunk, chunks);
        let what = format!(
            "{} of micro-batch {}, stage {}, {} to {}",
            timed.turn.part,
            timed.turn.microbatch,
            timed.stage,
            short(timed.start),
            panel.time(timed.end)
        );
        let (fill, white, what) = match timed.empty {
            true => ("#ffffff", false, without(panel, timed)),
            false => (fill, white, what),
        };
        let what = match timed.turn.version {
            0 => what,
            version => format!("{what}, weights after update {version}"),
        };
        self.page.block((x, y), (width, ROW), fill, &what);
        let label = match (timed.empty, timed.turn.part) {
            (false, _) => timed.turn.microbatch.to_string(),
            (true, Part::F | Part::R) => "f".to_owned(),
            (true, _) => "b".to_owned(),
        };
        let size = (1.55 * (width - 2.0) / self.digits as f64).min(12.0);
        if size >= 5.0 {
            let weight = if white { Weight::White } else { Weight::Plain };
            let place = (x + width / 2.0, y + ROW / 2.0 + 0.36 * size);
            self.page.text(place, size, weight, Anchor::Middle, &label);
        }
        self.version(timed, (x, y), width, white);
    }

    /// As many dots at the foot of a block as its version of the weights has, modulo four.
    fn version(&mut self, timed: &Timed, (x, y): (f64, f64), width: f64, white: bool) {
        let dots = timed.turn.version % 4;
        let apart = (width / 5.0).min(5.0);
        for dot in 0..dots {
            let at = (x + apart * (dot as f64 + 0.7), y + ROW - 5.0);
            self.page.bar(at, (0.6 * apart, 2.5), if white { "#ffffff" } else { "#222222" });
        }
    }

    /// How much the stage group keeps: until B in dark; until W, if that differs, below it.
    fn bars(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        let (until_b, until_w) = panel.peaks(stage_group);
        let left = LEFT + self.width + 16.0;
        let long = |peak: f64| (peak / self.most * BARS).max(1.0);
        let (dark, _) = TurnKind::Backward.fill(0, 1);
        let (middle, _) = TurnKind::Weights.fill(0, 1);
        let words = match panel.schedule.splits() {
            false => {
                self.page.bar((left, y + 6.0), (long(until_b), ROW - 12.0), dark);
                match keeps_versions(panel) {
                    true => {
                        format!("{}, {}", short(until_b), panel.schedule.kept_versions(stage_group))
                    }
                    false => short(until_b),
                }
            }
            true => {
                self.page.bar((left, y + 4.0), (long(until_b), ROW / 2.0 - 4.5), dark);
                self.page.bar(
                    (left, y + ROW / 2.0 + 0.5),
                    (long(until_w), ROW / 2.0 - 4.5),
                    middle,
                );
                format!("{}, {}", short(until_b), short(until_w))
            }
        };
        let place = (left + long(until_b.max(until_w)) + 6.0, y + ROW / 2.0 + 4.0);
        self.page.text(place, 11.5, Weight::Plain, Anchor::Start, &words);
    }

    fn axis(&mut self, long: f64, unit: &str, y: f64) {
        self.page.line((LEFT, y + 2.0), (LEFT + self.width, y + 2.0));
        for tick in ticks(long, 46.0 / self.scale) {
            let x = LEFT + tick * self.scale;
            self.page.line((x, y + 2.0), (x, y + 6.0));
            self.page.text((x, y + 18.0), 10.5, Weight::Plain, Anchor::Middle, &short(tick));
        }
        let place = (LEFT - 10.0, y + 18.0);
        let words = if unit.is_empty() { "time".to_owned() } else { format!("time, {unit}") };
        self.page.text(place, 10.5, Weight::Soft, Anchor::End, &words);
    }
}
