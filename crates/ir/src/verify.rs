//! The verifier: a program whose layouts would lose, double or forget a reduction is refused.
//!
//! It runs when programs are built and again when they are finished, after the last transformation;
//! tests run it after each of them.
//! Its errors name the instruction, the axis, both types and the usual fix.

use std::fmt;

use crate::error::IrError;
use crate::mesh::Axis;
use crate::ops::{CollectiveKind, Op, OpDef};
use crate::program::{Instr, Program, Role, ValueId};
use crate::refusal::{Case, RuleError, reduce_first};
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
        check_type(program, port.value)?;
    }
    for instr in program.instrs() {
        if let Some(value) = instr.inputs.iter().find(|v| !defined[v.index()]) {
            let what =
                format!("{}: operand %{} is used before it is computed", instr.op.name(), value.0);
            return Err(Box::new(error(program, instr, None, what, vec![])));
        }
        check_forms(program, instr)?;
        check_shapes(program, instr)?;
        check_layouts(program, instr)?;
        for &value in &instr.outputs {
            check_type(program, value)?;
            defined[value.index()] = true;
        }
    }
    check_handles(program)?;
    check_outputs(program)
}

/// Checks that the layout of a value is possible for its shape.
fn check_type(program: &Program, value: ValueId) -> Result<(), Box<VerifyError>> {
    let Err(reason) = program.ty(value).check(program.mesh()) else { return Ok(()) };
    let axis = match &reason {
        IrError::TypeLayout { axis, .. } => Some(*axis),
        _ => None,
    };
    let made = program.instrs().iter().find(|i| i.outputs.contains(&value));
    Err(Box::new(VerifyError {
        program: program.name.clone(),
        axis,
        what: format!("{}: {reason}", text::value_name(program, value)),
        context: made.map(|i| text::instr(program, i)).into_iter().collect(),
        help: vec![format!("the mesh is: {}", program.mesh())],
    }))
}

/// What other programs read must be complete: scripts do not reduce it. Gradients and losses may be
/// partial, because scripts sum them; so may probes, and values that are kept for a later phase of
/// the same program.
fn check_outputs(program: &Program) -> Result<(), Box<VerifyError>> {
    for port in program.outputs() {
        let partial = program.ty(port.value).layout.partial();
        let complete = matches!(port.role, Role::Boundary | Role::Cotangent);
        let (true, Some(&axis)) = (complete, partial.first()) else { continue };
        let made = program.instrs().iter().find(|i| i.outputs.contains(&port.value));
        let axes: Vec<Axis> = partial.iter().copied().collect();
        return Err(Box::new(VerifyError {
            program: program.name.clone(),
            axis: Some(axis),
            what: format!(
                "{} output {} is a partial sum over `{axis}`: {}",
                port.role.name(),
                port.name,
                program.ty(port.value)
            ),
            context: made.map(|i| text::instr(program, i)).into_iter().collect(),
            help: vec![
                "a reader would take the summand of one rank for the whole value".to_owned(),
                reduce_first(&text::value_name(program, port.value), &axes),
            ],
        }));
    }
    Ok(())
}

fn check_forms(program: &Program, instr: &Instr) -> Result<(), Box<VerifyError>> {
    let done = matches!(&instr.op, Op::Collective(c) if c.kind == CollectiveKind::Done);
    for &value in &instr.inputs {
        let ty = program.ty(value);
        let (what, help) = match ty.form {
            _ if ty.pending && !done => (
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
    // What a collective does to a shape depends on the mesh: its whole type is checked with its layout.
    if let (Op::Collective(_), [_] | [_, _]) = (&instr.op, &instr.inputs[..]) {
        return Ok(());
    }
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
        let operands: Vec<&TensorType> = instr.inputs.iter().map(|&v| program.ty(v)).collect();
        let declared = program.ty(instr.outputs[0]);
        let axis = collective.axes.first().copied();
        return match collective.result_of(&operands, program.mesh()) {
            Ok(result) if result == *declared => Ok(()),
            Ok(result) => {
                let what = format!("{}: the result is {result}, not {declared}", instr.op.name());
                Err(Box::new(error(program, instr, axis, what, vec![])))
            }
            Err(reason) => Err(Box::new(error(program, instr, axis, reason.to_string(), vec![]))),
        };
    }
    let types =
        |ids: &[ValueId]| -> Vec<&TensorType> { ids.iter().map(|&v| program.ty(v)).collect() };
    let (inputs, outputs) = (types(&instr.inputs), types(&instr.outputs));
    match program.rule(instr).check(program.mesh(), &inputs, &outputs) {
        Ok(_) => Ok(()),
        Err(reason) => {
            Err(Box::new(explain(program, &instr.op, &instr.inputs, &instr.outputs, &reason)))
        }
    }
}

/// A started collective is waited for exactly once.
fn check_handles(program: &Program) -> Result<(), Box<VerifyError>> {
    for instr in program.instrs() {
        for &handle in &instr.outputs {
            if !program.ty(handle).pending {
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

/// Turns a rule's error into a diagnostic about an instruction.
pub(crate) fn explain(
    program: &Program,
    op: &Op,
    inputs: &[ValueId],
    outputs: &[ValueId],
    reason: &RuleError,
) -> VerifyError {
    let operands =
        (inputs.iter()).map(|&v| (text::value_name(program, v), &program.ty(v).layout)).collect();
    let case = Case { op, mesh: program.mesh(), operands };
    VerifyError {
        program: program.name.clone(),
        axis: reason.axis(),
        what: reason.what(&case),
        context: context(program, op, inputs, outputs),
        help: reason.help(&case),
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
