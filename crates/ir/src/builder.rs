//! Writing programs as ordinary tensor code.
//!
//! ```
//! use phalanx_ir::{Builder, DType};
//!
//! let b = Builder::new("regression", DType::F32);
//! let (x, y) = (b.data("x", DType::F32, [32, 10]), b.data("y", DType::F32, [32, 1]));
//! let (w, bias) = (b.param("w", [10, 1]), b.param("bias", [1]));
//! let error = x.matmul(w) + bias - y;
//! b.loss("loss", error.square().sum_all().scale(1.0 / 32.0));
//! let program = b.finish().unwrap();
//! assert_eq!(program.outputs().len(), 1);
//! ```
//!
//! Methods never fail at once: the first mistake is stored, with the op and the types, and
//! [`Builder::finish`] returns it. So model code needs no `?` on every line.

mod routing;
mod tensor;

use std::cell::RefCell;

use crate::dtype::DType;
use crate::error::IrError;
use crate::mesh::Mesh;
use crate::ops::{Concat, Op, OpDef};
use crate::program::{Phase, Program, Role, ValueId};
use crate::types::TensorType;

pub use tensor::Tensor;

/// Builds one program.
#[derive(Debug)]
pub struct Builder {
    state: RefCell<State>,
    compute: DType,
}

#[derive(Debug)]
struct State {
    program: Program,
    error: Option<IrError>,
    sites: u32,
}

impl Builder {
    /// A program for one device; parameters have the element type `compute`.
    pub fn new(name: &str, compute: DType) -> Self {
        Self::on(name, compute, Mesh::single())
    }

    /// A program on a mesh, whose inputs may carry layouts.
    pub fn on(name: &str, compute: DType, mesh: Mesh) -> Self {
        let state = State { program: Program::new(name, mesh), error: None, sites: 0 };
        Self { state: RefCell::new(state), compute }
    }

    /// The element type that parameters have and most values are computed in.
    pub fn compute(&self) -> DType {
        self.compute
    }

    /// An input with an explicit role and type; the methods below are shorter.
    pub fn input(&self, name: &str, role: Role, ty: TensorType) -> Tensor<'_> {
        let mut state = self.state.borrow_mut();
        let State { program, error, .. } = &mut *state;
        let id = match program.input_named(name) {
            None => program.input(name, role, ty),
            Some(port) => {
                let (value, known) = (port.value, program.ty(port.value));
                if port.role != role || *known != ty {
                    let (is, was) = (role.name(), port.role.name());
                    let what =
                        format!("`{name}` was declared as {was} {known}, and now as {is} {ty}");
                    error.get_or_insert(IrError::operands("input", what));
                }
                value
            }
        };
        Tensor { builder: self, id }
    }

    /// An input written as text: `b.typed("x", Role::Data, "f32[8,16]{0:dp}")`.
    pub fn typed(&self, name: &str, role: Role, ty: &str) -> Tensor<'_> {
        let parsed = TensorType::parse(ty, self.state.borrow().program.mesh());
        let ty = parsed.unwrap_or_else(|error| {
            self.fail(error);
            TensorType::new(self.compute, [])
        });
        self.input(name, role, ty)
    }

    /// A parameter.
    pub fn param<const N: usize>(&self, name: &str, shape: [usize; N]) -> Tensor<'_> {
        self.input(name, Role::Param, TensorType::new(self.compute, shape))
    }

    /// A boundary value that an earlier segment returns.
    pub fn boundary<const N: usize>(&self, name: &str, shape: [usize; N]) -> Tensor<'_> {
        self.input(name, Role::Boundary, TensorType::new(self.compute, shape))
    }

    /// Part of a batch.
    pub fn data<const N: usize>(&self, name: &str, dtype: DType, shape: [usize; N]) -> Tensor<'_> {
        self.input(name, Role::Data, TensorType::new(dtype, shape))
    }

    /// A scalar of the step, in the accumulator type of the compute type.
    pub fn scalar(&self, name: &str) -> Tensor<'_> {
        self.input(name, Role::Scalar, TensorType::new(self.compute.accumulator(), []))
    }

    /// The random key of this segment instance and micro-batch.
    pub fn key(&self) -> Tensor<'_> {
        self.input("key", Role::Random, TensorType::new(DType::I32, [5]))
    }

    /// A constant tensor.
    pub fn constant<const N: usize>(
        &self,
        dtype: DType,
        shape: [usize; N],
        value: f64,
    ) -> Tensor<'_> {
        let op = crate::ops::Fill { dtype, shape: shape.to_vec(), value };
        self.apply(op, &[])
    }

    /// Concatenates tensors along a dim.
    pub fn concat<'b>(&'b self, parts: &[Tensor<'b>], dim: usize) -> Tensor<'b> {
        self.apply(Concat { dim }, parts)
    }

    /// Returns a boundary value for later segments.
    pub fn output(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Boundary, value);
    }

    /// A term of the loss, already summed and scaled to a single number.
    pub fn loss(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Loss, value);
    }

    /// A value that can be read after a run, such as logits.
    pub fn probe(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Probe, value);
    }

    /// An output with an explicit role.
    pub fn port(&self, name: &str, role: Role, value: Tensor<'_>) {
        if self.owns(&[value], name) {
            self.state.borrow_mut().program.output(name, role, value.id);
        }
    }

    /// Applies any op and returns its first result.
    pub fn apply<'b>(&'b self, op: impl Into<Op>, inputs: &[Tensor<'b>]) -> Tensor<'b> {
        self.apply_all(op, inputs)[0]
    }

    /// Applies any op and returns all its results.
    pub fn apply_all<'b>(&'b self, op: impl Into<Op>, inputs: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let op = op.into();
        let ids: Vec<ValueId> = inputs.iter().map(|t| t.id).collect();
        let owned = self.owns(inputs, op.name());
        let mut state = self.state.borrow_mut();
        if owned && state.error.is_none() {
            match state.program.push(op, &ids, Phase::F) {
                Ok(results) => {
                    return results.into_iter().map(|id| Tensor { builder: self, id }).collect();
                }
                Err(error) => state.error = Some(error),
            }
        }
        drop(state);
        vec![self.placeholder(inputs.first().copied()); 4]
    }

    /// The program, or the first mistake made while building it.
    pub fn finish(self) -> Result<Program, IrError> {
        let state = self.state.into_inner();
        match state.error {
            Some(error) => Err(error),
            None => {
                crate::verify::verify(&state.program)?;
                Ok(state.program.canonical())
            }
        }
    }

    /// A placeholder result after a mistake; `finish` reports the first mistake. It has the type of
    /// the first operand, so that code that looks at shapes reaches `finish`.
    fn placeholder(&self, like: Option<Tensor<'_>>) -> Tensor<'_> {
        let ty = like.map_or_else(|| TensorType::new(self.compute, []), Tensor::ty);
        let id = self.state.borrow_mut().program.input("placeholder", Role::Probe, ty);
        Tensor { builder: self, id }
    }

    /// Whether all these tensors belong to this program; if not, records a mistake.
    fn owns(&self, tensors: &[Tensor<'_>], whose: &str) -> bool {
        let foreign = tensors.iter().position(|t| !std::ptr::eq(t.builder, self));
        if let Some(i) = foreign {
            let other = tensors[i].builder.state.borrow().program.name.clone();
            let ty = tensors[i].ty();
            let own = self.state.borrow().program.name.clone();
            let what = format!("operand {i} ({ty}) is a value of program {other}, not of {own}");
            self.fail(IrError::operands(whose, what));
        }
        foreign.is_none()
    }

    fn fail(&self, error: IrError) {
        self.state.borrow_mut().error.get_or_insert(error);
    }

    fn site(&self) -> u32 {
        let mut state = self.state.borrow_mut();
        state.sites += 1;
        state.sites
    }
}
