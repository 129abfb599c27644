//! Messages to and from ranks of other stages.

use std::sync::PoisonError;

use phalanx_call::{Block, Message, Slot};
use phalanx_comm::{Blocks, Call, CollectiveOp, CommError, GroupId, Site, Strides};
use phalanx_engine::Way;
use phalanx_ir::{Axis, DType};

use super::Var;
use super::transfer::{Endpoint, Transfer};

/// The calls that send a buffer's messages, or receive them.
pub(crate) fn transfer(
    endpoint: &Endpoint,
    messages: &[Message],
    way: Way,
    label: &str,
) -> Result<Transfer, CommError> {
    let mut line = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
    let (site, tag) = (Site::named(label), line.tag(vec![Axis::STAGES]));
    let mut calls = Vec::new();
    for message in messages {
        let Message { peer, channel, dtype, ref blocks, .. } = *message;
        let op = match way {
            Way::Send => CollectiveOp::Send { to: peer, channel },
            Way::Receive => CollectiveOp::Receive { from: peer, channel },
        };
        for block in blocks {
            let call = Call::new(GroupId::WORLD, op, dtype, rows(block));
            calls.push((block.first, call.at(site).tagged(tag)));
        }
    }
    let dtype = messages.first().map_or(DType::F32, |message| message.dtype);
    let slot = match way {
        Way::Send => Slot::Input(0),
        Way::Receive => Slot::Output(0),
    };
    // Both sides of the call are the one buffer; each kind of call uses its own.
    let buffer = || Var { slot, dtype, shape: vec![], valid: vec![] };
    Ok(Transfer::of(calls, buffer(), buffer()))
}

fn rows(block: &Block) -> Blocks {
    let Block { stride, rows, len, .. } = *block;
    let strides = Strides { block: 0, outer: rows * stride, row: stride };
    Blocks { outer: 1, rows, len, source: strides, target: strides }
}
