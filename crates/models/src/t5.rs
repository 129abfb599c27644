//! T5 (Raffel et al., 2020), an encoder and a decoder: RMSNorm before each part of a block, positions by a bias
//! of the scores, ReLU, no biases in linear layers, and one table for both embeddings and the head. Version 1.1 has
//! a gated GELU, and a head of its own.
//!
//! A sample is one text: its first half is what the encoder reads, and the decoder continues it (prefix to
//! continuation). Every block of the decoder reads the encoder's result, so in a pipeline this value goes from
//! stage to stage, and its cotangent comes back the same way.
//!
//! Scores are made of products, a sum and a softmax, and are stored. The bias of a score depends on the
//! distance of key and query alone, so it is a row of numbers that each query reads one place further on.

use phalanx_ir::{Builder, DType, Init, IrError, Model, Tensor};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;
use crate::distance::Distances;
use crate::hf::{ModelSpec, T5Spec};

/// A T5 model.
///
/// ```
/// use phalanx_models::{Architecture, T5};
/// use phalanx_models::hf::T5Spec;
///
/// let model = T5::new(T5Spec::new(2, 16, 4, 64, 32));
/// let (attention, inner) = (4 * 16 * 16, 2 * 16 * 64);
/// let (encoder, decoder) = (attention + inner + 2 * 16, 2 * attention + inner + 3 * 16);
/// // Two blocks each; besides them a table of words, two of distances, and two norms.
/// assert_eq!(model.parameters()?, 2 * (encoder + decoder) + 32 * 16 + 2 * 32 * 4 + 2 * 16);
/// # Ok::<(), phalanx_ir::IrError>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct T5 {
    /// The sizes.
    pub spec: T5Spec,
    /// The probability of dropout in training.
    pub dropout: f64,
}

/// How one tensor meets the other in an attention.
struct Meeting<'b> {
    name: &'static str,
    queries: Tensor<'b>,
    keys: Tensor<'b>,
    bias: Option<Tensor<'b>>,
}

impl T5 {
    /// A model of these sizes, without dropout.
    pub fn new(spec: T5Spec) -> Self {
        Self { spec, dropout: 0.0 }
    }

    /// Tokens that the encoder reads, of a sample of so many; the decoder continues with the others.
    pub fn source(seq: usize) -> usize {
        seq / 2
    }

    fn encoder_embed(&self, shape: BatchShape, compute: DType, p: f64) -> Builder {
        let b = Builder::new("encoder_embed", compute);
        b.output(port::H, self.words(&b, shape, 0..Self::source(shape.seq), p));
        b
    }

    /// The embeddings of some tokens of each sample.
    fn words<'b>(
        &self,
        b: &'b Builder,
        BatchShape { batch, seq }: BatchShape,
        tokens: std::ops::Range<usize>,
        p: f64,
    ) -> Tensor<'b> {
        let ids = b.data(port::IDS, DType::I32, [batch, seq]).slice(1, tokens.start, tokens.len());
        b.param("embed", [self.spec.vocab, self.spec.width]).embedding(ids).dropout(p)
    }

    fn encoder_block(&self, shape: BatchShape, compute: DType, p: f64) -> Builder {
        let b = Builder::new("encoder_block", compute);
        let length = Self::source(shape.seq);
        let h = b.boundary(port::H, [shape.batch, length, self.spec.width]);
        let bias = Some(self.bias(&b, length, true));
        let x = self.norm(&b, "norm1", h);
        let y = self.attention(&b, Meeting { name: "attn", queries: x, keys: x, bias }, p);
        let h = h + y.dropout(p);
        b.output(port::H, self.feed_forward(&b, "norm2", h, p));
        b
    }

    /// The end of the encoder and the beginning of the decoder.
    fn decoder_embed(&self, shape: BatchShape, compute: DType, p: f64) -> Builder {
        let b = Builder::new("decoder_embed", compute);
        let source = Self::source(shape.seq);
        let h = b.boundary(port::H, [shape.batch, source, self.spec.width]);
        b.output(port::MEMORY, self.norm(&b, "encoder.norm", h).dropout(p));
        b.output(port::H, self.words(&b, shape, source..shape.seq, p));
        b
    }

    fn decoder_block(
        &self,
        BatchShape { batch, seq }: BatchShape,
        compute: DType,
        p: f64,
    ) -> Builder {
        let b = Builder::new("decoder_block", compute);
        let source = Self::source(seq);
        let length = seq - source;
        let h = b.boundary(port::H, [batch, length, self.spec.width]);
        let memory = b.boundary(port::MEMORY, [batch, source, self.spec.width]);
        let bias = Some(self.bias(&b, length, false));
        let x = self.norm(&b, "norm1", h);
        let y = self.attention(&b, Meeting { name: "attn", queries: x, keys: x, bias }, p);
        let h = h + y.dropout(p);
        let x = self.norm(&b, "norm2", h);
        let across = Meeting { name: "cross", queries: x, keys: memory, bias: None };
        let h = h + self.attention(&b, across, p).dropout(p);
        b.output(port::H, self.feed_forward(&b, "norm3", h, p));
        b
    }

    fn head(
        &self,
        BatchShape { batch, seq }: BatchShape,
        compute: DType,
        purpose: Purpose,
    ) -> Builder {
        let p = self.rate(purpose);
        let (source, width) = (Self::source(seq), self.spec.width);
        let b = Builder::new("head", compute);
        let x = self.norm(&b, "norm", b.boundary(port::H, [batch, seq - source, width])).dropout(p);
        let x = if self.spec.scaled { x.scale((width as f64).powf(-0.5)) } else { x };
        let logits = match self.spec.tied {
            true => x.matmul_transposed(b.param("embed", [self.spec.vocab, width])),
            false => x.matmul(b.param("head", [width, self.spec.vocab])),
        };
        if purpose == Purpose::Predict {
            b.probe(port::LOGITS, logits);
            return b;
        }
        let targets = b.data(port::TARGETS, DType::I32, [batch, seq]);
        let total = logits.cross_entropy(targets.slice(1, source, seq - source)).sum_all();
        b.loss(port::LOSS, total * b.scalar(port::INV_TOKENS));
        b
    }

    fn norm<'b>(&self, b: &'b Builder, name: &str, h: Tensor<'b>) -> Tensor<'b> {
        h.rms_norm(b.param(name, [self.spec.width]), self.spec.norm_eps)
    }

    /// The bias of the scores of each head, `[heads, length, length]`, of a table that all blocks of a stack share.
    fn bias<'b>(&self, b: &'b Builder, length: usize, both_ways: bool) -> Tensor<'b> {
        let table = b.param("bias", [self.spec.buckets, self.spec.heads]);
        Distances { buckets: self.spec.buckets, far: self.spec.far, both_ways }.bias(table, length)
    }

    /// Attention without a scale: initial weights make up for it.
    fn attention<'b>(&self, b: &'b Builder, meeting: Meeting<'b>, p: f64) -> Tensor<'b> {
        let Meeting { name, queries, keys, bias } = meeting;
        let T5Spec { width, heads, head_dim, .. } = self.spec;
        let inner = heads * head_dim;
        let project = |part: &str, x: Tensor<'b>| {
            let shape = [x.shape()[0], x.shape()[1], heads, head_dim];
            x.matmul(b.param(&format!("{name}.{part}"), [width, inner])).reshape(shape)
        };
        let q = project("q", queries);
        let [k, v] = ["k", "v"].map(|part| project(part, keys));
        let wide = b.compute().accumulator();
        let scores = q.einsum(k, "bshd,bthd->bhst").cast(wide);
        let scores = bias.map_or(scores, |bias| scores + bias.cast(wide));
        let shares = scores.softmax().cast(b.compute()).dropout(p);
        let o = shares.einsum(v, "bhst,bthd->bshd");
        let o = o.reshape([queries.shape()[0], queries.shape()[1], inner]);
        o.matmul(b.param(&format!("{name}.out"), [inner, width]))
    }

    fn feed_forward<'b>(&self, b: &'b Builder, norm: &str, h: Tensor<'b>, p: f64) -> Tensor<'b> {
        let T5Spec { width, ffn, gated, .. } = self.spec;
        let x = self.norm(b, norm, h);
        let project = |name: &str| x.matmul(b.param(name, [width, ffn]));
        let inner = match gated {
            true => {
                let gate = project("mlp.gate").gelu();
                gate * project("mlp.up")
            }
            false => project("mlp.up").relu(),
        };
        h + inner.dropout(p).matmul(b.param("mlp.down", [ffn, width])).dropout(p)
    }

    fn rate(&self, purpose: Purpose) -> f64 {
        match purpose {
            Purpose::Train => self.dropout,
            Purpose::Evaluate | Purpose::Predict => 0.0,
        }
    }

    /// Initial weights as published: normal, so that what is summed over keeps its variance.
    fn init(&self) -> impl Fn(&str) -> Init {
        let T5Spec { width, heads, head_dim, ffn, .. } = self.spec;
        let over = |summed: usize| Init::Normal((summed as f64).powf(-0.5));
        move |name| match name.rsplit('.').next().unwrap_or(name) {
            "embed" => Init::Normal(1.0),
            "q" => over(width * head_dim),
            "out" => over(heads * head_dim),
            "down" => over(ffn),
            last if last.starts_with("norm") => Init::Constant(1.0),
            _ => over(width),
        }
    }

    fn check(&self, BatchShape { batch, seq }: BatchShape) -> Result<(), IrError> {
        let check = Check { model: "t5" };
        let s = &self.spec;
        let (width, heads, ffn) = (("width", s.width), ("heads", s.heads), ("ffn", s.ffn));
        let head_dim = ("head_dim", s.head_dim);
        let (vocab, batch, length) = (("vocab", s.vocab), ("batch", batch), ("seq", seq));
        let sizes = [("layers", s.layers), width, heads, head_dim, ffn, vocab, batch, length];
        check.sizes(&sizes)?;
        check.that(seq >= 2, || {
            "sequences of 1 token have no continuation; nearest that works: seq = 2".to_owned()
        })?;
        check.positive("norm_eps", self.spec.norm_eps)?;
        check.dropout(self.dropout)?;
        Distances::check(&check, self.spec.buckets, self.spec.far)?;
        for other in [width, ffn, vocab] {
            check.tensor(&[width, other])?;
        }
        check.tensor(&[width, heads, head_dim])?;
        check.tensor(&[batch, length, heads, head_dim])?;
        for last in [width, ffn, vocab] {
            check.tensor(&[batch, length, last])?;
        }
        check.tensor(&[batch, heads, length, length])?;
        // The rows of numbers that each query reads from.
        check.tensor(&[heads, length, length, ("2", 2)])
    }
}

impl Architecture for T5 {
    fn name(&self) -> &str {
        "t5"
    }

    fn spec(&self) -> Option<ModelSpec> {
        Some(ModelSpec::T5(self.spec.clone()))
    }

    fn unpredicted(&self, seq: usize) -> usize {
        Self::source(seq)
    }

    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
        // Sizes are the same for any length; parameters are counted with the shortest.
        let shape = BatchShape { seq: shape.seq.max(2), ..shape };
        self.check(shape)?;
        let (p, init) = (self.rate(purpose), self.init());
        let mut chain = Chain::new(self.name());
        chain.once(self.encoder_embed(shape, compute, p), &init)?;
        for (stack, block) in [
            ("encoder", self.encoder_block(shape, compute, p)),
            ("decoder", self.decoder_block(shape, compute, p)),
        ] {
            if stack == "decoder" {
                chain.once(self.decoder_embed(shape, compute, p), &init)?;
            }
            let table = format!("{stack}.bias");
            let shared = [("bias", &*table)];
            chain.repeat_sharing(
                &format!("{stack}.blocks"),
                self.spec.layers,
                block,
                &shared,
                &init,
            )?;
        }
        chain.once(self.head(shape, compute, purpose), &init)?;
        Ok(chain.finish())
    }
}
