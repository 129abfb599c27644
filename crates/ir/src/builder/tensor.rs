//! Tensor code: a method or an operator for each op.

use std::ops::{Add, Div, Mul, Neg, Sub};

use super::Builder;
use crate::dtype::DType;
use crate::error::IrError;
use crate::ops::{
    Attention, AttentionKind, Binary, BinaryKind, Broadcast, Cast, Compare, CompareKind, Conv2d,
    CrossEntropy, Dropout, Embedding, LayerNorm, Matmul, Noise, NoiseKind, PoolKind, Pooling,
    Reduce, ReduceKind, Reshape, RmsNorm, Rotary, Scale, Select, Shift, Slice, Softmax, Spec,
    Transpose, Unary, UnaryKind, Window,
};
use crate::program::ValueId;
use crate::types::TensorType;

/// A value of the program being built: a handle, free to copy.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'b> {
    pub(super) builder: &'b Builder,
    pub(super) id: ValueId,
}

impl<'b> Tensor<'b> {
    /// The value's id in the program.
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

    /// The builder of its program.
    pub fn builder(self) -> &'b Builder {
        self.builder
    }

    /// The type.
    pub fn ty(self) -> TensorType {
        self.builder.state.borrow().program.ty(self.id).clone()
    }

    /// Asks for a layout of this value when the program is partitioned, such as `0:dp 1:tp`: all
    /// readers see exactly that layout.
    pub fn annotate(self, layout: &str) -> Tensor<'b> {
        self.builder.state.borrow_mut().program.note(self.id, layout);
        self
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

    /// Convolution of `[batch, height, width, in]` by weights `[k, l, in, out]`.
    pub fn conv2d(self, w: Tensor<'b>, window: Window) -> Tensor<'b> {
        self.builder.apply(Conv2d { window }, &[self, w])
    }

    /// The largest input of each window of `[batch, height, width, channels]`.
    pub fn max_pool(self, window: Window) -> Tensor<'b> {
        self.builder.apply(Pooling { kind: PoolKind::Max, window }, &[self])
    }

    /// The mean of each window of `[batch, height, width, channels]`; missing inputs are zeros.
    pub fn mean_pool(self, window: Window) -> Tensor<'b> {
        self.builder.apply(Pooling { kind: PoolKind::Mean, window }, &[self])
    }

    /// Group norm (Wu and He, 2018) of `[batch, height, width, channels]`: over height, width and
    /// the channels of each group. It is made of sums, so any dim may be sharded.
    pub fn group_norm(
        self,
        groups: usize,
        gain: Tensor<'b>,
        bias: Tensor<'b>,
        eps: f64,
    ) -> Tensor<'b> {
        let &[b, h, w, c] = self.shape().as_slice() else {
            let what = format!("x is {}, expected [batch, height, width, channels]", self.ty());
            self.builder.fail(IrError::operands("group_norm", what));
            return self;
        };
        if groups == 0 || !c.is_multiple_of(groups) {
            let what = format!("{groups} groups do not divide {c} channels");
            self.builder.fail(IrError::operands("group_norm", what));
            return self;
        }
        let (grouped, dtype) = ([b, h, w, groups, c / groups], self.dtype());
        let mean = |x: Tensor<'b>| {
            let of = x.sum(&[1, 2, 4]).scale(1.0 / (h * w * (c / groups)) as f64);
            move |f: &dyn Fn(Tensor<'b>) -> Tensor<'b>| f(of).broadcast(grouped, &[1, 2, 4])
        };
        let x = self.cast(dtype.accumulator()).reshape(grouped);
        let centred = x - mean(x)(&|m| m);
        let deviation = mean(centred.square())(&|v| v.shift(eps).sqrt());
        (centred / deviation).reshape([b, h, w, c]).cast(dtype) * gain + bias
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

    /// Looks up rows of this table by id.
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

    /// Zeroes elements with probability `p`; adds no instruction if `p` is 0.
    pub fn dropout(self, p: f64) -> Tensor<'b> {
        if p == 0.0 {
            return self;
        }
        let op = Dropout { p, site: self.builder.site() };
        self.builder.apply(op, &[self, self.builder.key()])
    }

    /// A random number for each of these elements.
    pub fn noise(self, kind: NoiseKind) -> Tensor<'b> {
        let op = Noise { kind, site: self.builder.site() };
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

    /// log(1 + e^x), the smooth form of ReLU.
    pub fn softplus(self) -> Tensor<'b> {
        self.unary(UnaryKind::Softplus)
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

    /// The exponential.
    pub fn exp(self) -> Tensor<'b> {
        self.unary(UnaryKind::Exp)
    }

    /// The natural logarithm.
    pub fn log(self) -> Tensor<'b> {
        self.unary(UnaryKind::Log)
    }

    /// The square root.
    pub fn sqrt(self) -> Tensor<'b> {
        self.unary(UnaryKind::Sqrt)
    }

    /// 1/(1 + e⁻ˣ).
    pub fn sigmoid(self) -> Tensor<'b> {
        self.unary(UnaryKind::Sigmoid)
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

    /// Selects elements of `yes` where this condition is true, else of `no`.
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

    /// Another shape with the same number of elements.
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
        // The second operand is the one that is repeated along leading dims, so the larger operand
        // goes first if the order does not matter.
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

impl<'b> Neg for Tensor<'b> {
    type Output = Tensor<'b>;

    fn neg(self) -> Tensor<'b> {
        self.unary(UnaryKind::Neg)
    }
}

impl<'b> Mul<f64> for Tensor<'b> {
    type Output = Tensor<'b>;

    fn mul(self, by: f64) -> Tensor<'b> {
        self.scale(by)
    }
}

impl<'b> Add<f64> for Tensor<'b> {
    type Output = Tensor<'b>;

    fn add(self, by: f64) -> Tensor<'b> {
        self.shift(by)
    }
}

impl<'b> Sub<f64> for Tensor<'b> {
    type Output = Tensor<'b>;

    fn sub(self, by: f64) -> Tensor<'b> {
        self.shift(-by)
    }
}

fn leading(rank: usize) -> String {
    (0..rank).map(|i| char::from(b'a' + i as u8)).collect()
}
