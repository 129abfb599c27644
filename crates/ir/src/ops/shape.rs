//! Ops that move elements without computing: transpose, slice, pad, concatenate.

use super::{OpDef, Shaped, Touched};
use crate::attr::Attrs;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// A permutation of dims: result dim `i` is operand dim `perm[i]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Transpose {
    /// Which operand dim each result dim is.
    pub perm: Vec<usize>,
}

/// `len` elements of one dim, from `start`.
#[derive(Clone, PartialEq, Debug)]
pub struct Slice {
    /// The dim.
    pub dim: usize,
    /// The first element kept.
    pub start: usize,
    /// How many are kept.
    pub len: usize,
}

/// Zeros before and after the elements of one dim.
#[derive(Clone, PartialEq, Debug)]
pub struct Pad {
    /// The dim.
    pub dim: usize,
    /// Zeros before.
    pub before: usize,
    /// Zeros after.
    pub after: usize,
}

/// Concatenates operands along a dim.
#[derive(Clone, PartialEq, Debug)]
pub struct Concat {
    /// The dim.
    pub dim: usize,
}

impl OpDef for Transpose {
    fn name(&self) -> &'static str {
        "transpose"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().list("perm", &self.perm)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if sorted != (0..ins[0].shape.len()).collect::<Vec<_>>() {
            return Err(format!("{:?} is not a permutation of the dims of {}", self.perm, ins[0]));
        }
        Ok(vec![(ins[0].dtype, self.perm.iter().map(|&p| ins[0].shape[p]).collect())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let names = |ids: &mut dyn Iterator<Item = usize>| {
            ids.map(|i| format!("x{i}")).collect::<Vec<_>>().join(" ")
        };
        let left = names(&mut (0..self.perm.len()));
        let right = names(&mut self.perm.iter().copied());
        Rule::declare(&format!("{left} -> {right}"), ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let mut perm = vec![0; self.perm.len()];
        for (i, &p) in self.perm.iter().enumerate() {
            perm[p] = i;
        }
        g.set_to(0, Transpose { perm }, &[g.dy()?])
    }
}

/// The rule of an op that treats all dims in the same way except one, of which it needs every
/// element. That dim has a different extent in the result.
fn along(dim: usize, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
    let side = |prefix: &str, rank: usize| {
        let name = |i| {
            if i == dim { format!("{prefix}{i}") } else { format!("x{i}") }
        };
        (0..rank).map(name).collect::<Vec<_>>().join(" ")
    };
    let left: Vec<String> =
        ins.iter().enumerate().map(|(k, s)| side(&format!("i{k}_"), s.len())).collect();
    let right = side("o", outs[0].len());
    let whole: Vec<String> = (0..ins.len()).map(|k| format!("i{k}_{dim}")).collect();
    let all: Vec<usize> = (0..ins.len()).collect();
    Rule::declare(&format!("{} -> {right}", left.join(", ")), ins, outs)
        .whole(&format!("{} o{dim}", whole.join(" ")))
        .linear(&[&all])
}

impl OpDef for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim).with("start", self.start).with("len", self.len)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut shape = ins[0].shape.clone();
        match shape.get_mut(self.dim) {
            Some(size) if self.start <= *size && self.len <= *size - self.start => *size = self.len,
            _ => {
                return Err(format!(
                    "{} elements from {} of dim {} are not all in {}",
                    self.len, self.start, self.dim, ins[0]
                ));
            }
        }
        Ok(vec![(ins[0].dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    /// Only what is kept is read.
    fn touches(&self, _ins: &[Shaped], outs: &[Shaped]) -> Touched {
        let kept = super::bytes(&outs[0]);
        Touched { read: kept, written: kept }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let size = g.ty(g.input(0)).shape[self.dim];
        let after = size - self.start - self.len;
        g.set_to(0, Pad { dim: self.dim, before: self.start, after }, &[g.dy()?])
    }
}

impl OpDef for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim).with("before", self.before).with("after", self.after)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut shape = ins[0].shape.clone();
        let size = shape.get_mut(self.dim).ok_or(format!("{} has no dim {}", ins[0], self.dim))?;
        *size =
            (size.checked_add(self.before)).and_then(|n| n.checked_add(self.after)).ok_or_else(
                || format!("padding with {} and {} zeros is too much", self.before, self.after),
            )?;
        Ok(vec![(ins[0].dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let len = g.ty(g.input(0)).shape[self.dim];
        g.set_to(0, Slice { dim: self.dim, start: self.before, len }, &[g.dy()?])
    }
}

impl OpDef for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let first = ins.first().ok_or("takes at least one operand")?;
        let mut shape = first.shape.clone();
        if self.dim >= shape.len() {
            return Err(format!("{first} has no dim {}", self.dim));
        }
        for other in &ins[1..] {
            let fits = other.dtype == first.dtype
                && other.shape.len() == shape.len()
                && (0..shape.len()).all(|i| i == self.dim || other.shape[i] == shape[i]);
            if !fits {
                return Err(format!("{other} does not continue {first} along dim {}", self.dim));
            }
            shape[self.dim] = (shape[self.dim].checked_add(other.shape[self.dim]))
                .ok_or_else(|| format!("dim {} would be too long", self.dim))?;
        }
        Ok(vec![(first.dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let mut start = 0;
        for i in 0..g.inputs() {
            let len = g.ty(g.input(i)).shape[self.dim];
            g.set_to(i, Slice { dim: self.dim, start, len }, &[g.dy()?])?;
            start += len;
        }
        Ok(())
    }
}
