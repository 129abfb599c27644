//! Which memory actions use, and what a copy between tiers is.

use phalanx_call::Tier;

use crate::action::{Action, BufferId, Kind, Script};
use crate::error::ScriptError;

/// Checks that programs and messages use the tier `Device`, and that a copy goes to the same number
/// of bytes in another tier, on the lane of its direction.
pub(crate) fn tiers(script: &Script, index: usize, action: &Action) -> Result<(), ScriptError> {
    let bad = |why: String, help: &str| {
        let (what, help) = (action.label.clone(), help.to_owned());
        Err(ScriptError::Tier { action: index, what, why, help })
    };
    let buffer = |id: BufferId| &script.buffers[id.0];
    let Kind::Copy { from, into } = action.kind else {
        let mut used = action.reads().into_iter().chain(action.writes());
        return match used.find(|id| buffer(*id).tier != Tier::Device) {
            None => Ok(()),
            Some(id) => bad(
                format!(
                    "it uses `{}`, which lies in the tier `{}`",
                    script.name(id),
                    buffer(id).tier
                ),
                "copy it to a buffer in the tier `device` first",
            ),
        };
    };
    let (a, b) = (buffer(from), buffer(into));
    let way = || {
        let [from, into] = [from, into].map(|id| script.name(id));
        format!("`{from}` ({}) to `{into}` ({})", a.tier, b.tier)
    };
    if a.bytes != b.bytes {
        let why = format!("it copies {}, but these have {} and {} bytes", way(), a.bytes, b.bytes);
        return bad(why, "give both buffers the same size");
    }
    if script.accumulators.iter().any(|accumulator| accumulator.buffer == into) {
        let why = format!("it copies {}, which is a gradient buffer", way());
        return bad(why, "a gradient buffer holds gradients alone; copy into another buffer");
    }
    match a.tier.lane_to(b.tier) {
        Some(lane) if lane == action.lane => Ok(()),
        Some(lane) => bad(
            format!("it copies {} on the lane {:?}", way(), action.lane),
            &format!("issue it on the lane {lane:?}"),
        ),
        None => bad(
            format!("it copies {}, which are in the same tier", way()),
            "run a program that copies",
        ),
    }
}
