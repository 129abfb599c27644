//! LLaMA (Touvron et al., 2023): RMSNorm before each half of a block, rotary positions, grouped-query
//! attention, SwiGLU, no biases.

use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{Builder, DType, IrError, Model, Tensor};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;
use crate::experts::{Experts, Router};
use crate::hf::{LlamaSpec, MixtralSpec, ModelSpec};
use crate::language::{self, Stream};

/// A LLaMA model.
#[derive(Clone, PartialEq, Debug)]
pub struct Llama {
    /// Its sizes.
    pub spec: LlamaSpec,
    /// What attention keeps for its gradient.
    pub attention: AttentionKind,
    /// The standard deviation of initial weights.
    pub init_std: f64,
    /// Experts in place of the feed-forward part, in some layers or all.
    pub experts: Option<Experts>,
    /// Whether the residual stream is kept in the accumulator type of the compute type.
    pub wide_residual: bool,
}

impl Llama {
    /// A model of these sizes, with flash attention.
    pub fn new(spec: LlamaSpec) -> Self {
        let attention = AttentionKind::Flash;
        Self { spec, attention, init_std: 0.02, experts: None, wide_residual: false }
    }

    fn embed(&self, BatchShape { batch, seq }: BatchShape, compute: DType) -> Builder {
        let b = Builder::new("embed", compute);
        let ids = b.data(port::IDS, DType::I32, [batch, seq]);
        let table = b.param("embed", [self.spec.vocab, self.spec.width]);
        b.output(port::H, self.stream(compute).widen(table.embedding(ids)));
        b
    }

    /// A block, with experts or a dense feed-forward part.
    fn block(
        &self,
        shape: BatchShape,
        compute: DType,
        experts: Option<(&str, Experts, Purpose)>,
    ) -> Builder {
        let (s, BatchShape { batch, seq }) = (&self.spec, shape);
        let (d, size) = (s.width, s.head_dim);
        let (q_width, kv_width) = (s.heads * size, s.kv_heads * size);
        let rotary = s.rope.rotary();

        let name = experts.as_ref().map_or("block", |(name, ..)| name);
        let b = Builder::new(name, compute);
        let stream = self.stream(compute);
        let h = stream.enter(&b, [batch, seq, d]);

        let x = self.norm(&b, "norm1", h, compute);
        let q = x.matmul(b.param("attn.q", [d, q_width]));
        let k = x.matmul(b.param("attn.k", [d, kv_width]));
        let v = x.matmul(b.param("attn.v", [d, kv_width]));
        let q = q.reshape([batch, seq, s.heads, size]).rotary(rotary);
        let k = k.reshape([batch, seq, s.kv_heads, size]).rotary(rotary);
        let v = v.reshape([batch, seq, s.kv_heads, size]);
        let o = q.attention(k, v, self.attention, 0.0);
        let o = o.reshape([batch, seq, q_width]);
        let h = stream.add(h, o.matmul(b.param("attn.out", [q_width, d])));

        let x = self.norm(&b, "norm2", h, compute);
        let y = match experts {
            Some((_, experts, purpose)) => {
                let chosen = experts.apply(&b, x, shape, purpose);
                let shared = experts.shared_ffn().map(|ffn| swiglu(&b, x, "shared", ffn));
                let dense = experts.residual.then(|| swiglu(&b, x, "mlp", s.ffn));
                [shared, dense].into_iter().flatten().fold(chosen, |sum, part| sum + part)
            }
            None => swiglu(&b, x, "mlp", s.ffn),
        };
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
        let gain = self.stream(compute).widen(b.param(name, [self.spec.width]));
        h.rms_norm(gain, self.spec.norm_eps).cast(compute)
    }

    fn check(&self, shape: BatchShape, purpose: Purpose) -> Result<(), IrError> {
        let (s, BatchShape { batch, seq }) = (&self.spec, shape);
        let check = Check { model: "llama" };
        let (heads, kv_heads) = (("heads", s.heads), ("kv_heads", s.kv_heads));
        let (width, size, ffn) = (("width", s.width), ("head_dim", s.head_dim), ("ffn", s.ffn));
        let (vocab, batch, length) = (("vocab", s.vocab), ("batch", batch), ("seq", seq));
        check.sizes(&[
            ("layers", s.layers),
            width,
            heads,
            kv_heads,
            size,
            ffn,
            vocab,
            batch,
            length,
        ])?;
        check.divides(kv_heads, heads)?;
        check.pairs(s.head_dim)?;
        check.context(seq, s.context)?;
        check.positive("norm_eps", s.norm_eps)?;
        check.positive("rope.theta", s.rope.theta)?;
        check.positive("init_std", self.init_std)?;
        for dims in [
            &[width, heads, size][..],
            &[width, ffn],
            &[width, vocab],
            &[batch, length, width],
            &[batch, length, heads, size],
            &[batch, length, ffn],
            &[batch, length, vocab],
        ] {
            check.tensor(dims)?;
        }
        if let Some(experts) = &self.experts {
            experts.check(&check, s.width, shape, purpose)?;
        }
        check.scores(self.attention, &[batch, heads, length, length])
    }
}

/// A feed-forward part that all tokens take.
fn swiglu<'b>(b: &'b Builder, x: Tensor<'b>, name: &str, ffn: usize) -> Tensor<'b> {
    let d = x.shape()[2];
    let gate = x.matmul(b.param(&format!("{name}.gate"), [d, ffn])).silu();
    let up = x.matmul(b.param(&format!("{name}.up"), [d, ffn]));
    (gate * up).matmul(b.param(&format!("{name}.down"), [ffn, d]))
}

impl Architecture for Llama {
    fn name(&self) -> &str {
        "llama"
    }

    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
        self.check(shape, purpose)?;
        let usual = language::init(self.init_std, self.spec.layers);
        let init = |name: &str| {
            let own = self.experts.as_ref().and_then(|own| own.init(name, self.spec.width));
            own.unwrap_or_else(|| usual(name))
        };
        let mut chain = Chain::new(self.name());
        chain.once(self.embed(shape, compute), init)?;
        for layer in 0..self.spec.layers {
            let own = self.experts.as_ref().and_then(|own| own.at(layer, self.spec.layers));
            let own = own.map(|(name, experts)| (name, experts, purpose));
            let block = self.block(shape, compute, own);
            chain.under(&format!("blocks.{layer}"), block, init)?;
        }
        chain.once(self.head(shape, compute, purpose), init)?;
        let dealt = self.experts.as_ref().map_or(1, |experts| experts.dealt);
        Ok(chain.finish().dealing(dealt, |param| Experts::divides(&param.name)))
    }

    fn with_more_room(&self) -> Option<Box<dyn Architecture>> {
        let experts = self.experts.as_ref()?.with_more_room()?;
        Some(Box::new(Self { experts: Some(experts), ..self.clone() }))
    }

    fn with_rows_at_home(&self) -> Option<Box<dyn Architecture>> {
        let experts = self.experts.as_ref()?.with_rows_at_home()?;
        Some(Box::new(Self { experts: Some(experts), ..self.clone() }))
    }

    fn spec(&self) -> Option<ModelSpec> {
        let base = self.spec.clone();
        Some(match &self.experts {
            None => ModelSpec::Llama(base),
            Some(experts) => ModelSpec::Mixtral(MixtralSpec {
                base,
                experts: experts.count,
                top_k: experts.router.choices(),
                expert_ffn: experts.ffn,
                every: experts.every,
                shared: experts.shared,
                residual: experts.residual,
                normalised: experts.router != Router::Switch,
                late: experts.late,
                noisy: matches!(experts.router, Router::Noisy { .. }),
            }),
        })
    }
}
