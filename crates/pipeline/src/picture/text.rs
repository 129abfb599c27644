//! A schedule in a terminal.
//!
//! Every column of characters is a stretch of time, and shows the turn that runs in its middle. A
//! turn shows its part and micro-batch where they fit, and its part alone where they don't.

use super::scale::ticks;
use super::{Ink, Panel, any_again, longest, short, shortest};
use crate::simulate::Timed;

/// How a terminal can be drawn on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// Columns of characters in a line.
    pub width: usize,
    /// Whether lines may contain colour codes.
    pub colour: bool,
}

/// Draws schedules below each other, on one scale of time.
pub fn text(panels: &[Panel<'_>], look: Look) -> String {
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
    /// Columns before a row's first turn.
    margin: usize,
}

impl Canvas {
    fn new(panels: &[Panel<'_>], look: Look) -> Self {
        let devices = panels.iter().map(|panel| panel.schedule.devices()).max().unwrap_or(1);
        let margin = "device ".len() + devices.saturating_sub(1).to_string().len() + 2;
        let peaks = if panels.iter().any(|panel| panel.schedule.splits()) { 14 } else { 7 };
        let room = look.width.saturating_sub(margin + peaks).max(20);
        let labels = panels.iter().flat_map(|panel| panel.timeline.devices.iter().flatten());
        let widest = labels.map(|timed| label(timed, look.colour).len()).max().unwrap_or(1);
        let (long, short) = (longest(panels), shortest(panels));
        // Turns of one length should look it, so the shortest takes whole columns if it can have one.
        let fit = room as f64 / long;
        let scale = match (fit * short).min((widest + 1) as f64) {
            less if less < 1.0 => fit,
            columns => columns.floor() / short,
        };
        Canvas { colour: look.colour, scale, columns: (long * scale).round() as usize, margin }
    }

    fn panel(&self, panel: &Panel<'_>) -> Vec<String> {
        let splits = panel.schedule.splits();
        let head = format!("{}: {}", panel.name(), panel.title());
        let mut lines = vec![self.strong(&head), panel.results()];
        let peaks = if splits { "kept to B   to W" } else { "kept" };
        lines.push(format!("{:1$}  {peaks}", "", self.margin + self.columns));
        for (device, turns) in panel.timeline.devices.iter().enumerate() {
            let row = self.row(turns, panel.schedule.placement().chunks(device));
            let (until_b, until_w) = panel.peaks(device);
            let peaks = match splits {
                true => format!("{:>9} {:>6}", short(until_b), short(until_w)),
                false => format!("{:>4}", short(until_b)),
            };
            let name = format!("device {device}");
            lines.push(format!("{name:<margin$}{row}  {peaks}", margin = self.margin));
        }
        lines.push(self.axis());
        lines
    }

    /// One device's turns, and dots where it waits.
    fn row(&self, turns: &[Timed], chunks: usize) -> String {
        let mut row = String::new();
        let mut next = 0;
        let mut column = 0;
        while column < self.columns {
            let shown = |column: usize, next: &mut usize| {
                let time = (column as f64 + 0.5) / self.scale;
                while turns.get(*next).is_some_and(|turn| turn.end <= time) {
                    *next += 1;
                }
                turns.get(*next).filter(|turn| turn.start <= time).map(|_| *next)
            };
            let here = shown(column, &mut next);
            let mut end = column + 1;
            while end < self.columns && shown(end, &mut next) == here {
                end += 1;
            }
            match here {
                None => row.extend(std::iter::repeat_n(self.gap(), end - column)),
                Some(index) => row += &self.block(&turns[index], end - column, chunks),
            }
            column = end;
        }
        row
    }

    fn gap(&self) -> char {
        if self.colour { ' ' } else { '.' }
    }

    /// A turn in so many columns.
    fn block(&self, timed: &Timed, width: usize, chunks: usize) -> String {
        let ink = Ink::of(&timed.turn);
        let label = label(timed, self.colour);
        if self.colour {
            let (back, front) = ink.codes(timed.turn.chunk, chunks);
            let label = if label.len() <= width { label } else { String::new() };
            // A mark on the left, so that neighbours of one colour are told apart.
            let body = if width > label.len() { format!("▏{label}") } else { label };
            return format!("\x1b[48;5;{back};38;5;{front}m{body:<width$}\x1b[0m");
        }
        match label.len() {
            len if len < width => format!("{label}{} ", "-".repeat(width - len - 1)),
            len if len == width => label,
            _ => ink.letter().to_string() + &" ".repeat(width - 1),
        }
    }

    fn axis(&self) -> String {
        let mut line = " ".repeat(self.margin);
        for tick in ticks(self.columns as f64 / self.scale, 8.0 / self.scale) {
            let column = self.margin + (tick * self.scale).round() as usize;
            let text = short(tick);
            if column >= line.len() && column + text.len() <= self.margin + self.columns + 2 {
                line += &" ".repeat(column - line.len());
                line += &text;
            }
        }
        line
    }

    fn legend(&self, panels: &[Panel<'_>]) -> String {
        let splits = panels.iter().any(|panel| panel.schedule.splits());
        let whole = panels.iter().any(|panel| !panel.schedule.splits());
        let chunks = panels.iter().map(|panel| panel.schedule.chunks()).max().unwrap_or(1);
        let mut words = vec![(Ink::Forward, "forward")];
        if any_again(panels) {
            words.push((Ink::Again, "forward run again"));
        }
        words.push(match (whole, splits) {
            (true, false) => (Ink::Backward, "backward"),
            (false, _) => (Ink::Backward, "gradient of inputs"),
            (true, true) => (Ink::Backward, "backward, or gradient of inputs where there is a W"),
        });
        if splits {
            words.push((Ink::Weights, "gradient of weights"));
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
        if chunks > 1 {
            parts.push(match self.colour {
                true => "later chunks darker".to_owned(),
                false => "b, c, d behind a number: second, third, fourth chunk".to_owned(),
            });
        }
        if !self.colour {
            parts.push(". waits".to_owned());
        }
        parts.push("kept: most micro-batches at once, of a device's whole share".to_owned());
        parts.join("\n")
    }

    fn strong(&self, text: &str) -> String {
        if self.colour { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// `B3`, and `B3b` on the second chunk; in colour the number alone.
fn label(timed: &Timed, colour: bool) -> String {
    let turn = &timed.turn;
    if colour {
        return turn.microbatch.to_string();
    }
    let chunk = match u8::try_from(turn.chunk) {
        Ok(0) => String::new(),
        Ok(chunk @ 1..26) => char::from(b'a' + chunk).to_string(),
        _ => format!(".{}", turn.chunk),
    };
    format!("{}{}{chunk}", Ink::of(turn).letter(), turn.microbatch)
}
