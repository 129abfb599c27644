//! Dead code elimination: an instruction stays only if the program returns one of its results or an
//! instruction that stays reads one.

use phalanx_ir::{Port, Program, Rewriter, ValueId};

/// Drops instructions whose results are not needed. Order and inputs stay.
pub fn dead_code(program: &Program) -> Program {
    let needed = needed(program, program.outputs());
    copy(program, Rewriter::new(program), &needed).finish()
}

/// Drops instructions whose results are not needed, and the inputs that are then unread.
pub fn dead_code_and_inputs(program: &Program) -> Program {
    let needed = needed(program, program.outputs());
    let inputs = Rewriter::with_inputs(program, |port| needed[port.value.index()]);
    copy(program, inputs, &needed).finish()
}

/// Keeps the outputs that `keep` accepts, and only what they need. The layouts that the program
/// asks for stay.
pub fn some_outputs(program: &Program, keep: impl Fn(&Port) -> bool) -> Program {
    let outputs: Vec<Port> = program.outputs().iter().filter(|port| keep(port)).cloned().collect();
    let needed = needed(program, &outputs);
    let inputs = Rewriter::with_inputs(program, |port| needed[port.value.index()]);
    let copied = copy(program, inputs, &needed);
    let notes = program.notes().iter().filter(|(value, _)| needed[value.index()]);
    let notes: Vec<(ValueId, String)> =
        notes.map(|(value, layout)| (copied.resolve(*value), layout.clone())).collect();
    let mut new = copied.finish_with(&outputs);
    notes.into_iter().for_each(|(value, layout)| new.note(value, layout));
    new
}

fn copy<'a>(program: &Program, mut rewriter: Rewriter<'a>, needed: &[bool]) -> Rewriter<'a> {
    for (index, instr) in program.instrs().iter().enumerate() {
        if instr.outputs.iter().any(|v| needed[v.index()]) {
            rewriter.keep(index);
        }
    }
    rewriter
}

/// For each value, whether an output depends on it. One walk backwards suffices, since operands
/// are made before they are read.
fn needed(program: &Program, outputs: &[Port]) -> Vec<bool> {
    let mut needed = vec![false; program.values().len()];
    for port in outputs {
        needed[port.value.index()] = true;
    }
    for instr in program.instrs().iter().rev() {
        if instr.outputs.iter().any(|v| needed[v.index()]) {
            for value in &instr.inputs {
                needed[value.index()] = true;
            }
        }
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_unchanged, check_whole};

    const BEFORE: &str = "
        x: boundary f32[4,8]
        unread: param f32[8]
        gain: param f32[8]
        %1 = tanh(x) : f32[4,8]
        %2 = add(%1, unread) : f32[4,8]
        %3 = relu(%2) : f32[4,8]
        %4, %5 = rms_norm(%1, gain, eps=0.00001) : f32[4,8], f32[4]
        return y: boundary %4";

    #[test]
    fn chains_that_lead_nowhere_go() {
        let after = "
            %1 = tanh(x) : f32[4,8]
            %4, %5 = rms_norm(%1, gain, eps=0.00001) : f32[4,8], f32[4]";
        check(BEFORE, dead_code, after);
    }

    #[test]
    fn unread_inputs_go_only_when_asked() {
        let after = "
            x: boundary f32[4,8]
            gain: param f32[8]
            %1 = tanh(x) : f32[4,8]
            %4, %5 = rms_norm(%1, gain, eps=0.00001) : f32[4,8], f32[4]
            return y: boundary %4";
        check_whole("", BEFORE, dead_code_and_inputs, after);
    }

    #[test]
    fn an_input_that_is_returned_stays() {
        let text = "
            x: boundary f32[4]
            return y: boundary x";
        check_unchanged("", text, dead_code_and_inputs);
    }

    /// Without its loss a program needs no targets; the layouts that it asks for stay.
    #[test]
    fn some_outputs_keep_what_they_need_and_their_layouts() {
        let b = phalanx_ir::Builder::new("line", phalanx_ir::DType::F32);
        let x = b.data("x", phalanx_ir::DType::F32, [4, 2]);
        let y = x.matmul(b.param("w", [2, 1]).annotate("0:tp"));
        b.probe("y", y);
        b.loss("loss", y.squared_error(b.data("t", phalanx_ir::DType::F32, [4, 1])));
        let whole = b.finish().unwrap();
        let part = some_outputs(&whole, |port| port.name == "y");
        let inputs: Vec<&str> = part.inputs().iter().map(|port| &*port.name).collect();
        assert_eq!((inputs, part.instrs().len()), (vec!["x", "w"], 1));
        let (value, layout) = &part.notes()[0];
        assert_eq!((*value, &**layout), (part.input_named("w").unwrap().value, "0:tp"));
    }
}
