//! The ops, one small file per family. Shapes and element types of results come from the op's own
//! declaration; the files here only compute the numbers.

mod attend;
mod attention;
mod conv;
mod dropout;
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
mod pool;
mod reduce;
mod rotary;
mod routing;
mod shape;
mod softmax;

use phalanx_ir::ops::Shaped;
use phalanx_ir::{DType, Op, OpDef, TensorType};

use crate::error::ReferenceError;
use crate::tensor::{RefTensor, TensorData};

/// Runs one op on whole tensors.
pub(crate) fn apply(op: &Op, ins: &[&RefTensor]) -> Result<Vec<RefTensor>, ReferenceError> {
    let types: Vec<TensorType> =
        (ins.iter()).map(|t| TensorType::new(t.dtype(), t.shape())).collect();
    let name = op.name();
    let outs = (op.infer(&types.iter().collect::<Vec<_>>()))
        .map_err(|what| ReferenceError::Operands { op: name, what })?;
    let call = Call { name, ins, outs };
    match op {
        Op::Matmul(op) => matmul::matmul(op, &call),
        Op::PackedMatmul(op) => matmul::packed(op, &call),
        Op::Unary(op) => elementwise::unary(op.kind, &call),
        Op::UnaryGrad(op) => elementwise::unary_grad(op.kind, &call),
        Op::Binary(op) => elementwise::binary(op.kind, &call),
        Op::Compare(op) => Ok(elementwise::compare(op.kind, &call)),
        Op::Select(_) => elementwise::select(&call),
        Op::Scale(op) => elementwise::map(&call, |x| x * op.by),
        Op::Shift(op) => elementwise::map(&call, |x| x + op.by),
        Op::Cast(_) => Ok(vec![call.result(0, ins[0].values())]),
        Op::Fill(op) => Ok(vec![call.result(0, vec![op.value; call.elements(0)])]),
        Op::Fused(op) => fused::fused(op, &call),
        Op::Reduce(op) => Ok(reduce::reduce(op, &call)),
        Op::Broadcast(op) => Ok(reduce::broadcast(op, &call)),
        Op::Reshape(_) => Ok(vec![call.moved(ins[0].data().clone())]),
        Op::Transpose(op) => Ok(shape::transpose(op, &call)),
        Op::Slice(op) => Ok(shape::slice(op, &call)),
        Op::Pad(op) => Ok(shape::pad(op, &call)),
        Op::Concat(op) => Ok(shape::concat(op, &call)),
        Op::Embedding(_) => embedding::embedding(&call),
        Op::EmbeddingGrad(op) => embedding::embedding_grad(op, &call),
        Op::RmsNorm(op) => norm::rms_norm(op, &call),
        Op::RmsNormGrad(_) => norm::rms_norm_grad(&call),
        Op::LayerNorm(op) => norm::layer_norm(op, &call),
        Op::LayerNormGrad(_) => norm::layer_norm_grad(&call),
        Op::Rotary(op) => rotary::rotary(op, &call),
        Op::Attention(op) => attention::attention(op, &call),
        Op::AttentionGrad(op) => attention::attention_grad(&op.of, &call),
        Op::Attend(op) => attend::attend(op, &call),
        Op::AttendGrad(op) => attend::attend_grad(op, &call),
        Op::KeyProduct(op) => key_product::key_product(op, &call),
        Op::Conv2d(op) => conv::conv2d(&op.window, &call),
        Op::Conv2dInputGrad(op) => conv::input_grad(&op.window, &call),
        Op::Conv2dWeightGrad(op) => conv::weight_grad(&op.window, &call),
        Op::Pooling(op) => pool::pool(op, &call),
        Op::PoolingGrad(op) => pool::pool_grad(op, &call),
        Op::Softmax(_) => softmax::softmax(&call),
        Op::SoftmaxGrad(_) => softmax::softmax_grad(&call),
        Op::Dropout(op) => dropout::dropout(op, &call),
        Op::Noise(op) => dropout::noise(op, &call),
        Op::CrossEntropy(_) => loss::cross_entropy(&call),
        Op::CrossEntropyGrad(_) => loss::cross_entropy_grad(&call),
        Op::LinearCrossEntropy(op) => loss::linear_cross_entropy(op, &call),
        Op::TopK(op) => routing::top_k(op.k, &call),
        Op::TopKGrad(op) => routing::top_k_grad(op, &call),
        Op::Assign(op) => routing::assign(op, &call),
        Op::Queue(op) => routing::queue(op, &call),
        Op::Deal(op) => routing::deal(op, &call),
        Op::Histogram(op) => routing::histogram(op, &call),
        Op::Dispatch(_) => routing::dispatch(&call),
        Op::Combine(_) => routing::combine(&call),
        Op::GateGrad(_) => routing::gate_grad(&call),
        Op::GroupedMatmul(op) => grouped::product(op, &call),
        Op::GroupedMatmulGrad(op) => grouped::gradient(op, &call),
        Op::AdamW(op) => optimizer::adamw(op, &call),
        Op::Sgd(op) => optimizer::sgd(op, &call),
        Op::Lion(op) => optimizer::lion(op, &call),
        Op::LambDirection(op) => optimizer::lamb(op, &call),
        Op::SumSquares(_) => optimizer::sum_squares(&call),
        Op::MemberSquares(op) => members::squares(&op.bounds, &call),
        Op::MemberScale(op) => members::scale(&op.bounds, &call),
        Op::FactorMeans(op) => factors::means(&op.factors, &call),
        Op::FactorDirection(op) => factors::direction(&op.factors, &call),
        // A whole tensor has no padding.
        Op::ZeroPadding(_) => Ok(vec![ins[0].clone()]),
        // Gathering, scattering or summing the parts of a value leaves the whole value as it is.
        Op::Collective(_) => Ok(vec![ins[0].clone()]),
    }
}

/// One application of an op: its operands, and what its results shall be.
struct Call<'a> {
    name: &'static str,
    ins: &'a [&'a RefTensor],
    outs: Vec<Shaped>,
}

impl<'a> Call<'a> {
    /// The shape of operand `i`.
    fn shape(&self, i: usize) -> &'a [usize] {
        self.ins[i].shape()
    }

    /// The last dim of operand `i`, along which many ops work.
    fn width(&self, i: usize) -> usize {
        self.shape(i).last().copied().unwrap_or(1)
    }

    /// The numbers of a float operand.
    fn floats(&self, i: usize) -> Result<&'a [f64], ReferenceError> {
        match self.ins[i].data() {
            TensorData::Float(values) => Ok(values),
            _ => Err(self.wrong(i, "a float")),
        }
    }

    /// The number of a float operand without dims.
    fn scalar(&self, i: usize) -> Result<f64, ReferenceError> {
        Ok(self.floats(i)?[0])
    }

    /// The numbers of an `i32` operand.
    fn ints(&self, i: usize) -> Result<&'a [i32], ReferenceError> {
        match self.ins[i].data() {
            TensorData::Int(values) => Ok(values),
            _ => Err(self.wrong(i, "i32")),
        }
    }

    /// The words of an operand that is a random key.
    fn key(&self, i: usize) -> Result<[i32; 5], ReferenceError> {
        (self.ints(i)?.try_into()).map_err(|_| self.wrong(i, "a random key"))
    }

    /// How many elements result `i` has.
    fn elements(&self, i: usize) -> usize {
        self.outs[i].1.iter().product()
    }

    /// Result `i`, rounded to its element type.
    fn result(&self, i: usize, values: Vec<f64>) -> RefTensor {
        let (dtype, shape) = &self.outs[i];
        RefTensor::rounded(*dtype, shape, values)
    }

    /// The only result, of elements that were moved and not computed.
    fn moved(&self, data: TensorData) -> RefTensor {
        let (dtype, shape) = &self.outs[0];
        RefTensor::from_data(*dtype, shape, data)
    }

    /// The row of a table that an id at some position chooses.
    fn row(&self, id: i32, position: usize, limit: usize) -> Result<usize, ReferenceError> {
        let row = usize::try_from(id).ok().filter(|&row| row < limit);
        row.ok_or(ReferenceError::IdOutOfRange { op: self.name, id, position, limit })
    }

    fn wrong(&self, i: usize, expected: &str) -> ReferenceError {
        let dtype: DType = self.ins[i].dtype();
        let what = format!(
            "operand {i} is {dtype}{:?}, expected {expected} (cast it first)",
            self.shape(i)
        );
        ReferenceError::Operands { op: self.name, what }
    }
}
