//! GPT-2 (Radford et al., 2019): LayerNorm before each half of a block, learned positions, GELU, biases,
//! and dropout on the embedding, on attention's probabilities and on what enters the residual stream.

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Builder, DType, IrError, Model, Tensor};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;
use crate::hf::{GptSpec, ModelSpec};
use crate::language::{self, Stream};

/// A GPT-2 model.
#[derive(Clone, PartialEq, Debug)]
pub struct Gpt {
    /// Its sizes.
    pub spec: GptSpec,
    /// What attention keeps for its gradient.
    pub attention: AttentionKind,
    /// The probability of dropout in training.
    pub dropout: f64,
    /// The standard deviation of initial weights.
    pub init_std: f64,
    /// Whether the residual stream is kept in the accumulator type of the compute type.
    pub wide_residual: bool,
}

impl Gpt {
    /// A model of these sizes, with flash attention and without dropout.
    pub fn new(spec: GptSpec) -> Self {
        let attention = AttentionKind::Flash;
        Self { spec, attention, dropout: 0.0, init_std: 0.02, wide_residual: false }
    }

    fn embed(&self, BatchShape { batch, seq }: BatchShape, compute: DType, p: f64) -> Builder {
        let s = &self.spec;
        let b = Builder::new("embed", compute);
        let ids = b.data(port::IDS, DType::I32, [batch, seq]);
        let tokens = b.param("embed", [s.vocab, s.width]).embedding(ids);
        let positions = b.param("pos", [s.context, s.width]).slice(0, 0, seq);
        b.output(port::H, self.stream(compute).widen((tokens + positions).dropout(p)));
        b
    }

    fn block(&self, BatchShape { batch, seq }: BatchShape, compute: DType, p: f64) -> Builder {
        let (d, ffn, heads) = (self.spec.width, self.spec.ffn, self.spec.heads);
        let b = Builder::new("block", compute);
        let stream = self.stream(compute);
        let h = stream.enter(&b, [batch, seq, d]);

        let x = self.norm(&b, "norm1", h, compute);
        let [q, k, v] = ["attn.q", "attn.k", "attn.v"]
            .map(|name| linear(&b, name, x, [d, d]).reshape([batch, seq, heads, d / heads]));
        let o = q.attention(k, v, self.attention, p).reshape([batch, seq, d]);
        let h = stream.add(h, linear(&b, "attn.out", o, [d, d]).dropout(p));

        let x = self.norm(&b, "norm2", h, compute);
        let inner = linear(&b, "mlp.up", x, [d, ffn]).gelu();
        let y = linear(&b, "mlp.down", inner, [ffn, d]).dropout(p);
        b.output(port::H, stream.add(h, y));
        b
    }

    fn head(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Builder {
        let s = &self.spec;
        let b = Builder::new("head", compute);
        let h = self.stream(compute).enter(&b, [shape.batch, shape.seq, s.width]);
        let x = self.norm(&b, "norm", h, compute);
        language::finish(&b, x, shape, [s.width, s.vocab], s.tied, purpose);
        b
    }

    fn stream(&self, compute: DType) -> Stream {
        Stream::new(compute, self.wide_residual)
    }

    /// A norm of the residual stream, as products read it.
    fn norm<'b>(&self, b: &'b Builder, name: &str, h: Tensor<'b>, compute: DType) -> Tensor<'b> {
        let param = |part: &str| b.param(&format!("{name}.{part}"), [self.spec.width]);
        let [gain, bias] = ["gain", "bias"].map(|part| self.stream(compute).widen(param(part)));
        h.layer_norm(gain, bias, self.spec.norm_eps).cast(compute)
    }

    fn check(&self, BatchShape { batch, seq }: BatchShape) -> Result<(), IrError> {
        let s = &self.spec;
        let check = Check { model: "gpt2" };
        let (width, heads, ffn) = (("width", s.width), ("heads", s.heads), ("ffn", s.ffn));
        let (vocab, batch, length) = (("vocab", s.vocab), ("batch", batch), ("seq", seq));
        check.sizes(&[("layers", s.layers), width, heads, ffn, vocab, batch, length])?;
        check.divides(heads, width)?;
        check.context(seq, s.context)?;
        check.positive("norm_eps", s.norm_eps)?;
        check.positive("init_std", self.init_std)?;
        check.dropout(self.dropout)?;
        for other in [width, ffn, vocab, ("context", s.context)] {
            check.tensor(&[width, other])?;
        }
        for last in [width, ffn, vocab] {
            check.tensor(&[batch, length, last])?;
        }
        check.scores(self.attention, &[batch, heads, length, length])
    }
}

impl Architecture for Gpt {
    fn name(&self) -> &str {
        "gpt2"
    }

    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
        self.check(shape)?;
        let p = match purpose {
            Purpose::Train => self.dropout,
            Purpose::Evaluate | Purpose::Predict => 0.0,
        };
        let init = language::init(self.init_std, self.spec.layers);
        let mut chain = Chain::new(self.name());
        chain.once(self.embed(shape, compute, p), &init)?;
        let block = self.block(shape, compute, p);
        chain.repeat("blocks", self.spec.layers, block, &init)?;
        chain.once(self.head(shape, compute, purpose), &init)?;
        Ok(chain.finish())
    }

    fn spec(&self) -> Option<ModelSpec> {
        Some(ModelSpec::Gpt(self.spec.clone()))
    }
}

fn linear<'b>(b: &'b Builder, name: &str, x: Tensor<'b>, [from, to]: [usize; 2]) -> Tensor<'b> {
    let weight = b.param(name, [from, to]);
    x.matmul(weight) + b.param(&format!("{name}_bias"), [to])
}
