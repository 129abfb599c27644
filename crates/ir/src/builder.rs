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
//! Methods never fail where they stand: the first mistake is kept, with the op and the types, and
//! [`Builder::finish`] returns it. So model code has no `?` on every line.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Sub};

use crate::dtype::DType;
use crate::error::IrError;
use crate::mesh::Mesh;
use crate::ops::{
    Attention, AttentionKind, Binary, BinaryKind, Broadcast, Cast, Compare, CompareKind, Concat,
    CrossEntropy, Dropout, Embedding, LayerNorm, Matmul, Op, Reduce, ReduceKind, Reshape, RmsNorm,
    Rotary, Scale, Select, Shift, Slice, Softmax, Spec, Transpose, Unary, UnaryKind,
};
use crate::program::{Phase, Program, Role, ValueId};
use crate::types::TensorType;

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

/// A value of the program being built: a handle, free to copy.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'b> {
    builder: &'b Builder,
    id: ValueId,
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
        let found = state.program.input_named(name).map(|p| p.value);
        let id = found.unwrap_or_else(|| state.program.input(name, role, ty));
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

    /// A value that an earlier segment gives.
    pub fn boundary<const N: usize>(&self, name: &str, shape: [usize; N]) -> Tensor<'_> {
        self.input(name, Role::Boundary, TensorType::new(self.compute, shape))
    }

    /// Part of a batch.
    pub fn data<const N: usize>(&self, name: &str, dtype: DType, shape: [usize; N]) -> Tensor<'_> {
        self.input(name, Role::Data, TensorType::new(dtype, shape))
    }

    /// A number of the step, in the accumulator type of the compute type.
    pub fn scalar(&self, name: &str) -> Tensor<'_> {
        self.input(name, Role::Scalar, TensorType::new(self.compute.accumulator(), []))
    }

    /// The random key of this segment instance and micro-batch.
    pub fn key(&self) -> Tensor<'_> {
        self.input("key", Role::Scalar, TensorType::new(DType::I32, [5]))
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

    /// Tensors one after the other along a dim.
    pub fn concat<'b>(&'b self, parts: &[Tensor<'b>], dim: usize) -> Tensor<'b> {
        self.apply(Concat { dim }, parts)
    }

    /// Gives a boundary value to later segments.
    pub fn output(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Boundary, value);
    }

    /// A term of the loss, already summed and scaled to a single number.
    pub fn loss(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Loss, value);
    }

    /// Something to look at, such as logits.
    pub fn probe(&self, name: &str, value: Tensor<'_>) {
        self.port(name, Role::Probe, value);
    }

    /// An output with an explicit role.
    pub fn port(&self, name: &str, role: Role, value: Tensor<'_>) {
        self.state.borrow_mut().program.output(name, role, value.id);
    }

    /// Applies any op and returns its first result.
    pub fn apply<'b>(&'b self, op: impl Into<Op>, inputs: &[Tensor<'b>]) -> Tensor<'b> {
        self.apply_all(op, inputs)[0]
    }

    /// Applies any op and returns all its results.
    pub fn apply_all<'b>(&'b self, op: impl Into<Op>, inputs: &[Tensor<'b>]) -> Vec<Tensor<'b>> {
        let ids: Vec<ValueId> = inputs.iter().map(|t| t.id).collect();
        let mut state = self.state.borrow_mut();
        if state.error.is_none() {
            match state.program.push(op.into(), &ids, Phase::F) {
                Ok(results) => {
                    return results.into_iter().map(|id| Tensor { builder: self, id }).collect();
                }
                Err(error) => state.error = Some(error),
            }
        }
        // After a mistake every result is a placeholder; `finish` reports the first mistake.
        drop(state);
        vec![self.placeholder(); 4]
    }

    /// The program, or the first mistake made while writing it.
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

    fn placeholder(&self) -> Tensor<'_> {
        let mut state = self.state.borrow_mut();
        let ty = TensorType::new(self.compute, []);
        let id = state.program.input("placeholder", Role::Probe, ty);
        Tensor { builder: self, id }
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

impl<'b> Tensor<'b> {
    /// The value's number in the program.
    pub fn id(self) -> ValueId {
        self.id
    }

    /// The global shape.
    pub fn shape(self) -> Vec<usize> {
        self.ty().shape
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.ty().dtype
    }

    /// The type.
    pub fn ty(self) -> TensorType {
        self.builder.state.borrow().program.ty(self.id).clone()
    }

    /// Projection of the last dim: `[…, d] · [d, e]`.
    pub fn matmul(self, w: Tensor<'b>) -> Tensor<'b> {
        let letters = leading(self.shape().len().saturating_sub(1));
        self.einsum(w, &format!("{letters}y,yz->{letters}z"))
    }

    /// Projection by a transposed matrix: `[…, d] · [e, d]ᵀ`.
    pub fn matmul_transposed(self, w: Tensor<'b>) -> Tensor<'b> {
        let letters = leading(self.shape().len().saturating_sub(1));
        self.einsum(w, &format!("{letters}y,zy->{letters}z"))
    }

    /// Any product of two tensors, by letters: `q.einsum(k, "bshd,bthd->bhst")`.
    pub fn einsum(self, other: Tensor<'b>, spec: &str) -> Tensor<'b> {
        match spec.parse::<Spec>() {
            Ok(spec) => {
                let op = Matmul { spec, out: self.dtype(), add: false };
                self.builder.apply(op, &[self, other])
            }
            Err(what) => {
                self.builder.fail(IrError::operands("matmul", what));
                self
            }
        }
    }

    /// Root-mean-square norm over the last dim.
    pub fn rms_norm(self, gain: Tensor<'b>, eps: f64) -> Tensor<'b> {
        self.builder.apply(RmsNorm { eps }, &[self, gain])
    }

    /// Layer norm over the last dim.
    pub fn layer_norm(self, gain: Tensor<'b>, bias: Tensor<'b>, eps: f64) -> Tensor<'b> {
        self.builder.apply(LayerNorm { eps }, &[self, gain, bias])
    }

    /// Rotary position embedding of `[batch, sequence, heads, size]`.
    pub fn rotary(self, rotary: Rotary) -> Tensor<'b> {
        self.builder.apply(rotary, &[self])
    }

    /// Causal attention of queries `self` to keys and values, with optional dropout.
    pub fn attention(
        self,
        k: Tensor<'b>,
        v: Tensor<'b>,
        kind: AttentionKind,
        dropout: f64,
    ) -> Tensor<'b> {
        let op = Attention { kind, causal: true, dropout, site: self.builder.site() };
        let mut operands = vec![self, k, v];
        if op.drops() {
            operands.push(self.builder.key());
        }
        self.builder.apply(op, &operands)
    }

    /// Rows of this table.
    pub fn embedding(self, ids: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(Embedding, &[self, ids])
    }

    /// −log p(target) of each row of logits; zero where the target is negative.
    pub fn cross_entropy(self, targets: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(CrossEntropy, &[self, targets])
    }

    /// The sum of squared differences; scale it to make a mean.
    pub fn squared_error(self, target: Tensor<'b>) -> Tensor<'b> {
        (self - target).square().sum_all()
    }

    /// Zeroes elements with probability `p`; nothing at all if `p` is 0.
    pub fn dropout(self, p: f64) -> Tensor<'b> {
        if p == 0.0 {
            return self;
        }
        let op = Dropout { p, site: self.builder.site() };
        self.builder.apply(op, &[self, self.builder.key()])
    }

    /// Softmax over the last dim.
    pub fn softmax(self) -> Tensor<'b> {
        self.builder.apply(Softmax, &[self])
    }

    /// A function of one argument.
    pub fn unary(self, kind: UnaryKind) -> Tensor<'b> {
        self.builder.apply(Unary { kind }, &[self])
    }

    /// GELU, by its tanh approximation.
    pub fn gelu(self) -> Tensor<'b> {
        self.unary(UnaryKind::Gelu)
    }

    /// SiLU.
    pub fn silu(self) -> Tensor<'b> {
        self.unary(UnaryKind::Silu)
    }

    /// max(x, 0).
    pub fn relu(self) -> Tensor<'b> {
        self.unary(UnaryKind::Relu)
    }

    /// Hyperbolic tangent.
    pub fn tanh(self) -> Tensor<'b> {
        self.unary(UnaryKind::Tanh)
    }

    /// The square.
    pub fn square(self) -> Tensor<'b> {
        self.unary(UnaryKind::Square)
    }

    /// Multiplication by a constant.
    pub fn scale(self, by: f64) -> Tensor<'b> {
        self.builder.apply(Scale { by }, &[self])
    }

    /// Addition of a constant.
    pub fn shift(self, by: f64) -> Tensor<'b> {
        self.builder.apply(Shift { by }, &[self])
    }

    /// Conversion to another element type.
    pub fn cast(self, to: DType) -> Tensor<'b> {
        if self.dtype() == to { self } else { self.builder.apply(Cast { to }, &[self]) }
    }

    /// The elementwise maximum.
    pub fn max(self, other: Tensor<'b>) -> Tensor<'b> {
        self.binary(BinaryKind::Max, other)
    }

    /// The elementwise minimum.
    pub fn min(self, other: Tensor<'b>) -> Tensor<'b> {
        self.binary(BinaryKind::Min, other)
    }

    /// An elementwise comparison.
    pub fn compare(self, kind: CompareKind, other: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(Compare { kind }, &[self, other])
    }

    /// This condition's choice between two tensors.
    pub fn select(self, yes: Tensor<'b>, no: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(Select, &[self, yes, no])
    }

    /// The sum over some dims, in the accumulator type.
    pub fn sum(self, dims: &[usize]) -> Tensor<'b> {
        let out = self.dtype().accumulator();
        let op = Reduce { kind: ReduceKind::Sum, dims: dims.to_vec(), out };
        self.builder.apply(op, &[self])
    }

    /// The sum of all elements, in the accumulator type.
    pub fn sum_all(self) -> Tensor<'b> {
        let dims: Vec<usize> = (0..self.shape().len()).collect();
        self.sum(&dims)
    }

    /// The maximum over some dims.
    pub fn max_over(self, dims: &[usize]) -> Tensor<'b> {
        let op = Reduce { kind: ReduceKind::Max, dims: dims.to_vec(), out: self.dtype() };
        self.builder.apply(op, &[self])
    }

    /// Repetition along new dims of the result's shape.
    pub fn broadcast<const N: usize>(self, shape: [usize; N], dims: &[usize]) -> Tensor<'b> {
        self.builder.apply(Broadcast { shape: shape.to_vec(), dims: dims.to_vec() }, &[self])
    }

    /// Another shape of as many elements.
    pub fn reshape<const N: usize>(self, shape: [usize; N]) -> Tensor<'b> {
        self.builder.apply(Reshape { shape: shape.to_vec() }, &[self])
    }

    /// Result dim `i` is this tensor's dim `perm[i]`.
    pub fn transpose(self, perm: &[usize]) -> Tensor<'b> {
        self.builder.apply(Transpose { perm: perm.to_vec() }, &[self])
    }

    /// `len` elements of a dim from `start`.
    pub fn slice(self, dim: usize, start: usize, len: usize) -> Tensor<'b> {
        self.builder.apply(Slice { dim, start, len }, &[self])
    }

    fn binary(self, kind: BinaryKind, other: Tensor<'b>) -> Tensor<'b> {
        // Repetition is along leading dims of the second operand, so the larger one goes first
        // where the order does not matter.
        let commutes = !matches!(kind, BinaryKind::Sub | BinaryKind::Div);
        let swap = commutes && self.shape().len() < other.shape().len();
        let operands = if swap { [other, self] } else { [self, other] };
        self.builder.apply(Binary { kind }, &operands)
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident, $kind:ident) => {
        impl<'b> $trait for Tensor<'b> {
            type Output = Tensor<'b>;

            fn $method(self, other: Tensor<'b>) -> Tensor<'b> {
                self.binary(BinaryKind::$kind, other)
            }
        }
    };
}

operator!(Add, add, Add);
operator!(Sub, sub, Sub);
operator!(Mul, mul, Mul);
operator!(Div, div, Div);

fn leading(rank: usize) -> String {
    (0..rank).map(|i| char::from(b'a' + i as u8)).collect()
}
