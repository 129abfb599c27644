//! Checks that views and messages lie inside their buffers.

use phalanx_call::Block;
use phalanx_ir::{Port, Program};

use crate::action::{Action, Kind, Run, Script};
use crate::error::ScriptError;

/// Bytes of a program's inputs and of its outputs on one rank: the same in each of its many runs.
pub(crate) struct Needs([Vec<usize>; 2]);

impl Needs {
    pub(crate) fn of(program: &Program) -> Self {
        let bytes = |port: &Port| program.ty(port.value).local_bytes(program.mesh());
        Self([program.inputs(), program.outputs()].map(|ports| ports.iter().map(bytes).collect()))
    }
}

/// Every port of a run has as many bytes as its program needs there.
pub(crate) fn sizes(
    script: &Script,
    index: usize,
    action: &Action,
    run: &Run,
    Needs([ins, outs]): &Needs,
) -> Result<(), ScriptError> {
    let program = script.programs[run.program.0].program();
    let inputs = program.inputs().iter().zip(ins).zip(&run.inputs);
    let outputs = run.outputs.iter().map(|(view, _)| view);
    let outputs = program.outputs().iter().zip(outs).zip(outputs);
    for ((port, &needed), view) in inputs.chain(outputs) {
        let buffer = &script.buffers[view.buffer.0];
        let found = buffer.bytes.saturating_sub(view.offset);
        if found < needed {
            return Err(ScriptError::TooSmall {
                action: index,
                what: action.label.clone(),
                port: port.name.clone(),
                buffer: script.name(view.buffer),
                needed,
                found,
            });
        }
    }
    Ok(())
}

/// Every message lies inside its buffer, and its rows do not overlap.
pub(crate) fn messages(script: &Script, index: usize, action: &Action) -> Result<(), ScriptError> {
    let (Kind::Send { buffer, messages } | Kind::Receive { buffer, messages }) = &action.kind
    else {
        return Ok(());
    };
    let bytes = script.buffers[buffer.0].bytes;
    for message in messages {
        let size = message.dtype.size();
        for &Block { first, stride, rows, len } in &message.blocks {
            let spaced = rows < 2 || stride >= len;
            let end = rows.saturating_sub(1).checked_mul(stride);
            let end = end.and_then(|last| last.checked_add(first)?.checked_add(len));
            let needed = end.and_then(|end| end.checked_mul(size)).filter(|_| spaced);
            let needed = needed.unwrap_or(usize::MAX);
            if needed > bytes {
                return Err(ScriptError::TooSmall {
                    action: index,
                    what: action.label.clone(),
                    port: format!("the message with rank {}", message.peer),
                    buffer: script.name(*buffer),
                    needed,
                    found: bytes,
                });
            }
        }
    }
    Ok(())
}
