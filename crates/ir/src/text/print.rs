//! Printing.

use std::fmt;

use crate::ops::{Op, OpDef};
use crate::program::{Instr, Phase, Port, Program, ValueId};

/// The name of a value: an input's own, else `%` and its number.
pub fn value_name(program: &Program, value: ValueId) -> String {
    match program.inputs().iter().find(|p| p.value == value) {
        Some(port) => port.name.clone(),
        None => format!("%{}", value.0),
    }
}

/// `op<axes>(operands, attributes)`.
pub fn call(program: &Program, op: &Op, inputs: &[ValueId]) -> String {
    let axes: Vec<String> = op.axes().iter().map(ToString::to_string).collect();
    let axes = if axes.is_empty() { String::new() } else { format!("<{}>", axes.join(",")) };
    let mut args: Vec<String> = inputs.iter().map(|&v| value_name(program, v)).collect();
    args.extend(op.attrs().iter().map(|(key, value)| format!("{key}={value}")));
    format!("{}{axes}({})", op.name(), args.join(", "))
}

/// One instruction with its result types.
pub fn instr(program: &Program, instr: &Instr) -> String {
    let names: Vec<String> = instr.outputs.iter().map(|&v| value_name(program, v)).collect();
    let types: Vec<String> = instr.outputs.iter().map(|&v| program.ty(v).to_string()).collect();
    let call = call(program, &instr.op, &instr.inputs);
    let phase = match instr.phase {
        Phase::F => "",
        Phase::B => " @B",
        Phase::W => " @W",
    };
    format!("{} = {call} : {}{phase}", names.join(", "), types.join(", "))
}

/// A program as it prints, with comments at the ends of some instructions' lines. It can be read back.
pub fn commented(program: &Program, comment: impl Fn(&Instr) -> Option<String>) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, program, comment);
    text
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self, |_| None)
    }
}

/// `name: role`, and for a cotangent its boundary value.
fn head(port: &Port) -> String {
    let of = port.of.as_ref().map_or(String::new(), |boundary| format!(" of {boundary}"));
    format!("{}: {}{of}", port.name, port.role.name())
}

fn write(
    f: &mut impl fmt::Write,
    program: &Program,
    comment: impl Fn(&Instr) -> Option<String>,
) -> fmt::Result {
    writeln!(f, "{}", format!("mesh {}", program.mesh()).trim_end())?;
    writeln!(f, "program {} {{", program.name)?;
    for port in program.inputs() {
        writeln!(f, "  {} {}", head(port), program.ty(port.value))?;
    }
    for i in program.instrs() {
        let comment = comment(i).map_or(String::new(), |words| format!("{COMMENT}{words}"));
        writeln!(f, "  {}{comment}", instr(program, i))?;
    }
    for (value, layout) in program.notes() {
        writeln!(f, "  note {} {{{layout}}}", value_name(program, *value))?;
    }
    for port in program.outputs() {
        let value = value_name(program, port.value);
        writeln!(f, "  return {} {value}", head(port))?;
    }
    writeln!(f, "}}")
}

/// The text before a comment at the end of a line.
pub(super) const COMMENT: &str = "  // ";
