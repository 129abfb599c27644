//! The verifier: a program whose layouts would lose, double or forget a reduction is refused.
//!
//! It runs when programs are built and, in tests and under `verify`, after every transformation.
//! Its errors name the instruction, the axis, both types and the usual fix.

use std::fmt;

use crate::layout::Layout;
use crate::mesh::Axis;
use crate::ops::{CollectiveKind, Op, OpDef};
use crate::program::{Instr, Program, ValueId};
use crate::rule::RuleError;
use crate::text;
use crate::types::{Form, TensorType};

/// An instruction that does not type-check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyError {
    /// The program's name.
    pub program: String,
    /// The mesh axis concerned, where one is.
    pub axis: Option<Axis>,
    /// What is wrong, in one sentence.
    pub what: String,
    /// The instruction, and the instructions that made its operands, as text.
    pub context: Vec<String>,
    /// Why it matters, and what to do instead.
    pub help: Vec<String>,
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        for line in &self.context {
            writeln!(f, "   {line}")?;
        }
        for (i, line) in self.help.iter().enumerate() {
            write!(f, "{}  {line}", if i > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}

impl std::error::Error for VerifyError {}

/// Checks a whole program.
pub fn verify(program: &Program) -> Result<(), Box<VerifyError>> {
    let mut defined = vec![false; program.values().len()];
    for port in program.inputs() {
        defined[port.value.index()] = true;
        known_axes(program, port.value)?;
    }
    for instr in program.instrs() {
        if let Some(value) = instr.inputs.iter().find(|v| !defined[v.index()]) {
            let what =
                format!("{}: operand %{} is used before it is made", instr.op.name(), value.0);
            return Err(Box::new(error(program, instr, None, what, vec![])));
        }
        check_forms(program, instr)?;
        check_shapes(program, instr)?;
        check_layouts(program, instr)?;
        for value in &instr.outputs {
            defined[value.index()] = true;
        }
    }
    check_handles(program)
}

fn known_axes(program: &Program, value: ValueId) -> Result<(), Box<VerifyError>> {
    let layout = &program.ty(value).layout;
    let axes = layout.dims().iter().flat_map(|d| &d.axes).chain(layout.partial());
    match axes.copied().find(|&a| program.mesh().size(a).is_none()) {
        None => Ok(()),
        Some(axis) => Err(Box::new(VerifyError {
            program: program.name.clone(),
            axis: Some(axis),
            what: format!("input {}: the mesh has no axis `{axis}`", program.ty(value)),
            context: vec![],
            help: vec![format!("the mesh is: {}", program.mesh())],
        })),
    }
}

fn check_forms(program: &Program, instr: &Instr) -> Result<(), Box<VerifyError>> {
    let done = matches!(&instr.op, Op::Collective(c) if c.kind == CollectiveKind::Done);
    for &value in &instr.inputs {
        let ty = program.ty(value);
        let (what, help) = match ty.form {
            Form::Pending if !done => (
                format!("{}: operand {ty} is a collective that is still running", instr.op.name()),
                "wait for it with done first",
            ),
            Form::Unit if !instr.op.accepts_units() => (
                format!("{}: operand {ty} is a packed unit", instr.op.name()),
                "only elementwise ops, updates and collectives read units; read the parameters \
                 that it packs instead",
            ),
            _ => continue,
        };
        return Err(Box::new(error(program, instr, None, what, vec![help.to_owned()])));
    }
    Ok(())
}

fn check_shapes(program: &Program, instr: &Instr) -> Result<(), Box<VerifyError>> {
    let types: Vec<&TensorType> = instr.inputs.iter().map(|&v| program.ty(v)).collect();
    let shaped = match instr.op.infer(&types) {
        Ok(shaped) => shaped,
        Err(what) => {
            let what = format!("{}: {what}", instr.op.name());
            return Err(Box::new(error(program, instr, None, what, vec![])));
        }
    };
    let declared: Vec<_> = (instr.outputs.iter())
        .map(|&v| (program.ty(v).dtype, program.ty(v).shape.clone()))
        .collect();
    if shaped != declared {
        let what = format!("{}: the results are {shaped:?}, not {declared:?}", instr.op.name());
        return Err(Box::new(error(program, instr, None, what, vec![])));
    }
    Ok(())
}

fn check_layouts(program: &Program, instr: &Instr) -> Result<(), Box<VerifyError>> {
    if let Op::Collective(collective) = &instr.op {
        let (operand, declared) = (program.ty(instr.inputs[0]), program.ty(instr.outputs[0]));
        let axis = collective.axes.first().copied();
        return match collective.result(operand, program.mesh()) {
            Ok(result) if result == *declared => Ok(()),
            Ok(result) => {
                let what = format!("{}: the result is {result}, not {declared}", instr.op.name());
                Err(Box::new(error(program, instr, axis, what, vec![])))
            }
            Err(reason) => Err(Box::new(error(program, instr, axis, reason.to_string(), vec![]))),
        };
    }
    let shapes = |ids: &[ValueId]| -> Vec<&[usize]> {
        ids.iter().map(|&v| program.ty(v).shape.as_slice()).collect()
    };
    let layouts =
        |ids: &[ValueId]| -> Vec<&Layout> { ids.iter().map(|&v| &program.ty(v).layout).collect() };
    let rule = instr.op.rule(&shapes(&instr.inputs), &shapes(&instr.outputs));
    match rule.check(program.mesh(), &layouts(&instr.inputs), &layouts(&instr.outputs)) {
        Ok(_) => Ok(()),
        Err(reason) => {
            Err(Box::new(explain(program, &instr.op, &instr.inputs, &instr.outputs, reason)))
        }
    }
}

/// A started collective is waited for exactly once.
fn check_handles(program: &Program) -> Result<(), Box<VerifyError>> {
    for instr in program.instrs() {
        for &handle in &instr.outputs {
            if program.ty(handle).form != Form::Pending {
                continue;
            }
            let uses = program.instrs().iter().flat_map(|i| &i.inputs);
            let count = uses.filter(|&&v| v == handle).count();
            if count != 1 {
                let what = format!("{}: its handle is waited for {count} times", instr.op.name());
                let help = "every start needs exactly one done".to_owned();
                return Err(Box::new(error(program, instr, None, what, vec![help])));
            }
        }
    }
    Ok(())
}

/// Turns a rule's refusal into an error about an instruction.
pub(crate) fn explain(
    program: &Program,
    op: &Op,
    inputs: &[ValueId],
    outputs: &[ValueId],
    reason: RuleError,
) -> VerifyError {
    let name = op.name();
    let (axis, what, help) = match &reason {
        RuleError::NotLinear { axis, partial, groups, operands } => {
            let others = (0..*operands).find(|i| !partial.contains(i));
            let what = match others {
                Some(other) if groups.iter().any(|g| g.contains(&other)) => format!(
                    "{name}: operand {} is a partial sum over `{axis}`, operand {other} is {} \
                     over `{axis}`",
                    partial[0],
                    program.ty(inputs[other]).layout.role(*axis)
                ),
                _ if partial.len() > 1 => {
                    format!("{name}: operands {partial:?} are all partial sums over `{axis}`")
                }
                _ => format!("{name}: operand {} is a partial sum over `{axis}`", partial[0]),
            };
            (Some(*axis), what, partial_help(program, name, *axis, inputs, partial, groups))
        }
        RuleError::PartialAndSharded { axis, operand, factor } => (
            Some(*axis),
            format!(
                "{name}: operand {operand} is a partial sum over `{axis}`, which also shards \
                 factor `{factor}`"
            ),
            vec![format!("usual fix: reduce operand {operand} over `{axis}` first")],
        ),
        RuleError::TwoFactors { axis, first, second } => (
            Some(*axis),
            format!("{name}: axis `{axis}` shards two factors, `{first}` and `{second}`"),
            vec![
                "each rank would compute only the diagonal blocks of the result".to_owned(),
                format!("usual fix: gather one operand over `{axis}` first"),
            ],
        ),
        RuleError::Disagree { factor, first, second } => (
            None,
            format!("{name}: operands {first} and {second} shard factor `{factor}` differently"),
            vec![
                "usual fix: bring one operand into the layout of the other (all_gather, shard \
                  or all_to_all)"
                    .to_owned(),
            ],
        ),
        RuleError::Whole { axis, factor } => (
            Some(*axis),
            format!(
                "{name}: factor `{factor}` is sharded by `{axis}`, but its kernel needs all of it"
            ),
            vec![format!("usual fix: gather it over `{axis}` first")],
        ),
        RuleError::Straddle { axis, operand, factor, left, size } => (
            Some(*axis),
            format!(
                "{name}: axis `{axis}` ({size} ranks) of operand {operand} covers the last {left} \
                 of factor `{factor}` and part of the next"
            ),
            vec![format!("usual fix: split `{axis}` as {left} × {}", size / left)],
        ),
        RuleError::Uneven { axis, operand, factor, left, size } => (
            Some(*axis),
            format!(
                "{name}: axis `{axis}` ({size} ranks) of operand {operand} does not divide the \
                 {left} of factor `{factor}`"
            ),
            vec!["only the major factor of a compound dim may be padded".to_owned()],
        ),
        RuleError::Addend { operand, expected } => (
            None,
            format!("{name}: operand {operand} is added to the result and must lie as {expected}"),
            vec!["usual fix: reduce the product before adding, or reshard the addend".to_owned()],
        ),
        RuleError::Result { index, expected } => (
            None,
            format!("{name}: result {index} has the layout {expected}"),
            vec!["usual fix: add the collective that gives the declared layout".to_owned()],
        ),
        RuleError::UnknownAxis { axis } => (
            Some(*axis),
            format!("{name}: the mesh has no axis `{axis}`"),
            vec![format!("the mesh is: {}", program.mesh())],
        ),
    };
    VerifyError {
        program: program.name.clone(),
        axis,
        what,
        context: context(program, op, inputs, outputs),
        help,
    }
}

fn partial_help(
    program: &Program,
    name: &str,
    axis: Axis,
    inputs: &[ValueId],
    partial: &[usize],
    groups: &[Vec<usize>],
) -> Vec<String> {
    let ranks = program.mesh().size(axis).unwrap_or(1);
    let value = text::value_name(program, inputs[partial[0]]);
    let reduce =
        format!("usual fix: reduce {value} first (all_reduce<{axis}> or reduce_scatter<{axis}>)");
    match name {
        "add" | "sub" => vec![
            format!(
                "adding a replicated value to a partial sum would count it {ranks} times \
                 ({axis} = {ranks})"
            ),
            format!("{reduce}, or add the other operand on coordinate 0 only (to_partial<{axis}>)"),
        ],
        "adamw" | "sgd" => vec![
            format!("each of the {ranks} ranks would update with its own share of the gradient"),
            reduce,
        ],
        _ if groups.is_empty() => {
            vec![format!("{name} of a sum is not the sum of {name}"), reduce]
        }
        _ => vec![
            format!("a product of two partial sums over `{axis}` holds cross terms of no rank"),
            reduce,
        ],
    }
}

fn error(
    program: &Program,
    instr: &Instr,
    axis: Option<Axis>,
    what: String,
    help: Vec<String>,
) -> VerifyError {
    let context = context(program, &instr.op, &instr.inputs, &instr.outputs);
    VerifyError { program: program.name.clone(), axis, what, context, help }
}

/// The instructions that made the operands, then the instruction with its operands' types.
fn context(program: &Program, op: &Op, inputs: &[ValueId], outputs: &[ValueId]) -> Vec<String> {
    let made = |v: &ValueId| program.instrs().iter().find(|i| i.outputs.contains(v));
    let mut lines: Vec<String> =
        inputs.iter().filter_map(made).map(|i| text::instr(program, i)).collect();
    lines.dedup();
    let mut line = text::call(program, op, inputs);
    if !outputs.is_empty() {
        let names: Vec<String> = outputs.iter().map(|&v| text::value_name(program, v)).collect();
        line = format!("{} = {line}", names.join(", "));
    }
    let operands: Vec<String> = (inputs.iter())
        .map(|&v| format!("{} is {}", text::value_name(program, v), program.ty(v)))
        .collect();
    lines.push(format!("{line} : {}", operands.join(", ")));
    lines
}
