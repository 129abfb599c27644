//! What colours, hatching and lines mean: entries one after the other, in as many lines as the page needs.

use super::svg::{Drawing, LEFT};
use super::svg_page::{Anchor, Weight};
use super::{
    BesideKind, Panel, TurnKind, any_again, backwards, beside, has_steps, has_versions, shades,
};

/// From one line to the next.
const LINE: f64 = 20.0;
/// A character of the words takes about this much; in the widest of the usual fonts, `WIDE`.
const CHARACTER: f64 = 6.2;
const WIDE: f64 = 7.0;
/// The side of a coloured square.
const SQUARE: f64 = 14.0;

/// What stands before the words of an entry.
enum Mark {
    /// The squares of a kind of turn, one for each chunk.
    Turns(TurnKind, usize),
    Waits,
    Empty,
    Beside(BesideKind),
    StepEnd,
    /// Nothing: the words explain what the squares before them have in common.
    Shades,
    Nothing,
}

impl Mark {
    fn width(&self) -> f64 {
        match self {
            Mark::Turns(_, chunks) => SQUARE * *chunks as f64,
            Mark::Waits | Mark::Empty | Mark::Beside(_) => SQUARE,
            Mark::StepEnd => 9.0,
            Mark::Shades => -5.0,
            Mark::Nothing => 0.0,
        }
    }
}

struct Entry {
    mark: Mark,
    words: String,
}

impl Entry {
    fn new(mark: Mark, words: impl Into<String>) -> Self {
        Entry { mark, words: words.into() }
    }

    fn width(&self, character: f64) -> f64 {
        self.mark.width() + 5.0 + character * self.words.chars().count() as f64
    }
}

/// The entries of a picture, line by line, each with the place where it begins.
pub(super) struct Legend(Vec<Vec<(f64, Entry)>>);

impl Legend {
    /// The legend of these panels on a page that ends at `right`.
    pub(super) fn new(panels: &[Panel<'_>], right: f64) -> Self {
        let (mut lines, mut x) = (vec![Vec::new()], LEFT);
        for entry in entries(panels) {
            if x + entry.width(WIDE) > right && x > LEFT {
                lines.push(Vec::new());
                x = LEFT;
            }
            let start = x;
            x += entry.width(CHARACTER) + 18.0;
            if let Some(line) = lines.last_mut() {
                line.push((start, entry));
            }
        }
        Legend(lines)
    }

    /// How much higher it is than a legend of one line.
    pub(super) fn more(&self) -> f64 {
        LINE * (self.0.len() - 1) as f64
    }
}

impl Drawing {
    pub(super) fn legend(&mut self, legend: &Legend, top: f64) {
        for (line, entries) in legend.0.iter().enumerate() {
            let y = top + LINE * line as f64;
            for (x, entry) in entries {
                self.mark(&entry.mark, &entry.words, (*x, y));
                let x = x + entry.mark.width() + 5.0;
                self.page.text((x, y + 11.0), 11.5, Weight::Plain, Anchor::Start, &entry.words);
            }
        }
    }

    fn mark(&mut self, mark: &Mark, words: &str, (x, y): (f64, f64)) {
        let square = (SQUARE, SQUARE);
        match mark {
            Mark::Turns(kind, chunks) => {
                for chunk in 0..*chunks {
                    let (fill, _) = kind.fill(chunk, *chunks);
                    self.page.block((x + SQUARE * chunk as f64, y), square, fill, words);
                }
            }
            Mark::Waits => self.page.waiting((x, y), square),
            Mark::Empty => self.page.block((x, y), square, "#ffffff", "computed on zeros"),
            Mark::Beside(kind) => {
                self.page.block((x, y + 4.0), (SQUARE, beside::LINE), kind.fill(), words);
            }
            Mark::StepEnd => self.page.dashes((x + 7.0, y - 2.0), (x + 7.0, y + 16.0)),
            Mark::Shades | Mark::Nothing => {}
        }
    }
}

/// An entry for everything that these panels show.
fn entries(panels: &[Panel<'_>]) -> Vec<Entry> {
    let (whole, splits) = backwards(panels);
    let chunks = panels.iter().map(|panel| panel.schedule.chunks()).max().unwrap_or(1);
    let backward = match (whole, splits) {
        (true, false) => "B, backward",
        (false, _) => "B, gradient of inputs",
        (true, true) => "B, backward (of inputs only, if there is a W)",
    };
    let turns = |kind, words: &str| Entry::new(Mark::Turns(kind, chunks), words);
    let mut entries = vec![turns(TurnKind::Forward, "F, forward")];
    if any_again(panels) {
        entries.push(turns(TurnKind::Again, "R, forward run again"));
    }
    entries.push(turns(TurnKind::Backward, backward));
    if splits {
        entries.push(turns(TurnKind::Weights, "W, gradient of weights"));
    }
    entries.push(Entry::new(Mark::Waits, "waits"));
    if panels.iter().any(|panel| panel.schedule.has_empty()) {
        entries.push(Entry::new(Mark::Empty, "without a micro-batch: computed on zeros"));
    }
    if let Some(words) = shades(panels) {
        entries.push(Entry::new(Mark::Shades, format!("({words})")));
    }
    if panels.iter().any(|panel| !panel.schedule.moves().is_empty()) {
        let words = "below a row: leaves or comes back (white), kept for another (grey)";
        entries.push(Entry::new(Mark::Nothing, words));
    }
    for kind in beside::shown(panels) {
        entries.push(Entry::new(Mark::Beside(kind), kind.words()));
    }
    if has_steps(panels) {
        entries.push(Entry::new(Mark::StepEnd, "a step ends"));
    }
    if has_versions(panels) {
        let words = "dots: version of the weights, modulo 4; ticks: updates";
        entries.push(Entry::new(Mark::Nothing, words));
    }
    entries
}
