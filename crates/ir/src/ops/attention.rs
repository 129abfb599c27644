//! Scaled dot-product attention, without stored scores (flash) and with them (materialised).

use std::fmt;
use std::str::FromStr;

use super::random::key_is;
use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// What an attention keeps for its gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AttentionKind {
    /// The log-sum-exp of each row of scores (Dao et al., 2022): scores are recomputed.
    Flash,
    /// The probabilities, and after dropout those too: quadratic in the sequence.
    Materialised,
}

/// Operands q `[b,s,h,d]`, k and v `[b,t,g,d]` with `h` a multiple of `g` (query head `i` reads key
/// head `i·g/h`), and a random key if `dropout > 0`. Scores are scaled by 1/√d.
/// [`keeps`](crate::random::keeps) decides which probabilities are dropped. A query that sees no
/// key at all (causal, more queries than keys) gives zeros, with log-sum-exp −∞.
///
/// Results: o `[b,s,h,d]`; then flash: log-sum-exp `[b,h,s]`; materialised: probabilities
/// `[b,h,s,t]` and, with dropout, the dropped probabilities.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    /// What is kept.
    pub kind: AttentionKind,
    /// Whether a query sees only keys up to its own position (aligned at the end).
    pub causal: bool,
    /// The dropout rate of the probabilities.
    pub dropout: f64,
    /// Distinguishes the random ops of one segment.
    pub site: u32,
}

/// Results dq, dk, dv. Operands q, k, v, o; then flash: log-sum-exp; materialised: probabilities
/// and, with dropout, the dropped probabilities; then do and, with dropout, the key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionGrad {
    /// The attention differentiated.
    pub of: Attention,
}

impl Attention {
    /// Whether there is dropout, so that a random key is needed.
    pub fn drops(&self) -> bool {
        self.dropout > 0.0
    }

    /// Which results the gradient reads; o is kept anyway, for the projection after it.
    fn kept(&self) -> std::ops::Range<usize> {
        match (self.kind, self.drops()) {
            (AttentionKind::Flash, _) | (AttentionKind::Materialised, false) => 0..2,
            (AttentionKind::Materialised, true) => 0..3,
        }
    }

    /// The declaration of result `i`'s dims.
    fn result(&self, i: usize) -> &'static str {
        match (i, self.kind) {
            (0, _) => "b s (g r) d",
            (_, AttentionKind::Flash) => "b (g r) s",
            (_, AttentionKind::Materialised) => "b (g r) s t",
        }
    }
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<Attention, String> {
    Ok(Attention {
        kind: attrs.take("kind")?,
        causal: attrs.take("causal")?,
        dropout: attrs.take("dropout")?,
        site: attrs.take("site")?,
    })
}

const QKV: &str = "b s (g r) d, b t g d, b t g d";

pub(super) fn check_qkv(ins: &[&TensorType]) -> Result<(), String> {
    let (q, k, v) = (ins[0], ins[1], ins[2]);
    let ([b, _, h, d], [kb, _, g, kd]) = (&q.shape[..], &k.shape[..]) else {
        return Err(format!("q is {q} and k is {k}, expected [batch, sequence, heads, size]"));
    };
    if b != kb || d != kd || !h.is_multiple_of(*g) {
        return Err(format!(
            "q is {q} and k is {k}; batch and head size must agree, and query heads be a \
             multiple of key heads"
        ));
    }
    super::shape_is("v", v, &k.shape)?;
    super::dtype_is("k", k, q.dtype)?;
    super::dtype_is("v", v, q.dtype)
}

impl OpDef for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new()
            .with("kind", self.kind)
            .with("causal", self.causal)
            .with("dropout", self.dropout)
            .with("site", self.site)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, if self.drops() { 4 } else { 3 })?;
        check_qkv(ins)?;
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(format!("dropout = {} is not a probability below 1", self.dropout));
        }
        if self.drops() {
            key_is(ins[3])?;
        }
        let q = ins[0];
        let (b, s, h, t) = (q.shape[0], q.shape[1], q.shape[2], ins[1].shape[1]);
        let mut results = vec![(q.dtype, q.shape.clone())];
        match self.kind {
            AttentionKind::Flash => results.push((q.dtype.accumulator(), vec![b, h, s])),
            AttentionKind::Materialised => {
                let probabilities = (q.dtype, vec![b, h, s, t]);
                results.extend(vec![probabilities; if self.drops() { 2 } else { 1 }]);
            }
        }
        Ok(results)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let key = if self.drops() { ", key" } else { "" };
        let results: Vec<&str> = (0..outs.len()).map(|i| self.result(i)).collect();
        Rule::declare(&format!("{QKV}{key} -> {}", results.join(", ")), ins, outs).whole("t d key")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let mut operands = vec![g.input(0), g.input(1), g.input(2)];
        operands.extend(self.kept().map(|i| g.output(i)));
        operands.push(g.dy()?);
        if self.drops() {
            operands.push(g.input(3));
        }
        g.set_all_to(AttentionGrad { of: *self }, &operands)
    }

    /// The probabilities; not o, which the projection after it keeps anyway.
    fn is_bulky(&self, result: usize) -> bool {
        self.kind == AttentionKind::Materialised && result > 0
    }

    fn flops(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> u64 {
        products(ins, 2, self.causal)
    }
}

/// FLOPs of `n` products of the size of the scores; a causal mask halves them.
pub(super) fn products(ins: &[&[usize]], n: u64, causal: bool) -> u64 {
    let (q, t) = (ins[0], ins[1][1] as u64);
    let full = 2 * n * q.iter().map(|&x| x as u64).product::<u64>() * t;
    if causal { full / 2 } else { full }
}

impl OpDef for AttentionGrad {
    fn name(&self) -> &'static str {
        "attention_grad"
    }

    fn attrs(&self) -> Attrs {
        self.of.attrs()
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let kept = self.of.kept().len();
        super::arity(ins, 4 + kept + usize::from(self.of.drops()))?;
        // The random key, if there is one, comes last here and fourth in the forward.
        let mut forward = ins[..3].to_vec();
        forward.extend(&ins[4 + kept..]);
        let results = self.of.infer(&forward)?;
        let what = ["o", "the log-sum-exp or the probabilities", "the dropped probabilities"];
        for ((what, ty), (dtype, shape)) in what.iter().zip(&ins[3..]).zip(&results) {
            super::dtype_is(what, ty, *dtype)?;
            super::shape_is(what, ty, shape)?;
        }
        super::dtype_is("do", ins[3 + kept], ins[0].dtype)?;
        super::shape_is("do", ins[3 + kept], &ins[0].shape)?;
        Ok(ins[..3].iter().map(|ty| (ty.dtype, ty.shape.clone())).collect())
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let kept: Vec<&str> = self.of.kept().map(|i| self.of.result(i)).collect();
        let key = if self.of.drops() { ", key" } else { "" };
        let text = format!("{QKV}, {}, b s (g r) d{key} -> {QKV}", kept.join(", "));
        let dy = 3 + kept.len();
        Rule::declare(&text, ins, outs).whole("t d key").linear(&[&[dy]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not supported"))
    }

    fn flops(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> u64 {
        let n = if self.of.kind == AttentionKind::Flash { 5 } else { 4 };
        products(ins, n, self.of.causal)
    }
}

impl fmt::Display for AttentionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AttentionKind::Flash => "flash",
            AttentionKind::Materialised => "materialised",
        })
    }
}

impl FromStr for AttentionKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "flash" => Ok(AttentionKind::Flash),
            "materialised" => Ok(AttentionKind::Materialised),
            _ => Err(format!("`{text}` is not flash or materialised")),
        }
    }
}
