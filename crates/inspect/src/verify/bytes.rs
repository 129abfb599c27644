//! The bytes that ranks moved, beside those that were predicted.
//!
//! A prediction follows from the types of scripts alone, but for rows of experts: there the types say how much a row is
//! and for how many there is room, and the counts of the run on one rank say how many there are. So prediction and
//! measurement share nothing. What ranks moved in a step that lacked room is not compared: behind the first layer that
//! lacked some, such a step computes with other rows than one rank does.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use phalanx_call::traffic;
use phalanx_error::Result;
use phalanx_script::{Moved, Route};
use phalanx_session::{Measured, Session};

use super::routing::{StepRows, rows_of};
use super::{CommRow, Mismatch};

type Moves = BTreeMap<Route, Moved>;

/// What was predicted and measured so far.
#[derive(Default)]
pub(super) struct Bytes {
    ranks: Vec<OnRank>,
}

/// The same of one rank.
#[derive(Default)]
struct OnRank {
    predicted: Moves,
    measured: Moves,
    /// What had been predicted and measured at the last look.
    seen: [Moves; 2],
}

impl Bytes {
    /// Takes in what ranks moved since the last time: in a step with these rows, unless it was taken again.
    pub(super) fn after(
        &mut self,
        session: &mut Session,
        rows: &StepRows,
        repeated: bool,
    ) -> Result<()> {
        let all = session.measure()?;
        let mut rows = rows.clone();
        // The empty micro-batches of a vectorised pipeline, which one rank does not have: what ranks counted there.
        let counted = !rows.is_empty();
        for turn in all.iter().flat_map(|own| &own.rows).filter(|_| counted) {
            let at = (turn.turn.instance, turn.turn.microbatch);
            if let Entry::Vacant(missing) = rows.entry(at) {
                missing.insert(rows_of(session, at)?);
            }
        }
        self.ranks.resize_with(all.len(), OnRank::default);
        for (own, found) in self.ranks.iter_mut().zip(all) {
            own.after(found, &rows, repeated);
        }
        Ok(())
    }

    /// The totals, and the ranks where prediction and measurement differ.
    pub(super) fn compared(&self) -> (Vec<CommRow>, Vec<Mismatch>) {
        let mut rows: BTreeMap<Route, CommRow> = BTreeMap::new();
        let mut mismatches = Vec::new();
        for (rank, OnRank { predicted, measured, .. }) in self.ranks.iter().enumerate() {
            let routes: BTreeSet<&Route> = predicted.keys().chain(measured.keys()).collect();
            for route in routes {
                let predicted = predicted.get(route).copied().unwrap_or_default();
                let measured = measured.get(route).copied().unwrap_or_default();
                if predicted != measured {
                    let tell =
                        |moved: Moved| format!("{} bytes in {} calls", moved.bytes, moved.calls);
                    let (predicted, measured) = (tell(predicted), tell(measured));
                    mismatches.push(Mismatch {
                        rank,
                        what: route.to_string(),
                        predicted,
                        measured,
                    });
                }
                let row = rows.entry(route.clone()).or_insert_with(|| CommRow {
                    op: route.op,
                    axes: traffic::names(&route.axes),
                    count: 0,
                    bytes_predicted: 0,
                    bytes_measured: 0,
                });
                row.count += measured.calls;
                row.bytes_predicted += predicted.bytes;
                row.bytes_measured += measured.bytes;
            }
        }
        (rows.into_values().collect(), mismatches)
    }
}

impl OnRank {
    fn after(&mut self, found: Measured, rows: &StepRows, repeated: bool) {
        let Measured { predicted, moved, rows: turns, .. } = found;
        if !repeated {
            let [before, measured] = &self.seen;
            add_since(&mut self.predicted, before, &predicted);
            add_since(&mut self.measured, measured, &moved);
            for turn in turns {
                let at = (turn.turn.instance, turn.turn.microbatch);
                let (Some(counts), Some(own)) =
                    (rows.get(&at), self.predicted.get_mut(&turn.rows.route))
                else {
                    continue;
                };
                own.bytes = own.bytes + turn.rows.bytes(counts) - turn.rows.bound;
            }
        }
        self.seen = [predicted, moved];
    }
}

/// Adds what came since a look.
fn add_since(total: &mut Moves, before: &Moves, now: &Moves) {
    for (route, now) in now {
        let before = before.get(route).copied().unwrap_or_default();
        let moved = Moved { calls: now.calls - before.calls, bytes: now.bytes - before.bytes };
        traffic::add(total, route.clone(), moved);
    }
}
