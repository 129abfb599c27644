//! Messages to and from ranks of other stages.

use std::sync::PoisonError;

use phalanx_call::{Message, Slot};
use phalanx_engine::Way;
use phalanx_ir::DType;

use super::Var;
use super::transfer::{Endpoint, Transfer};

/// The calls that send a buffer's messages, or receive them.
pub(crate) fn transfer(
    endpoint: &Endpoint,
    messages: &[Message],
    way: Way,
    label: &str,
) -> Transfer {
    let mut line = endpoint.lock().unwrap_or_else(PoisonError::into_inner);
    let calls = line.messages(messages, way == Way::Send, label);
    let dtype = messages.first().map_or(DType::F32, |message| message.dtype);
    let slot = match way {
        Way::Send => Slot::Input(0),
        Way::Receive => Slot::Output(0),
    };
    // Both sides of the call are the one buffer; each kind of call uses its own.
    let buffer = || Var { slot, dtype, shape: vec![], valid: vec![] };
    Transfer::of(calls, buffer(), buffer())
}
