//! What language models share: the loss at their end, and their initial weights.

use phalanx_ir::{Builder, DType, Init, Role, Tensor, TensorType};

use crate::architecture::{BatchShape, Purpose, port};

/// The end of a language model: logits of every position and, unless only logits are wanted, the
/// cross-entropy with the targets. A tied head reads the embedding, `[vocab, width]`.
pub(crate) fn finish<'b>(
    b: &'b Builder,
    x: Tensor<'b>,
    shape: BatchShape,
    [width, vocab]: [usize; 2],
    tied: bool,
    purpose: Purpose,
) {
    let logits = match tied {
        true => x.matmul_transposed(b.param("embed", [vocab, width])),
        false => x.matmul(b.param("head", [width, vocab])),
    };
    if purpose == Purpose::Predict {
        return b.probe(port::LOGITS, logits);
    }
    let targets = b.data(port::TARGETS, DType::I32, [shape.batch, shape.seq]);
    let total = logits.cross_entropy(targets).sum_all();
    b.loss(port::LOSS, total * b.scalar(port::INV_TOKENS));
}

/// The residual stream: the sum to which every half of a block adds. It is kept in the compute type, or
/// wider: then norms are computed in the wider type, and branches are widened when they are added.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Stream {
    kept: DType,
}

impl Stream {
    pub(crate) fn new(compute: DType, wide: bool) -> Self {
        Self { kept: if wide { compute.accumulator() } else { compute } }
    }

    /// What an earlier segment returned of it.
    pub(crate) fn enter<'b>(&self, b: &'b Builder, shape: [usize; 3]) -> Tensor<'b> {
        b.input(port::H, Role::Boundary, TensorType::new(self.kept, shape))
    }

    /// The sum, with what a branch adds to it.
    pub(crate) fn add<'b>(&self, h: Tensor<'b>, branch: Tensor<'b>) -> Tensor<'b> {
        h + self.widen(branch)
    }

    /// A value in the stream's type.
    pub(crate) fn widen<'b>(&self, x: Tensor<'b>) -> Tensor<'b> {
        x.cast(self.kept)
    }
}

/// The initial value of a parameter, by its local name: gains are one, biases zero, weights normal.
/// Weights that write to the residual stream are smaller by √(2·layers), so that the sum of all
/// 2·layers branches starts with the variance of one branch (Radford et al., 2019).
pub(crate) fn init(std: f64, layers: usize) -> impl Fn(&str) -> Init {
    move |name| {
        let last = name.rsplit('.').next().unwrap_or(name);
        match name {
            "attn.out" | "mlp.down" | "experts.down" => {
                Init::Normal(std / (2.0 * layers as f64).sqrt())
            }
            _ if last == "gain" || last.starts_with("norm") => Init::Constant(1.0),
            _ if last.ends_with("bias") => Init::Constant(0.0),
            _ => Init::Normal(std),
        }
    }
}
