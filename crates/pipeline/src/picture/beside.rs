//! What stage groups do besides their turns, in thin lines below each row: weights that are gathered,
//! gradients that are summed, messages, updates. From white to dark, so that they differ without colours.

use std::collections::BTreeSet;

use super::svg::{Drawing, GAP, LEFT};
use super::{BesideKind, Panel, short};

/// The height of a line.
pub(super) const LINE: f64 = 6.0;

impl BesideKind {
    pub(super) fn fill(self) -> &'static str {
        match self {
            BesideKind::Gather => "#ffffff",
            BesideKind::Sum => "#c8c8c8",
            BesideKind::Message => "#8a8a8a",
            BesideKind::Update => "#4a4a4a",
        }
    }

    pub(super) fn words(self) -> &'static str {
        match self {
            BesideKind::Gather => "weights are gathered",
            BesideKind::Sum => "gradients are summed",
            BesideKind::Message => "values are sent",
            BesideKind::Update => "norm, update",
        }
    }
}

/// The kinds that a picture shows: all stage groups have the same lines.
fn kinds(panel: &Panel<'_>) -> Vec<BesideKind> {
    let shown = |kind: &BesideKind| panel.beside.iter().flatten().any(|own| own.kind == *kind);
    BesideKind::ALL.into_iter().filter(shown).collect()
}

/// The kinds that at least one of several pictures shows.
pub(super) fn shown(panels: &[Panel<'_>]) -> BTreeSet<BesideKind> {
    panels.iter().flat_map(kinds).collect()
}

/// The room that the lines take below a row.
pub(super) fn height(panel: &Panel<'_>) -> f64 {
    match kinds(panel).len() {
        0 => 0.0,
        lines => lines as f64 * LINE + GAP,
    }
}

impl Drawing {
    /// The lines of a stage group.
    pub(super) fn beside(&mut self, panel: &Panel<'_>, stage_group: usize, y: f64) {
        let kinds = kinds(panel);
        for own in panel.beside.get(stage_group).into_iter().flatten() {
            let line = kinds.iter().position(|kind| *kind == own.kind).unwrap_or(0);
            let place = (LEFT + own.start * self.scale, y + line as f64 * LINE);
            let width = ((own.end - own.start) * self.scale).max(0.5);
            let what = format!("{}, {} to {}", own.what, short(own.start), panel.time(own.end));
            self.page.block(place, (width, LINE - 1.0), own.kind.fill(), &what);
        }
    }
}
