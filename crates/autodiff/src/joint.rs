//! The joint graph: forward and backward in one program.

use std::collections::BTreeSet;

use phalanx_ir::ops::{Binary, BinaryKind};
use phalanx_ir::vjp::Vjp;
use phalanx_ir::{DType, IrError, Op, OpDef, Phase, Port, Program, Rewriter, Role, ValueId};

/// A forward program followed by its backward, instructions tagged F, B or W.
///
/// Besides the forward's own ports, it has a cotangent input for each boundary output, a cotangent
/// output for each differentiated boundary input, and a gradient output for each parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct Joint {
    /// The program.
    pub program: Program,
    /// For each instruction of the backward, the forward instruction whose gradient it is part of;
    /// none for forward instructions and for sums of gradients from several readers. A partitioner
    /// gives the gradient the layouts of its op. Passes that rewrite the program drop it.
    pub origins: Vec<Option<usize>>,
}

impl From<Program> for Joint {
    /// A joint graph that passes have rewritten: its origins are no longer known.
    fn from(program: Program) -> Self {
        let origins = vec![None; program.instrs().len()];
        Self { program, origins }
    }
}

/// Builds the joint graph of a segment's forward program. Parameter gradients have the element type
/// `grads`, in which they are accumulated.
///
/// The cotangent of a loss is one: its scale (1/valid tokens) is part of the forward.
pub fn joint(forward: &Program, grads: DType) -> Result<Joint, IrError> {
    joint_from(forward, grads, LossSeed::One)
}

/// What the cotangent of a loss is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LossSeed {
    /// One.
    #[default]
    One,
    /// The scalar `loss_scale`, so that all gradients are multiplied by it.
    Scale,
}

/// The same from another cotangent of losses.
pub fn joint_from(forward: &Program, grads: DType, seed: LossSeed) -> Result<Joint, IrError> {
    let mut reverse = Reverse::new(forward, grads);
    reverse.seed(forward, seed)?;
    for index in (0..forward.instrs().len()).rev() {
        reverse.step(forward, index)?;
    }
    reverse.outputs(forward);
    let program = assign_phases(&reverse.program, forward.instrs().len());
    let mut origins = reverse.origins;
    origins.resize(program.instrs().len(), None);
    Ok(Joint { program, origins })
}

/// The input that scales the loss.
const LOSS_SCALE: &str = "loss_scale";

impl Joint {
    /// How many inputs it has that the forward program has not: cotangents, and the scale of the loss. They
    /// follow the others.
    pub fn added_inputs(&self) -> usize {
        let added = |port: &&Port| port.role == Role::Cotangent || port.name == LOSS_SCALE;
        self.program.inputs().iter().filter(added).count()
    }
}

struct Reverse {
    program: Program,
    /// The gradient of each forward value, as far as it is known.
    gradients: Vec<Option<ValueId>>,
    /// The element type that the gradient of each value has, if it is needed at all.
    wanted: Vec<Option<DType>>,
    /// The forward instruction that each instruction so far is the gradient of.
    origins: Vec<Option<usize>>,
}

impl Reverse {
    fn new(forward: &Program, grads: DType) -> Self {
        let mut wanted = vec![None; forward.values().len()];
        for port in forward.inputs() {
            let dtype = forward.ty(port.value).dtype;
            wanted[port.value.index()] = match port.role {
                Role::Param => Some(grads),
                Role::Boundary if dtype.is_float() => Some(dtype),
                _ => None,
            };
        }
        for instr in forward.instrs() {
            if instr.inputs.iter().any(|v| wanted[v.index()].is_some()) {
                for &value in &instr.outputs {
                    let dtype = forward.ty(value).dtype;
                    wanted[value.index()] = dtype.is_float().then_some(dtype);
                }
            }
        }
        let gradients = vec![None; forward.values().len()];
        Self { program: forward.clone(), gradients, wanted, origins: Vec::new() }
    }

    /// Cotangents of the outputs: inputs of the joint program, and one for each loss.
    fn seed(&mut self, forward: &Program, from: LossSeed) -> Result<(), IrError> {
        let mut scale = None;
        for port in forward.outputs() {
            if self.wanted[port.value.index()].is_none() {
                continue;
            }
            let ty = forward.ty(port.value).clone();
            let seed = match port.role {
                Role::Boundary => self.program.cotangent_input(&port.name, ty),
                Role::Loss if ty.shape.is_empty() && from == LossSeed::One => {
                    self.program.constant(ty.dtype, &[], 1.0, Phase::B)?
                }
                Role::Loss if ty.shape.is_empty() => {
                    let program = &mut self.program;
                    let own = || program.input(LOSS_SCALE, Role::Scalar, ty);
                    *scale.get_or_insert_with(own)
                }
                Role::Loss => {
                    let what = format!("the loss is {ty}, but must be a single number; sum it");
                    return Err(IrError::operands("loss", what));
                }
                _ => continue,
            };
            self.accumulate(port.value, seed)?;
        }
        Ok(())
    }

    fn step(&mut self, forward: &Program, index: usize) -> Result<(), IrError> {
        let instr = &forward.instrs()[index];
        let cotangents: Vec<Option<ValueId>> =
            instr.outputs.iter().map(|v| self.gradients[v.index()]).collect();
        let wanted: Vec<Option<DType>> =
            instr.inputs.iter().map(|v| self.wanted[v.index()]).collect();
        if cotangents.iter().all(Option::is_none) || wanted.iter().all(Option::is_none) {
            return Ok(());
        }
        // Instructions since the last gradient are sums and seeds, which belong to no op.
        self.origins.resize(self.program.instrs().len(), None);
        let mut vjp = Vjp::new(&mut self.program, instr.clone(), cotangents, wanted.clone());
        instr.op.vjp(&mut vjp)?;
        let gradients = vjp.finish();
        self.origins.resize(self.program.instrs().len(), Some(index));
        for ((&operand, gradient), wanted) in instr.inputs.iter().zip(gradients).zip(wanted) {
            if let (Some(gradient), Some(_)) = (gradient, wanted) {
                self.accumulate(operand, gradient)?;
            }
        }
        Ok(())
    }

    fn accumulate(&mut self, value: ValueId, gradient: ValueId) -> Result<(), IrError> {
        let sum = match self.gradients[value.index()] {
            None => gradient,
            Some(old) => {
                let add = Op::Binary(Binary { kind: BinaryKind::Add });
                self.program.push(add, &[old, gradient], Phase::B)?[0]
            }
        };
        self.gradients[value.index()] = Some(sum);
        Ok(())
    }

    fn outputs(&mut self, forward: &Program) {
        for port in forward.inputs() {
            let Some(gradient) = self.gradients[port.value.index()] else {
                continue;
            };
            match port.role {
                Role::Boundary => self.program.cotangent_output(&port.name, gradient),
                Role::Param => self.program.output(&port.name, Role::Gradient, gradient),
                _ => {}
            }
        }
    }
}

/// B has all instructions that input cotangents depend on, and all backward instructions that read
/// a weight (or a value computed from weights alone) with everything these depend on; W is the
/// rest. So W reads no weights, also in segments without a differentiated input.
fn assign_phases(program: &Program, forward: usize) -> Program {
    let weights = made_of_weights(program);
    let mut in_b: BTreeSet<ValueId> =
        program.outputs_with(Role::Cotangent).map(|p| p.value).collect();
    let backward = &program.instrs()[forward..];
    let mut phases = vec![Phase::W; backward.len()];
    for (i, instr) in backward.iter().enumerate().rev() {
        let needed = instr.outputs.iter().any(|v| in_b.contains(v));
        let reads_weight = instr.inputs.iter().any(|v| weights.contains(v));
        if needed || reads_weight {
            phases[i] = Phase::B;
            in_b.extend(&instr.inputs);
        }
    }
    let mut rewriter = Rewriter::new(program);
    for index in 0..program.instrs().len() {
        let phase = if index < forward { Phase::F } else { phases[index - forward] };
        rewriter.keep_in(phase, index);
    }
    rewriter.finish()
}

/// The weights, and values computed only from weights and constants: a weight in another shape or
/// type.
fn made_of_weights(program: &Program) -> BTreeSet<ValueId> {
    let mut weights: BTreeSet<ValueId> =
        program.inputs_with(Role::Param).map(|p| p.value).collect();
    let mut constants: BTreeSet<ValueId> = BTreeSet::new();
    for instr in program.instrs() {
        let mut inputs = instr.inputs.iter();
        if inputs.clone().all(|v| constants.contains(v)) {
            constants.extend(&instr.outputs);
        } else if inputs.all(|v| constants.contains(v) || weights.contains(v)) {
            weights.extend(&instr.outputs);
        }
    }
    weights
}
