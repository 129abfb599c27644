//! A schedule in a terminal.
//!
//! Every column of characters is an interval of time, and shows the turn that runs in its middle. A
//! turn shows its part and micro-batch where they fit, and its part alone where they don't. A
//! picture that is wider than a terminal is folded: it goes on in bands one below the other, each
//! with its own axis.

use std::ops::Range;

use super::scale::ticks;
use super::{Panel, TurnKind, any_again, has_versions, longest, shades, short, shortest};
use crate::simulate::Timed;

/// How to draw for a terminal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextOptions {
    /// Columns of characters in a line.
    pub width: usize,
    /// Whether lines may contain colour codes.
    pub colour: bool,
    /// Whether a picture that is too wide continues below; otherwise it is drawn smaller.
    pub fold: bool,
}

/// Background and text of turns without a micro-batch.
const EMPTY: (u8, u8) = (254, 240);

/// The most lines of a folded picture; if that is not enough, it is drawn smaller.
const MOST_LINES: usize = 240;

/// Draws schedules below each other, with one time scale.
pub fn text(panels: &[Panel<'_>], look: TextOptions) -> String {
    let canvas = Canvas::new(panels, look);
    let mut lines = Vec::new();
    for panel in panels {
        lines.extend(canvas.panel(panel));
        lines.push(String::new());
    }
    lines.push(canvas.legend(panels));
    lines.join("\n") + "\n"
}

/// What all panels have in common.
struct Canvas {
    colour: bool,
    /// Columns per unit of time.
    scale: f64,
    columns: usize,
    /// Columns of a band: as many as there are, if the picture is not folded.
    band: usize,
    /// Columns before a row's first turn.
    margin: usize,
}

/// Columns in which a stage group does one thing.
struct Run {
    /// The index of the turn; none if the stage group waits.
    turn: Option<usize>,
    columns: Range<usize>,
}

impl Canvas {
    fn new(panels: &[Panel<'_>], look: TextOptions) -> Self {
        let stage_groups =
            panels.iter().map(|panel| panel.schedule.stage_groups()).max().unwrap_or(1);
        let margin = "device ".len() + stage_groups.saturating_sub(1).to_string().len() + 2;
        let kept = panels.iter().map(|panel| 2 + kept(panel).len()).max().unwrap_or(0);
        let room = look.width.saturating_sub(margin + kept).max(20);
        let bands = if look.fold { (MOST_LINES / (stage_groups + 1)).max(1) } else { 1 };
        let labels = panels.iter().flat_map(|panel| panel.timeline.stage_groups.iter().flatten());
        let widest = labels.map(|timed| label(timed, look.colour).len()).max().unwrap_or(1);
        let (long, short) = (longest(panels), shortest(panels));
        // Turns of equal length should look equal, so the shortest takes whole columns, if it gets
        // at least one.
        let fit = (room * bands) as f64 / long;
        let (scale, whole) = match (fit * short).min((widest + 1) as f64) {
            less if less < 1.0 => (fit, 1),
            columns => (columns.floor() / short, columns as usize),
        };
        let columns = (long * scale).round() as usize;
        // Bands end at multiples of the shortest turn, so that few turns are cut.
        let band = if columns <= room { columns.max(1) } else { room / whole * whole };
        Canvas { colour: look.colour, scale, columns, band, margin }
    }

    fn panel(&self, panel: &Panel<'_>) -> Vec<String> {
        let head = format!("{}: {}", panel.name(), panel.title());
        let mut lines = vec![self.strong(&head), panel.results()];
        lines.push(format!("{:1$}  {2}", "", self.margin + self.band, kept(panel)));
        let stage_groups = &panel.timeline.stage_groups;
        let runs: Vec<Vec<Run>> = stage_groups.iter().map(|turns| self.runs(turns)).collect();
        // A schedule that ends before others in the same picture has no bands after its end.
        let end = (panel.timeline.makespan * self.scale).ceil() as usize;
        for start in (0..end.clamp(1, self.columns.max(1))).step_by(self.band) {
            let band = start..(start + self.band).min(self.columns);
            for (stage_group, turns) in stage_groups.iter().enumerate() {
                let chunks = panel.schedule.placement().chunks(stage_group);
                let row = self.row(&runs[stage_group], turns, chunks, &band);
                let name = format!("device {stage_group}");
                // What is kept is shown once, next to the first band.
                let kept = if start == 0 { peaks(panel, stage_group) } else { String::new() };
                lines.push(format!("{name:<margin$}{row}{kept}", margin = self.margin));
            }
            lines.push(self.axis(&band));
        }
        lines
    }

    /// What one stage group does in all columns.
    fn runs(&self, turns: &[Timed]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut next = 0;
        for column in 0..self.columns {
            let time = (column as f64 + 0.5) / self.scale;
            while turns.get(next).is_some_and(|turn| turn.end <= time) {
                next += 1;
            }
            let turn = turns.get(next).filter(|turn| turn.start <= time).map(|_| next);
            match runs.last_mut() {
                Some(run) if run.turn == turn => run.columns.end = column + 1,
                _ => runs.push(Run { turn, columns: column..column + 1 }),
            }
        }
        runs
    }

    /// One stage group's turns in a band, and dots where it waits.
    fn row(&self, runs: &[Run], turns: &[Timed], chunks: usize, band: &Range<usize>) -> String {
        let mut row = String::new();
        let first = runs.partition_point(|run| run.columns.end <= band.start);
        for run in runs[first..].iter().take_while(|run| run.columns.start < band.end) {
            let (start, end) = (run.columns.start.max(band.start), run.columns.end.min(band.end));
            let before = start - run.columns.start;
            match run.turn {
                None => row.extend(std::iter::repeat_n(self.gap(), end - start)),
                Some(index) => row += &self.block(&turns[index], end - start, before, chunks),
            }
        }
        row
    }

    fn gap(&self) -> char {
        if self.colour { ' ' } else { '.' }
    }

    /// A turn in this many columns of this band; `before` counts its columns in the band before.
    /// Its label is shown once, where there is room for it.
    fn block(&self, timed: &Timed, width: usize, before: usize, chunks: usize) -> String {
        let ink = TurnKind::of(&timed.turn);
        let label = label(timed, self.colour);
        let label = if before < label.len() { label } else { String::new() };
        if self.colour {
            let (back, front) = match timed.empty {
                true => EMPTY,
                false => ink.codes(timed.turn.chunk, chunks),
            };
            let label = if label.len() <= width { label } else { String::new() };
            // A mark on the left separates neighbours of the same colour.
            let marked = before == 0 && width > label.len();
            let body = if marked { format!("▏{label}") } else { label };
            return format!("\x1b[48;5;{back};38;5;{front}m{body:<width$}\x1b[0m");
        }
        match label.len() {
            len if len < width => format!("{label}{} ", "-".repeat(width - len - 1)),
            len if len == width => label,
            _ => letter(timed).to_string() + &" ".repeat(width - 1),
        }
    }

    fn axis(&self, band: &Range<usize>) -> String {
        let mut line = " ".repeat(self.margin);
        let last = band.end == self.columns;
        for tick in ticks(self.columns as f64 / self.scale, 8.0 / self.scale) {
            let column = (tick * self.scale).round() as usize;
            // The mark at the end of a band is also the start of the next.
            if column < band.start || (column >= band.end && !last) {
                continue;
            }
            let (column, text) = (self.margin + column - band.start, short(tick));
            if column >= line.len() && column + text.len() <= self.margin + self.band + 2 {
                line += &" ".repeat(column - line.len());
                line += &text;
            }
        }
        line
    }

    fn legend(&self, panels: &[Panel<'_>]) -> String {
        let (whole, splits) = super::backwards(panels);
        let mut words = vec![(TurnKind::Forward, "forward")];
        if any_again(panels) {
            words.push((TurnKind::Again, "forward run again"));
        }
        words.push(match (whole, splits) {
            (true, false) => (TurnKind::Backward, "backward"),
            (false, _) => (TurnKind::Backward, "gradient of inputs"),
            (true, true) => (TurnKind::Backward, "backward, or gradient of inputs if there is a W"),
        });
        if splits {
            words.push((TurnKind::Weights, "gradient of weights"));
        }
        let mut parts: Vec<String> = words
            .into_iter()
            .map(|(ink, word)| {
                let letter = ink.letter();
                match self.colour {
                    true => {
                        let (back, front) = ink.codes(0, 1);
                        format!("\x1b[48;5;{back};38;5;{front}m {letter} \x1b[0m {word}")
                    }
                    false => format!("{letter} {word}"),
                }
            })
            .collect();
        if let Some(words) = shades(panels) {
            let replicas = panels.iter().any(|panel| panel.schedule.placement().goes_both_ways());
            parts.push(match (self.colour, replicas) {
                (true, _) => words.to_owned(),
                (false, true) => "b after a number: of the pipeline that goes up".to_owned(),
                (false, false) => "b, c, d after a number: second, third, fourth chunk".to_owned(),
            });
        }
        if !self.colour {
            if has_versions(panels) {
                parts.push("'1 after a number: with the weights after update 1".to_owned());
            }
            if panels.iter().any(|panel| panel.schedule.has_empty()) {
                parts.push("f, b without a micro-batch: computed on zeros".to_owned());
            }
            parts.push(". waits".to_owned());
        }
        parts.push("kept: the most micro-batches at once, for all layers of a row".to_owned());
        parts.join("\n")
    }

    fn strong(&self, text: &str) -> String {
        if self.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// The heading of the column of what stage groups keep.
fn kept(panel: &Panel<'_>) -> &'static str {
    if panel.schedule.splits() { "kept to B   to W" } else { "kept" }
}

/// What a stage group keeps, below that heading.
fn peaks(panel: &Panel<'_>, stage_group: usize) -> String {
    let (until_b, until_w) = panel.peaks(stage_group);
    match panel.schedule.splits() {
        true => format!("  {:>9} {:>6}", short(until_b), short(until_w)),
        false => format!("  {:>4}", short(until_b)),
    }
}

/// The letter of a turn: a small one if it has no micro-batch.
fn letter(timed: &Timed) -> char {
    let letter = TurnKind::of(&timed.turn).letter();
    if timed.empty { letter.to_ascii_lowercase() } else { letter }
}

/// `B3`, and `B3b` on the second chunk; `B3'1` with version 1 of the weights; `b` without a micro-batch; in colour the
/// number alone.
fn label(timed: &Timed, colour: bool) -> String {
    let turn = &timed.turn;
    if timed.empty {
        return letter(timed).to_string();
    }
    if colour {
        return turn.microbatch.to_string();
    }
    let chunk = match u8::try_from(turn.chunk) {
        Ok(0) => String::new(),
        Ok(chunk @ 1..26) => char::from(b'a' + chunk).to_string(),
        _ => format!(".{}", turn.chunk),
    };
    let version = match turn.version {
        0 => String::new(),
        version => format!("'{version}"),
    };
    format!("{}{}{chunk}{version}", TurnKind::of(turn).letter(), turn.microbatch)
}
