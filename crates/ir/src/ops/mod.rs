//! The ops. Each file says everything about its ops once: name, attributes, shapes, sharding
//! rule, how partial sums pass, gradient, work. Type check, autodiff, propagation, partitioning,
//! cost and text read that; only the kernels live elsewhere.

mod attend;
mod attention;
mod collective;
mod conv;
mod dispatch;
mod elementwise;
mod embedding;
mod factors;
mod fused;
mod grouped;
mod key_product;
mod loss;
mod matmul;
mod members;
mod norm;
mod optimizer;
mod packed;
mod padding;
mod pool;
mod random;
mod reduce;
mod reshape;
mod rotary;
mod routing;
mod shape;
mod softmax;
mod window;

use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::halo::Reach;
use crate::mesh::Axis;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

pub use attend::{Attend, AttendGrad};
pub use attention::{Attention, AttentionGrad, AttentionKind};
pub use collective::{Collective, CollectiveKind};
pub use conv::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};
pub use dispatch::{Combine, Dispatch, GateGrad};
pub use elementwise::{
    Binary, BinaryKind, Cast, Compare, CompareKind, Fill, Scale, Select, Shift, Unary, UnaryGrad,
    UnaryKind,
};
pub use embedding::{Embedding, EmbeddingGrad};
pub use factors::{FactorDirection, FactorMeans, Factors, MatrixPlace, MatrixSpan, RowRun};
pub use fused::{Fused, FusedArg, FusedStep};
pub use grouped::{GroupedMatmul, GroupedMatmulGrad};
pub use key_product::{KeyForm, KeyProduct};
pub use loss::{CrossEntropy, CrossEntropyGrad, LinearCrossEntropy};
pub use matmul::{Extents, Matmul, Product, Spec};
pub use members::{Bounds, MemberScale, MemberSquares};
pub use norm::{LayerNorm, LayerNormGrad, RmsNorm, RmsNormGrad};
pub use optimizer::{AdamW, Decay, LambDirection, Lion, Narrow, Sgd, SumSquares};
pub use packed::PackedMatmul;
pub use padding::ZeroPadding;
pub use pool::{PoolKind, Pooling, PoolingGrad};
pub use random::{Dropout, Noise, NoiseKind};
pub use reduce::{Broadcast, Reduce, ReduceKind};
pub use reshape::Reshape;
pub use rotary::{RopeScaling, Rotary};
pub use routing::{Assign, Deal, Histogram, Queue, TopK, TopKGrad};
pub use shape::{Concat, Pad, Slice, Transpose};
pub use softmax::{Softmax, SoftmaxGrad};
pub use window::{Window, WindowSpan};

/// Element type and global shape of a result, before its layout is known.
pub type Shaped = (DType, Vec<usize>);

/// Bytes that a rank reads and writes in its own memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Touched {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

/// Everything that defines an op.
pub trait OpDef {
    /// The name in program text.
    fn name(&self) -> &'static str;

    /// The attributes that the text prints, enough to read the op back.
    fn attrs(&self) -> Attrs {
        Attrs::new()
    }

    /// The mesh axes a collective acts on, printed in angle brackets.
    fn axes(&self) -> &[Axis] {
        &[]
    }

    /// Result element types and shapes, or what does not fit.
    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String>;

    /// The sharding rule for these shapes.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule;

    /// Sets the gradients of the operands that want one.
    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError>;

    /// The matrix products that it computes for these shapes, global or local. Those inside
    /// attention are not included: they never leave its kernel.
    fn products(&self, _ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        Vec::new()
    }

    /// FLOPs for these shapes: those of matrix products; elementwise work is not counted.
    fn flops(&self, ins: &[&[usize]], outs: &[&[usize]]) -> u64 {
        self.products(ins, outs).iter().map(Product::flops).sum()
    }

    /// Bytes that a rank reads and writes in its own memory for these local types: operands and
    /// results once, unless the op overrides it. A view touches nothing.
    fn touches(&self, ins: &[Shaped], outs: &[Shaped]) -> Touched {
        match self.is_view() {
            true => Touched::default(),
            false => {
                Touched { read: ins.iter().map(bytes).sum(), written: outs.iter().map(bytes).sum() }
            }
        }
    }

    /// Whether packed units are legal operands.
    fn accepts_units(&self) -> bool {
        false
    }

    /// Whether its result for a packed unit is also a packed unit, element by element; a sum over a
    /// unit is not.
    fn gives_units(&self) -> bool {
        self.accepts_units()
    }

    /// Whether its result is its operand with another shape: the same memory, and no work.
    fn is_view(&self) -> bool {
        false
    }

    /// Whether a result is much larger than its operands and cheap to recompute, so that selective
    /// recomputation does not keep it.
    fn is_bulky(&self, _result: usize) -> bool {
        false
    }

    /// Pairs (operand, result) that may share memory when the operand is not needed afterwards
    /// and both have the same number of bytes.
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Whether engines can add a result to the contents of its buffer, instead of overwriting it.
    fn accumulates(&self, _result: usize) -> bool {
        false
    }

    /// Whether it updates weights and optimizer state in place, at the end of a step.
    fn is_update(&self) -> bool {
        false
    }

    /// How many numbers per row, in the accumulator type, ranks exchange inside the op where its
    /// lowered factor is sharded.
    fn exchanges(&self) -> usize {
        0
    }

    /// How far it reads beyond the block of a rank, by operand and dim, where the dim is sharded.
    fn reaches(&self) -> Vec<Reach> {
        Vec::new()
    }
}

macro_rules! ops {
    ($($variant:ident($inner:ty)),* $(,)?) => {
        /// An op with its attributes. The set is closed, so that an engine that forgets one does
        /// not compile.
        #[derive(Clone, PartialEq, Debug)]
        #[allow(missing_docs, reason = "each variant is documented at its own type")]
        pub enum Op { $($variant($inner)),* }

        impl Op {
            /// The names of all variants, so that a test can say which ones it leaves out.
            pub const VARIANTS: &[&str] = &[$(stringify!($variant)),*];

            /// The name of its variant.
            pub fn variant(&self) -> &'static str {
                match self { $(Op::$variant(_) => stringify!($variant)),* }
            }
        }

        impl OpDef for Op {
            fn name(&self) -> &'static str { match self { $(Op::$variant(op) => op.name()),* } }
            fn attrs(&self) -> Attrs { match self { $(Op::$variant(op) => op.attrs()),* } }
            fn axes(&self) -> &[Axis] { match self { $(Op::$variant(op) => op.axes()),* } }
            fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
                match self { $(Op::$variant(op) => op.infer(ins)),* }
            }
            fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
                match self { $(Op::$variant(op) => op.rule(ins, outs)),* }
            }
            fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
                match self { $(Op::$variant(op) => op.vjp(g)),* }
            }
            fn products(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Vec<Product> {
                match self { $(Op::$variant(op) => op.products(ins, outs)),* }
            }
            fn touches(&self, ins: &[Shaped], outs: &[Shaped]) -> Touched {
                match self { $(Op::$variant(op) => op.touches(ins, outs)),* }
            }
            fn flops(&self, ins: &[&[usize]], outs: &[&[usize]]) -> u64 {
                match self { $(Op::$variant(op) => op.flops(ins, outs)),* }
            }
            fn accepts_units(&self) -> bool {
                match self { $(Op::$variant(op) => op.accepts_units()),* }
            }
            fn gives_units(&self) -> bool {
                match self { $(Op::$variant(op) => op.gives_units()),* }
            }
            fn is_view(&self) -> bool { match self { $(Op::$variant(op) => op.is_view()),* } }
            fn is_bulky(&self, result: usize) -> bool {
                match self { $(Op::$variant(op) => op.is_bulky(result)),* }
            }
            fn in_place(&self) -> &'static [(usize, usize)] {
                match self { $(Op::$variant(op) => op.in_place()),* }
            }
            fn accumulates(&self, result: usize) -> bool {
                match self { $(Op::$variant(op) => op.accumulates(result)),* }
            }
            fn is_update(&self) -> bool { match self { $(Op::$variant(op) => op.is_update()),* } }
            fn exchanges(&self) -> usize {
                match self { $(Op::$variant(op) => op.exchanges()),* }
            }
            fn reaches(&self) -> Vec<Reach> {
                match self { $(Op::$variant(op) => op.reaches()),* }
            }
        }

        $(impl From<$inner> for Op {
            fn from(op: $inner) -> Self { Op::$variant(op) }
        })*
    };
}

ops! {
    Matmul(Matmul),
    PackedMatmul(PackedMatmul),
    Unary(Unary),
    UnaryGrad(UnaryGrad),
    Binary(Binary),
    Compare(Compare),
    Select(Select),
    Scale(Scale),
    Shift(Shift),
    Cast(Cast),
    Fill(Fill),
    Fused(Fused),
    Reduce(Reduce),
    Broadcast(Broadcast),
    Reshape(Reshape),
    Transpose(Transpose),
    Slice(Slice),
    Pad(Pad),
    Concat(Concat),
    Embedding(Embedding),
    EmbeddingGrad(EmbeddingGrad),
    RmsNorm(RmsNorm),
    RmsNormGrad(RmsNormGrad),
    LayerNorm(LayerNorm),
    LayerNormGrad(LayerNormGrad),
    Rotary(Rotary),
    Attention(Attention),
    AttentionGrad(AttentionGrad),
    Attend(Attend),
    AttendGrad(AttendGrad),
    KeyProduct(KeyProduct),
    Conv2d(Conv2d),
    Conv2dInputGrad(Conv2dInputGrad),
    Conv2dWeightGrad(Conv2dWeightGrad),
    Pooling(Pooling),
    PoolingGrad(PoolingGrad),
    Softmax(Softmax),
    SoftmaxGrad(SoftmaxGrad),
    Dropout(Dropout),
    Noise(Noise),
    CrossEntropy(CrossEntropy),
    CrossEntropyGrad(CrossEntropyGrad),
    LinearCrossEntropy(LinearCrossEntropy),
    TopK(TopK),
    TopKGrad(TopKGrad),
    Assign(Assign),
    Queue(Queue),
    Deal(Deal),
    Histogram(Histogram),
    Dispatch(Dispatch),
    Combine(Combine),
    GateGrad(GateGrad),
    GroupedMatmul(GroupedMatmul),
    GroupedMatmulGrad(GroupedMatmulGrad),
    AdamW(AdamW),
    Sgd(Sgd),
    Lion(Lion),
    LambDirection(LambDirection),
    SumSquares(SumSquares),
    MemberSquares(MemberSquares),
    MemberScale(MemberScale),
    FactorMeans(FactorMeans),
    FactorDirection(FactorDirection),
    ZeroPadding(ZeroPadding),
    Collective(Collective),
}

impl Op {
    /// Reads an op back from its name, axes and attributes.
    pub fn read(name: &str, axes: Vec<Axis>, attrs: &mut AttrReader) -> Result<Op, String> {
        if let Some(op) = elementwise::read(name, attrs) {
            return op;
        }
        if let Some(op) = collective::read(name, axes, attrs) {
            return op;
        }
        if let Some(op) = routing::read(name, attrs) {
            return op;
        }
        Ok(match name {
            "matmul" => matmul::read(attrs)?.into(),
            "packed_matmul" => packed::read(attrs)?.into(),
            "fused" => fused::read(attrs)?.into(),
            "sum" | "max_over" => reduce::read(name, attrs)?.into(),
            "broadcast" => {
                Broadcast { shape: attrs.take_list("shape")?, dims: attrs.take_list("dims")? }
                    .into()
            }
            "reshape" => Reshape { shape: attrs.take_list("shape")? }.into(),
            "transpose" => Transpose { perm: attrs.take_list("perm")? }.into(),
            "slice" => Slice {
                dim: attrs.take("dim")?,
                start: attrs.take("start")?,
                len: attrs.take("len")?,
            }
            .into(),
            "pad" => Pad {
                dim: attrs.take("dim")?,
                before: attrs.take("before")?,
                after: attrs.take("after")?,
            }
            .into(),
            "concat" => Concat { dim: attrs.take("dim")? }.into(),
            "embedding" => Embedding.into(),
            "embedding_grad" => {
                EmbeddingGrad { vocab: attrs.take("vocab")?, out: attrs.take("out")? }.into()
            }
            "rms_norm" => RmsNorm { eps: attrs.take("eps")? }.into(),
            "rms_norm_grad" => RmsNormGrad { out: attrs.take("out")? }.into(),
            "layer_norm" => LayerNorm { eps: attrs.take("eps")? }.into(),
            "layer_norm_grad" => LayerNormGrad { out: attrs.take("out")? }.into(),
            "rotary" => rotary::read(attrs)?.into(),
            "attention" => attention::read(attrs)?.into(),
            "attention_grad" => AttentionGrad { of: attention::read(attrs)? }.into(),
            "attend" => {
                let (of, goes_on) = attend::read(attrs)?;
                Attend { of, goes_on }.into()
            }
            "attend_grad" => {
                let (of, goes_on) = attend::read(attrs)?;
                AttendGrad { of, goes_on }.into()
            }
            "key_product" => key_product::read(attrs)?.into(),
            "conv2d" => Conv2d { window: window::read(attrs)? }.into(),
            "conv2d_input_grad" => conv::read_input_grad(attrs)?.into(),
            "conv2d_weight_grad" => conv::read_weight_grad(attrs)?.into(),
            "max_pool" | "mean_pool" => pool::read(name, attrs)?.into(),
            "max_pool_grad" | "mean_pool_grad" => pool::read_grad(name, attrs)?.into(),
            "softmax" => Softmax.into(),
            "softmax_grad" => SoftmaxGrad.into(),
            "dropout" => Dropout { p: attrs.take("p")?, site: attrs.take("site")? }.into(),
            "uniform" => Noise { kind: NoiseKind::Uniform, site: attrs.take("site")? }.into(),
            "normal" => Noise { kind: NoiseKind::Normal, site: attrs.take("site")? }.into(),
            "cross_entropy" => CrossEntropy.into(),
            "cross_entropy_grad" => CrossEntropyGrad.into(),
            "linear_cross_entropy" => loss::read_linear(attrs)?.into(),
            "dispatch" => {
                Dispatch { experts: attrs.take("experts")?, capacity: attrs.take("capacity")? }
                    .into()
            }
            "combine" => Combine.into(),
            "gate_grad" => GateGrad.into(),
            "grouped_matmul" => grouped::read(attrs)?.into(),
            "grouped_matmul_grad" => grouped::read_grad(attrs)?.into(),
            "adamw" | "adam" => optimizer::read_adamw(name == "adam", attrs)?.into(),
            "sgd" => optimizer::read_sgd(attrs)?.into(),
            "lion" => optimizer::read_lion(attrs)?.into(),
            "lamb_direction" => optimizer::read_lamb(attrs)?.into(),
            "sum_squares" => SumSquares.into(),
            "member_squares" => MemberSquares { bounds: Bounds::read(attrs)? }.into(),
            "member_scale" => MemberScale { bounds: Bounds::read(attrs)? }.into(),
            "factor_means" => FactorMeans { factors: Factors::read(attrs)? }.into(),
            "factor_direction" => FactorDirection { factors: Factors::read(attrs)? }.into(),
            "zero_padding" => ZeroPadding.into(),
            _ => return Err(format!("unknown op `{name}`")),
        })
    }
}

/// Fails unless there are exactly `n` operands.
fn arity(ins: &[&TensorType], n: usize) -> Result<(), String> {
    if ins.len() == n { Ok(()) } else { Err(format!("takes {n} operands, got {}", ins.len())) }
}

/// The number of elements of a shape, if it can be counted.
pub(crate) fn product(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size))
}

/// Bytes of a value.
fn bytes((dtype, shape): &Shaped) -> u64 {
    (shape.iter().product::<usize>() * dtype.size()) as u64
}

/// Fails unless the operand has this shape.
fn shape_is(what: &str, ty: &TensorType, shape: &[usize]) -> Result<(), String> {
    if ty.shape == shape {
        Ok(())
    } else {
        Err(format!("{what} is {ty}, expected the shape {shape:?}"))
    }
}

/// Fails unless the operand has this element type.
fn dtype_is(what: &str, ty: &TensorType, dtype: DType) -> Result<(), String> {
    if ty.dtype == dtype { Ok(()) } else { Err(format!("{what} is {ty}, expected {dtype}")) }
}
