//! Micro-batches that wait on other stage groups, in a narrow row below each: outlined where one leaves or comes
//! back, filled where it is kept for another stage group.

use phalanx_script::ParkedMove;

use super::Panel;

/// A micro-batch in the narrow row of a stage group.
pub(super) struct Guest {
    pub(super) microbatch: usize,
    /// From when to when.
    pub(super) start: f64,
    pub(super) end: f64,
    /// Which of the lines that the row has: guests at the same time have different ones.
    pub(super) line: usize,
    /// What it does there.
    pub(super) what: String,
    /// Whether it is kept for another stage group.
    pub(super) kept: bool,
}

/// What a stage group's narrow row shows, and how many lines it has.
pub(super) fn guests(panel: &Panel<'_>, stage_group: usize) -> (Vec<Guest>, usize) {
    let turns = &panel.timeline.stage_groups[stage_group];
    let at = |turn: usize| turns.get(turn).map_or(panel.timeline.makespan, |timed| timed.start);
    let mut found: Vec<Guest> = Vec::new();
    let mut add = |own: &ParkedMove, start: f64, end: f64, what: String, kept| {
        let microbatch = own.microbatch;
        found.push(Guest { microbatch, start, end, line: 0, what, kept });
    };
    for own in panel.schedule.moves() {
        let mb = own.microbatch;
        if own.from == stage_group {
            let out = format!("micro-batch {mb} leaves for device {}", own.to);
            add(own, at(own.sent), at(own.left), out, false);
            let read = turns.iter().rposition(|timed| timed.turn.microbatch == mb);
            let back = format!("micro-batch {mb} comes back from device {}", own.to);
            add(own, at(own.returned), at(read.unwrap_or(own.returned)), back, false);
        }
        if own.to == stage_group {
            let what = format!("micro-batch {mb} of device {} is kept", own.from);
            add(own, at(own.taken), at(own.freed), what, true);
        }
    }
    found.sort_by(|a, b| a.start.total_cmp(&b.start));
    // The end of what each line shows so far.
    let mut lines: Vec<f64> = Vec::new();
    for guest in &mut found {
        let free = lines.iter().position(|end| *end <= guest.start);
        guest.line = free.unwrap_or(lines.len());
        lines.resize(lines.len().max(guest.line + 1), 0.0);
        lines[guest.line] = guest.end.max(guest.start);
    }
    (found, lines.len())
}
