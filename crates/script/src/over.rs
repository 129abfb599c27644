//! Results that lie over operands: updates work where the state is.
//!
//! A run may bind an output to the memory of an input. Its program need not know: it reads all of an operand
//! before a result is written there, or writes each element where it has just read it. Whether that holds
//! follows from where its values lie, however many instructions it has.

use std::ops::Range;

use phalanx_call::Slot;
use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::{Op, OpDef, Program};

use crate::action::{Action, Run, Script, View};
use crate::error::ScriptError;

/// Refuses a run that writes a result over an operand which it still reads.
pub(crate) fn over(
    script: &Script,
    index: usize,
    action: &Action,
    run: &Run,
) -> Result<(), ScriptError> {
    let entry = &script.programs[run.program.0];
    let (program, slots) = (entry.program(), entry.slots());
    // A script that was written by hand may have a program without places.
    if slots.by_value.len() != program.values().len() {
        return Ok(());
    }
    let bytes = |value| program.ty(value).local_bytes(program.mesh());
    let range = |view: &View, bytes: usize| view.offset..view.offset + bytes;
    for (output, (port, (target, _))) in program.outputs().iter().zip(&run.outputs).enumerate() {
        let written = range(target, bytes(port.value));
        for (input, (operand, source)) in program.inputs().iter().zip(&run.inputs).enumerate() {
            let read = range(source, bytes(operand.value));
            let shared = source.buffer == target.buffer && overlap(&read, &written);
            let (read_by, made_by) =
                (last_read(program, slots, input), first_write(program, slots, output));
            if shared
                && read_by.is_some_and(|last| {
                    !is_free(program, slots, [input, output], last, made_by, read == written)
                })
            {
                return Err(ScriptError::Over {
                    action: index,
                    what: action.label.clone(),
                    output: port.name.clone(),
                    input: operand.name.clone(),
                    buffer: script.name(target.buffer),
                });
            }
        }
    }
    Ok(())
}

/// Whether the memory of an input may be written when an output is: its last reader comes before, or is the
/// writer itself and works in place.
fn is_free(
    program: &Program,
    slots: &phalanx_call::Slots,
    [input, output]: [usize; 2],
    last: usize,
    made: usize,
    same: bool,
) -> bool {
    if last != made {
        return last < made;
    }
    let instr = &program.instrs()[made];
    // Collectives say themselves where a rank's own block may lie.
    let alone = program.instrs().len() == 1;
    if alone && matches!(&instr.op, Op::Collective(c) if c.kind != CollectiveKind::Done) {
        return true;
    }
    let slot = |value: &phalanx_ir::ValueId| slots.by_value[value.index()];
    let operands = instr.inputs.iter().enumerate().filter(|(_, v)| slot(v) == Slot::Input(input));
    let result = instr.outputs.iter().position(|v| slot(v) == Slot::Output(output));
    let in_place =
        |operand: usize| result.is_some_and(|r| instr.op.in_place().contains(&(operand, r)));
    same && operands.map(|(operand, _)| operand).all(in_place)
}

/// The last instruction that reads what lies in an input; none if nothing does.
fn last_read(program: &Program, slots: &phalanx_call::Slots, input: usize) -> Option<usize> {
    let reads = |value: &phalanx_ir::ValueId| slots.by_value[value.index()] == Slot::Input(input);
    let last = program.instrs().iter().rposition(|instr| instr.inputs.iter().any(reads));
    // What is copied to an output at the end is read then.
    let copied = slots.copies.iter().any(|(_, value)| reads(value));
    if copied { Some(program.instrs().len()) } else { last }
}

/// The first instruction that writes what lies in an output; behind the last if it is copied there.
fn first_write(program: &Program, slots: &phalanx_call::Slots, output: usize) -> usize {
    let writes =
        |value: &phalanx_ir::ValueId| slots.by_value[value.index()] == Slot::Output(output);
    let first = program.instrs().iter().position(|instr| instr.outputs.iter().any(writes));
    first.unwrap_or(program.instrs().len())
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
