//! Products of stored scores with the keys that are here: what attention with stored scores does in
//! each step of a ring.
//!
//! A row of scores has all keys of a sequence, and a step has only some of them: those that this rank
//! holds now. Each form is a plain product in which the columns of these keys take part, or are
//! written. Where they lie among all keys comes from the layout of the keys. Results are in the
//! accumulator type, so that many steps round as little as one. Only a pass that makes all steps may
//! emit this op.

use std::fmt;
use std::str::FromStr;

use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Which product it is. x are rows of queries `[b,s,h,d]`, y rows of keys that are here `[b,t,g,d]`, p
/// scores of all keys `[b,h,s,u]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KeyForm {
    /// x, y → p: the columns of the keys that are here are x·yᵀ; the others stay as they are, or are
    /// zero in the first step.
    Scores,
    /// p, y → x: the sum of the keys that are here, weighted by their columns.
    Weighted,
    /// p, x → y: for each key that is here the sum of the queries, weighted by its column.
    Sums,
}

/// Two operands of the form's types; then, if it goes on, the result of earlier steps, which have the
/// result's type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyProduct {
    /// Which product.
    pub form: KeyForm,
    /// How many key heads there are; query head `i` belongs to key head `i·g/h`.
    pub key_heads: usize,
    /// Of scores: whether those of keys after the query are −∞.
    pub causal: bool,
    /// Whether there were earlier steps.
    pub goes_on: bool,
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<KeyProduct, String> {
    Ok(KeyProduct {
        form: attrs.take("form")?,
        key_heads: attrs.take("key_heads")?,
        causal: attrs.take("causal")?,
        goes_on: attrs.take("goes_on")?,
    })
}

const X: &str = "b s (g r) d";
const Y: &str = "b t g d";
const P: &str = "b (g r) s u";

impl KeyProduct {
    /// The declarations of both operands and of the result.
    fn sides(&self) -> [&'static str; 3] {
        match self.form {
            KeyForm::Scores => [X, Y, P],
            KeyForm::Weighted => [P, Y, X],
            KeyForm::Sums => [P, X, Y],
        }
    }

    /// The shape of the result of operands of these shapes.
    fn shape(&self, a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
        let (&[a0, a1, a2, a3], &[b0, b1, b2, b3]) = (a, b) else { return None };
        let heads = |h: usize, g: usize| g == self.key_heads && g > 0 && h.is_multiple_of(g);
        let fits = match self.form {
            KeyForm::Scores => a0 == b0 && a3 == b3 && heads(a2, b2),
            KeyForm::Weighted => a0 == b0 && a3 == b1 && heads(a1, b2),
            KeyForm::Sums => a0 == b0 && a2 == b1 && a1 == b2 && heads(a1, self.key_heads),
        };
        fits.then(|| match self.form {
            KeyForm::Scores => vec![a0, a2, a1, b1],
            KeyForm::Weighted => vec![a0, a2, a1, b3],
            KeyForm::Sums => vec![a0, a3, self.key_heads, b3],
        })
    }
}

impl OpDef for KeyProduct {
    fn name(&self) -> &'static str {
        "key_product"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new()
            .with("form", self.form)
            .with("key_heads", self.key_heads)
            .with("causal", self.causal)
            .with("goes_on", self.goes_on)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, if self.goes_on { 3 } else { 2 })?;
        let (a, b) = (ins[0], ins[1]);
        super::dtype_is("the second operand", b, a.dtype)?;
        if self.causal && self.form != KeyForm::Scores {
            return Err(format!("form={} has no mask; only scores have one", self.form));
        }
        let shape = self.shape(&a.shape, &b.shape).filter(|_| a.dtype.is_float());
        let shape = shape.ok_or_else(|| {
            let [left, right, _] = self.sides();
            format!(
                "operands are {a} and {b}, expected floats [{left}] and [{right}] with g = {}",
                self.key_heads
            )
        })?;
        let result = (a.dtype.accumulator(), shape);
        if let Some(so_far) = ins.get(2) {
            super::dtype_is("the result so far", so_far, result.0)?;
            super::shape_is("the result so far", so_far, &result.1)?;
        }
        Ok(vec![result])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [left, right, result] = self.sides();
        let so_far = if self.goes_on { format!(", {result}") } else { String::new() };
        let text = format!("{left}, {right}{so_far} -> {result}");
        let rule = Rule::declare(&text, ins, outs).whole("d u").here("t");
        match self.goes_on && self.form != KeyForm::Scores {
            true => rule.adding(&[(2, 0)]),
            false => rule,
        }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "gradients are computed before an attention is cut into steps"))
    }

    /// What it goes on from is not needed afterwards.
    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.goes_on { &[(2, 0)] } else { &[] }
    }

    fn is_bulky(&self, _result: usize) -> bool {
        self.form == KeyForm::Scores
    }

    fn flops(&self, ins: &[&[usize]], outs: &[&[usize]]) -> u64 {
        let count = |shape: &[usize]| shape.iter().map(|&n| n as u64).product::<u64>();
        // Every form multiplies rows of queries by rows of the keys that are here.
        let (queries, keys) = match self.form {
            KeyForm::Scores => (ins[0], ins[1][1]),
            KeyForm::Weighted => (outs[0], ins[1][1]),
            KeyForm::Sums => (ins[1], outs[0][1]),
        };
        2 * count(queries) * keys as u64
    }
}

impl fmt::Display for KeyForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyForm::Scores => "scores",
            KeyForm::Weighted => "weighted",
            KeyForm::Sums => "sums",
        })
    }
}

impl FromStr for KeyForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "scores" => Ok(KeyForm::Scores),
            "weighted" => Ok(KeyForm::Weighted),
            "sums" => Ok(KeyForm::Sums),
            _ => Err(format!("`{text}` is not scores, weighted or sums")),
        }
    }
}
