//! Attention over the keys that are here: one step of an attention whose keys come in parts.
//!
//! `attend` goes on from the result of earlier steps: the attention over their keys, and its
//! log-sum-exp. Both are kept in the accumulator type, so that many steps round as little as one.
//! `attend_grad` is the gradient by the keys that are here; it adds to what earlier steps found.
//! Only the last step's result is the attention over all keys, so only a pass that makes all steps
//! may emit these ops. A query's place among all queries and a key's among all keys come from the
//! layouts, so masks and random numbers are those of the whole.

use super::attention::{AttentionKind, check_qkv};
use super::random::key_is;
use super::{Attention, OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Operands q, k, v as in [`Attention`]; then, if it goes on, o and the log-sum-exp so far; then a
/// random key if there is dropout. Results: o and the log-sum-exp, in the accumulator type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attend {
    /// The attention over all keys, without stored scores.
    pub of: Attention,
    /// Whether there were earlier steps.
    pub goes_on: bool,
}

/// Operands q, k, v, o, the log-sum-exp and do as in [`AttentionGrad`](super::AttentionGrad), o and
/// log-sum-exp of all keys; then, if it goes on, dq, dk and dv so far; then a random key if there is
/// dropout. Results: dq, dk and dv, in the accumulator type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttendGrad {
    /// The attention over all keys, without stored scores.
    pub of: Attention,
    /// Whether there were earlier steps.
    pub goes_on: bool,
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<(Attention, bool), String> {
    let of = Attention {
        kind: AttentionKind::Flash,
        causal: attrs.take("causal")?,
        dropout: attrs.take("dropout")?,
        site: attrs.take("site")?,
    };
    Ok((of, attrs.take("goes_on")?))
}

const QKV: &str = "b s (g r) d, b t g d, b t g d";
const STATE: &str = "b s (g r) d, b (g r) s";

fn attrs(of: &Attention, goes_on: bool) -> Attrs {
    Attrs::new()
        .with("causal", of.causal)
        .with("dropout", of.dropout)
        .with("site", of.site)
        .with("goes_on", goes_on)
}

/// Checks q, k, v and the random key, which is the last operand.
fn check(of: &Attention, ins: &[&TensorType], operands: usize) -> Result<(), String> {
    super::arity(ins, operands + usize::from(of.drops()))?;
    check_qkv(ins)?;
    if !(0.0..1.0).contains(&of.dropout) {
        return Err(format!("dropout = {} is not a probability below 1", of.dropout));
    }
    match of.drops() {
        true => key_is(ins[operands]),
        false => Ok(()),
    }
}

/// Checks operands against the type and shape that they must have.
fn are(ins: &[&TensorType], names: &[&str], expected: &[Shaped]) -> Result<(), String> {
    for ((ty, what), (dtype, shape)) in ins.iter().zip(names).zip(expected) {
        super::dtype_is(what, ty, *dtype)?;
        super::shape_is(what, ty, shape)?;
    }
    Ok(())
}

impl OpDef for Attend {
    fn name(&self) -> &'static str {
        "attend"
    }

    fn attrs(&self) -> Attrs {
        attrs(&self.of, self.goes_on)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        check(&self.of, ins, if self.goes_on { 5 } else { 3 })?;
        let (q, wide) = (ins[0], ins[0].dtype.accumulator());
        let results =
            vec![(wide, q.shape.clone()), (wide, vec![q.shape[0], q.shape[2], q.shape[1]])];
        if self.goes_on {
            are(&ins[3..5], &["o so far", "the log-sum-exp so far"], &results)?;
        }
        Ok(results)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let state = if self.goes_on { format!(", {STATE}") } else { String::new() };
        let key = if self.of.drops() { ", key" } else { "" };
        let text = format!("{QKV}{state}{key} -> {STATE}");
        Rule::declare(&text, ins, outs).whole("d key").here("t")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "gradients are computed before an attention is cut into steps"))
    }

    /// What it goes on from is not needed afterwards.
    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.goes_on { &[(3, 0), (4, 1)] } else { &[] }
    }

    fn flops(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> u64 {
        super::attention::products(ins, 2, self.of.causal)
    }
}

impl OpDef for AttendGrad {
    fn name(&self) -> &'static str {
        "attend_grad"
    }

    fn attrs(&self) -> Attrs {
        attrs(&self.of, self.goes_on)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        check(&self.of, ins, if self.goes_on { 9 } else { 6 })?;
        let (q, wide) = (ins[0], ins[0].dtype.accumulator());
        let lse = (wide, vec![q.shape[0], q.shape[2], q.shape[1]]);
        let like_q = (q.dtype, q.shape.clone());
        let kept = [like_q.clone(), lse, like_q];
        are(&ins[3..6], &["o", "the log-sum-exp", "do"], &kept)?;
        let results: Vec<Shaped> = ins[..3].iter().map(|ty| (wide, ty.shape.clone())).collect();
        if self.goes_on {
            are(&ins[6..9], &["dq so far", "dk so far", "dv so far"], &results)?;
        }
        Ok(results)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let sums = if self.goes_on { format!(", {QKV}") } else { String::new() };
        let key = if self.of.drops() { ", key" } else { "" };
        let text = format!("{QKV}, {STATE}, b s (g r) d{sums}{key} -> {QKV}");
        let rule = Rule::declare(&text, ins, outs).whole("d key").here("t").linear(&[&[5]]);
        match self.goes_on {
            true => rule.adding(&[(6, 0), (7, 1), (8, 2)]),
            false => rule,
        }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not supported"))
    }

    /// What it adds to is not needed afterwards.
    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.goes_on { &[(6, 0), (7, 1), (8, 2)] } else { &[] }
    }

    fn flops(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> u64 {
        super::attention::products(ins, 5, self.of.causal)
    }
}
