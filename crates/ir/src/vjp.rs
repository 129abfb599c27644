//! What an op sees when its gradient is computed.

use crate::dtype::DType;
use crate::error::IrError;
use crate::ops::{Binary, BinaryKind, Cast, Op, Reduce, ReduceKind};
use crate::program::{Instr, Phase, Program, ValueId};
use crate::types::TensorType;

/// The state of one instruction's gradient: cotangents of its results in, gradients of its
/// operands out, and the joint program that new instructions are appended to.
pub struct Vjp<'a> {
    program: &'a mut Program,
    instr: Instr,
    cotangents: Vec<Option<ValueId>>,
    wanted: Vec<Option<DType>>,
    gradients: Vec<Option<ValueId>>,
}

impl<'a> Vjp<'a> {
    /// `wanted[i]` is the element type of operand `i`'s gradient, if it is needed.
    pub fn new(
        program: &'a mut Program,
        instr: Instr,
        cotangents: Vec<Option<ValueId>>,
        wanted: Vec<Option<DType>>,
    ) -> Self {
        let gradients = vec![None; instr.inputs.len()];
        Self { program, instr, cotangents, wanted, gradients }
    }

    /// Operand `i` of the differentiated instruction.
    pub fn input(&self, i: usize) -> ValueId {
        self.instr.inputs[i]
    }

    /// How many operands it has.
    pub fn inputs(&self) -> usize {
        self.instr.inputs.len()
    }

    /// Result `i` of the differentiated instruction.
    pub fn output(&self, i: usize) -> ValueId {
        self.instr.outputs[i]
    }

    /// The cotangent of result `i`; gradients of results that nothing used are absent.
    pub fn cotangent(&self, i: usize) -> Option<ValueId> {
        self.cotangents[i]
    }

    /// The cotangent of the first result, where the others are statistics that carry none: a
    /// gradient through a statistic would be lost, and is refused.
    pub fn dy(&self) -> Result<ValueId, IrError> {
        if let Some(extra) = (1..self.cotangents.len()).find(|&i| self.cotangents[i].is_some()) {
            let help = format!("its result {extra} is a statistic and carries no gradient");
            return Err(self.refuse(0, &help));
        }
        self.cotangents[0].ok_or_else(|| self.refuse(0, "only its statistics were used"))
    }

    /// Whether the gradient of operand `i` is needed.
    pub fn wants(&self, i: usize) -> bool {
        self.wanted[i].is_some()
    }

    /// The element type in which operand `i`'s gradient is needed (its own, or the type that
    /// gradients accumulate in if it is a parameter).
    pub fn dtype(&self, i: usize) -> DType {
        self.wanted[i].unwrap_or(self.ty(self.input(i)).dtype)
    }

    /// The type of a value.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        self.program.ty(value)
    }

    /// Appends an instruction to the backward and returns its first result.
    pub fn emit(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<ValueId, IrError> {
        Ok(self.program.push(op.into(), inputs, Phase::B)?[0])
    }

    /// A constant of the shape and element type of `like`.
    pub fn constant_like(&mut self, like: ValueId, value: f64) -> Result<ValueId, IrError> {
        let ty = self.ty(like).clone();
        self.program.constant(ty.dtype, &ty.shape, value, Phase::B)
    }

    /// The gradient of operand `i`, if it is needed, is the first result of a new instruction.
    pub fn set_to(
        &mut self,
        i: usize,
        op: impl Into<Op>,
        inputs: &[ValueId],
    ) -> Result<(), IrError> {
        if !self.wants(i) {
            return Ok(());
        }
        let value = self.emit(op, inputs)?;
        self.set(i, value)
    }

    /// The gradients of the first operands are the results of a new instruction, in order.
    pub fn set_all_to(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<(), IrError> {
        let results = self.program.push(op.into(), inputs, Phase::B)?;
        results.into_iter().enumerate().try_for_each(|(i, value)| self.set(i, value))
    }

    /// The gradient of operand `i`, if it is needed, is `value`, summed over the leading dims that
    /// the operand was repeated along and cast to the element type that is wanted.
    pub fn set(&mut self, i: usize, value: ValueId) -> Result<(), IrError> {
        let Some(wanted) = self.wanted[i] else {
            return Ok(());
        };
        let rank = self.ty(self.input(i)).shape.len();
        let extra = self.ty(value).shape.len() - rank;
        let mut value = value;
        if extra > 0 {
            let dims = (0..extra).collect();
            value = self.emit(Reduce { kind: ReduceKind::Sum, dims, out: wanted }, &[value])?;
        }
        if self.ty(value).dtype != wanted {
            value = self.emit(Cast { to: wanted }, &[value])?;
        }
        self.gradients[i] = Some(match self.gradients[i] {
            None => value,
            Some(old) => self.emit(Binary { kind: BinaryKind::Add }, &[old, value])?,
        });
        Ok(())
    }

    /// The gradients that were set, by operand.
    pub fn finish(self) -> Vec<Option<ValueId>> {
        self.gradients
    }

    /// The error for an operand that has no gradient.
    pub fn refuse(&self, operand: usize, help: &str) -> IrError {
        use crate::ops::OpDef;
        let op = self.instr.op.name().to_owned();
        IrError::NoGradient { op, operand, help: help.to_owned() }
    }
}
