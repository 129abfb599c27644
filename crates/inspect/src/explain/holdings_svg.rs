//! A drawing of what each rank holds: a row for each rank, a column for each kind of thing.

use std::ops::Range;

use phalanx_pipeline::picture::{Anchor, Page, Weight};

use super::holdings::{Holdings, RankHoldings, covered};

/// Pixels.
const MARGIN: f64 = 24.0;
const TOP: f64 = 92.0;
const ROW: f64 = 26.0;
const BAR: f64 = 16.0;
const GAP: f64 = 22.0;
const WIDE: f64 = 190.0;
const LETTER: f64 = 7.2;

/// What is held, and what is not.
const LAYERS: &str = "#2362a5";
const WEIGHTS: &str = "#105492";
const GRADIENTS: &str = "#c06c21";
const OPTIMIZER: &str = "#4f9d7f";
const TOKENS: &str = "#7a5195";
const EXPERTS: &str = "#e3b23c";
const EMPTY: &str = "#eef1f4";

/// The drawing, under a title.
pub(super) fn svg(holdings: &Holdings, title: &str, layout: &str) -> String {
    let longest = holdings.ranks.iter().map(|rank| rank.place.len()).max().unwrap_or(0);
    let left = MARGIN + LETTER * (longest as f64 + 9.0);
    let mut columns =
        vec!["layers", "weights", "gradients", "optimizer state", "tokens of a batch"];
    let routes = holdings.ranks.iter().any(|rank| !rank.experts.is_empty());
    columns.extend(routes.then_some("experts of a layer"));
    let width = left + columns.len() as f64 * (WIDE + GAP) + MARGIN;
    let rows = holdings.ranks.len() as f64;
    let mut page = Page::new(width.max(720.0), TOP + rows * ROW + 2.0 * MARGIN);
    page.text((MARGIN, 30.0), 16.0, Weight::Bold, Anchor::Start, title);
    page.text((MARGIN, 50.0), 12.0, Weight::Soft, Anchor::Start, layout);
    let column = |number: usize| left + number as f64 * (WIDE + GAP);
    for (number, name) in columns.iter().enumerate() {
        page.text((column(number), TOP - 12.0), 12.0, Weight::Bold, Anchor::Start, name);
    }
    for (number, rank) in holdings.ranks.iter().enumerate() {
        let y = TOP + number as f64 * ROW;
        let name = format!("rank {number}  {}", rank.place);
        page.text((MARGIN, y + BAR - 3.0), 12.0, Weight::Plain, Anchor::Start, &name);
        layers(&mut page, (column(0), y), &holdings.layers, rank);
        strip(&mut page, (column(1), y), &rank.weights, WEIGHTS);
        strip(&mut page, (column(2), y), &rank.gradients, GRADIENTS);
        strip(&mut page, (column(3), y), &rank.optimizer, OPTIMIZER);
        tokens(&mut page, (column(4), y), &rank.tokens);
        experts(&mut page, (column(5), y), &rank.experts);
    }
    let note = match holdings.more {
        0 => "A bar is the whole model, from the first parameter to the last, or the whole batch; \
              what the rank holds is coloured."
            .to_owned(),
        more => format!("{more} more ranks are not shown."),
    };
    let bottom = TOP + rows * ROW + MARGIN;
    page.text((MARGIN, bottom), 11.0, Weight::Soft, Anchor::Start, &note);
    page.finish()
}

/// A cell for each instance of the model.
fn layers(page: &mut Page, (x, y): (f64, f64), names: &[String], rank: &RankHoldings) {
    let cell = WIDE / names.len() as f64;
    for (number, (name, held)) in names.iter().zip(&rank.layers).enumerate() {
        let fill = if *held { LAYERS } else { EMPTY };
        page.block((x + number as f64 * cell, y), (cell, BAR), fill, name);
    }
}

/// A cell for each expert of a layer, with its number if there is room.
fn experts(page: &mut Page, (x, y): (f64, f64), held: &[bool]) {
    let cell = WIDE / held.len().max(1) as f64;
    for (number, held) in held.iter().enumerate() {
        let (left, name) = (x + number as f64 * cell, number.to_string());
        let fill = if *held { EXPERTS } else { EMPTY };
        page.block((left, y), (cell, BAR), fill, &format!("expert {name}"));
        if *held && cell > LETTER * (name.len() as f64 + 0.5) {
            let middle = (left + 0.5 * cell, y + BAR - 4.0);
            page.text(middle, 11.0, Weight::Plain, Anchor::Middle, &name);
        }
    }
}

/// The shares of a whole that are held, and how much that is.
fn strip(page: &mut Page, (x, y): (f64, f64), held: &[Range<f64>], fill: &str) {
    let (wide, share) = (WIDE - 40.0, covered(held));
    page.bar((x, y), (wide, BAR), EMPTY);
    for part in joined(held) {
        page.bar((x + part.start * wide, y), ((part.end - part.start) * wide, BAR), fill);
    }
    let percent = format!("{:.0}%", 100.0 * share);
    page.text((x + WIDE - 4.0, y + BAR - 4.0), 11.0, Weight::Soft, Anchor::End, &percent);
}

/// The batch as a rectangle: sequences downwards, their tokens to the right.
fn tokens(page: &mut Page, (x, y): (f64, f64), [sequences, positions]: &[Range<f64>; 2]) {
    let (wide, high) = (WIDE - 40.0, BAR + 4.0);
    page.bar((x, y - 2.0), (wide, high), EMPTY);
    let place = (x + positions.start * wide, y - 2.0 + sequences.start * high);
    let size = ((positions.end - positions.start) * wide, (sequences.end - sequences.start) * high);
    page.bar(place, size, TOKENS);
}

/// Intervals that touch become one: a picture of a large model stays small.
fn joined(held: &[Range<f64>]) -> Vec<Range<f64>> {
    let mut joined: Vec<Range<f64>> = Vec::new();
    for part in held {
        match joined.last_mut() {
            Some(last) if part.start - last.end < 1e-9 => last.end = last.end.max(part.end),
            _ => joined.push(part.clone()),
        }
    }
    joined
}
