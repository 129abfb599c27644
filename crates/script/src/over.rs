//! Results that overwrite operands: updates work in place on the state.
//!
//! A run may bind an output to the memory of an input. That is allowed if the program reads all of
//! the operand before it writes the result there, or writes each element where it has just read it.
//! Whether that holds follows from the program's slots, for any number of instructions.

use phalanx_call::{Slot, Slots};
use phalanx_ir::{Op, OpDef, Port, Program, ValueId};

use crate::action::{Action, Run, Script, View};
use crate::error::ScriptError;

/// Refuses a run that overwrites an operand that it still reads.
pub(crate) fn over(
    script: &Script,
    index: usize,
    action: &Action,
    run: &Run,
) -> Result<(), ScriptError> {
    for (output, (target, _)) in run.outputs.iter().enumerate() {
        for (input, source) in run.inputs.iter().enumerate() {
            if source.buffer == target.buffer && !is_free(script, run, [input, output]) {
                let program = script.programs[run.program.0].program();
                return Err(ScriptError::Over {
                    action: index,
                    what: action.label.clone(),
                    output: program.outputs()[output].name.clone(),
                    input: program.inputs()[input].name.clone(),
                    buffer: script.name(target.buffer),
                });
            }
        }
    }
    Ok(())
}

/// Whether a run may bind this input and this output to the views that it does.
fn is_free(script: &Script, run: &Run, [input, output]: [usize; 2]) -> bool {
    let entry = &script.programs[run.program.0];
    let (program, slots) = (entry.program(), entry.slots());
    let range = |view: &View, port: &Port| {
        view.offset..view.offset + program.ty(port.value).local_bytes(program.mesh())
    };
    let read = range(&run.inputs[input], &program.inputs()[input]);
    let written = range(&run.outputs[output].0, &program.outputs()[output]);
    let apart = read.end <= written.start || written.end <= read.start;
    // A script that was written by hand may have a program without places.
    if apart || slots.by_value.len() != program.values().len() {
        return true;
    }
    let made = first_write(program, slots, output);
    match last_read(program, slots, input) {
        None => true,
        Some(last) if last != made => last < made,
        Some(_) => works_in_place(program, slots, made, [input, output], read == written),
    }
}

/// Whether the instruction that reads an input last, and first writes an output, may write each element
/// where it has read it.
fn works_in_place(
    program: &Program,
    slots: &Slots,
    instr: usize,
    [input, output]: [usize; 2],
    same: bool,
) -> bool {
    let Some(instr) = program.instrs().get(instr) else { return true };
    // A collective itself says where a rank's own block may lie.
    if matches!(instr.op, Op::Collective(_)) {
        return true;
    }
    let slot = |value: &ValueId| slots.by_value[value.index()];
    let operands = instr.inputs.iter().enumerate().filter(|(_, v)| slot(v) == Slot::Input(input));
    let result = instr.outputs.iter().position(|v| slot(v) == Slot::Output(output));
    let in_place =
        |operand: usize| result.is_some_and(|r| instr.op.in_place().contains(&(operand, r)));
    same && operands.map(|(operand, _)| operand).all(in_place)
}

/// The last instruction that reads what lies in an input; none if nothing does.
fn last_read(program: &Program, slots: &Slots, input: usize) -> Option<usize> {
    let reads = |value: &ValueId| slots.by_value[value.index()] == Slot::Input(input);
    let last = program.instrs().iter().rposition(|instr| instr.inputs.iter().any(reads));
    // A value that is copied to an output at the end is read then.
    let copied = slots.copies.iter().any(|(_, value)| reads(value));
    if copied { Some(program.instrs().len()) } else { last }
}

/// The first instruction that writes what lies in an output; after the last if it is copied there.
fn first_write(program: &Program, slots: &Slots, output: usize) -> usize {
    let writes = |value: &ValueId| slots.by_value[value.index()] == Slot::Output(output);
    let first = program.instrs().iter().position(|instr| instr.outputs.iter().any(writes));
    first.unwrap_or(program.instrs().len())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use phalanx_call::{NoScratch, Tier};
    use phalanx_ir::text;

    use super::*;
    use crate::action::{Buffer, Category, Kind, Source, Write};
    use crate::key::BufferKey;
    use crate::library::Library;
    use crate::{BufferId, Lane, check};

    /// Runs a program whose first output lies over its first input.
    fn checked(body: &str) -> Result<(), String> {
        let source =
            format!("mesh\nprogram t {{\n  w: state f32[*64]\n  g: state f32[*64]\n{body}}}");
        let mut script = Script::default();
        let mut buffer = |name: &str| {
            script.buffer(Buffer {
                key: BufferKey::Own(name.into()),
                category: Category::Weights,
                bytes: 256,
                source: Source::State,
                tier: Tier::Device,
                padding: vec![],
            })
        };
        let view = |buffer: BufferId| View { buffer, offset: 0 };
        let (w, g) = (view(buffer("w")), view(buffer("g")));
        let library = Library::new(Arc::new(NoScratch));
        let program = script.program(library.placed(&text::parse(&source).unwrap()));
        let outputs = vec![(w, Write::Overwrite)];
        let kind = Kind::Run(Run { program, inputs: vec![w, g], outputs, contributes: vec![] });
        let label = "update".to_owned();
        script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
        check(&script).map_err(|error| error.to_string())
    }

    #[test]
    fn several_instructions_may_update_where_the_state_is() {
        checked("  %1 = scale(g, by=-0.5) : f32[*64]\n  %2 = add(w, %1) : f32[*64]\n  return o: state %2\n")
            .unwrap();
        checked("  %1 = scale(w, by=0.5) : f32[*64]\n  %2 = add(%1, g) : f32[*64]\n  return o: state %2\n")
            .unwrap();
    }

    /// A result must not be written before the last read of what it overwrites.
    #[test]
    fn an_operand_that_is_still_read_is_not_written_over() {
        let told = checked(
            "  %1 = scale(g, by=2) : f32[*64]\n  %2 = add(w, g) : f32[*64]\n  return o: state %1\n  return p: probe %2\n",
        );
        let told = told.unwrap_err();
        assert!(told.contains("`o` is written over `w`"), "{told}");
    }
}
