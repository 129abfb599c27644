//! What is written beside rows: which device or ranks each stands for, which stages of which pipeline it holds where there
//! are several, and where the steps of a row end.

use super::Panel;
use super::svg::{Drawing, GAP, LEFT, ROW};
use super::svg_page::{Anchor, Weight};

/// The size of small words.
const SMALL: f64 = 8.5;

impl Drawing {
    /// The name of a row; below it, what tells replicas apart without shades.
    pub(super) fn device(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        let name = match panel.ranks.get(stage_group).map(Vec::as_slice) {
            None | Some([]) => format!("device {stage_group}"),
            Some([rank]) => format!("rank {rank}"),
            Some(ranks @ [first, .., last]) => match last - first + 1 == ranks.len() {
                true => format!("ranks {first}–{last}"),
                false => format!("{} ranks", ranks.len()),
            },
        };
        let below = directions(panel, stage_group);
        let middle = y + ROW / 2.0 + if below.is_empty() { 4.0 } else { -1.0 };
        let x = LEFT - 10.0;
        self.page.text((x, middle), 11.5, Weight::Plain, Anchor::End, &name);
        if !below.is_empty() {
            self.page.text((x, middle + 10.0), SMALL, Weight::Soft, Anchor::End, &below);
        }
    }

    /// Where the steps of a row end on a stage group.
    pub(super) fn step_ends(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        for end in panel.step_ends(stage_group) {
            let x = LEFT + end * self.scale;
            self.page.dashes((x, y - GAP), (x, y + ROW + GAP));
        }
    }
}

/// The stages of each pipeline that a stage group holds, where there are several: `0↓ 3↑`.
fn directions(panel: &Panel<'_>, stage_group: usize) -> String {
    let placement = panel.schedule.placement();
    if placement.replicas() < 2 {
        return String::new();
    }
    let held = (0..placement.chunks(stage_group)).filter_map(|c| placement.held(stage_group, c));
    let arrow = |replica: usize| if replica.is_multiple_of(2) { '↓' } else { '↑' };
    let words: Vec<String> =
        held.map(|held| format!("{}{}", held.stage, arrow(held.replica))).collect();
    format!("stages {}", words.join(" "))
}
