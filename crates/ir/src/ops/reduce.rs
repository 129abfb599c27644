//! Sums and maxima over dims, and the reverse: repetition along new dims.

use super::{Binary, BinaryKind, Compare, CompareKind, OpDef, Select, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// What a reduction computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum ReduceKind {
    Sum,
    Max,
}

/// A reduction over some dims, which the result does not have.
#[derive(Clone, PartialEq, Debug)]
pub struct Reduce {
    /// What is computed.
    pub kind: ReduceKind,
    /// The dims reduced, ascending.
    pub dims: Vec<usize>,
    /// The result's element type.
    pub out: DType,
}

/// Repetition along new dims: the operand's dims are those of `shape` that are not in `dims`.
#[derive(Clone, PartialEq, Debug)]
pub struct Broadcast {
    /// The result's shape.
    pub shape: Vec<usize>,
    /// The dims that are new, ascending.
    pub dims: Vec<usize>,
}

pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Result<Reduce, String> {
    let kind = if name == "sum" { ReduceKind::Sum } else { ReduceKind::Max };
    Ok(Reduce { kind, dims: attrs.take_list("dims")?, out: attrs.take("out")? })
}

fn without<T: Copy>(items: &[T], dims: &[usize]) -> Vec<T> {
    let kept = items.iter().enumerate().filter(|(i, _)| !dims.contains(i));
    kept.map(|(_, &item)| item).collect()
}

/// Declares `a b c -> b` for a tensor of `rank` dims of which `dims` are missing on one side.
fn letters(rank: usize, dims: &[usize]) -> (String, String) {
    let names: Vec<usize> = (0..rank).collect();
    let text = |ids: &[usize]| ids.iter().map(|i| format!("x{i}")).collect::<Vec<_>>().join(" ");
    (text(&names), text(&without(&names, dims)))
}

impl OpDef for Reduce {
    fn name(&self) -> &'static str {
        match self.kind {
            ReduceKind::Sum => "sum",
            ReduceKind::Max => "max_over",
        }
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().list("dims", &self.dims).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let rank = ins[0].shape.len();
        if self.dims.iter().any(|&d| d >= rank) || !self.dims.is_sorted_by(|a, b| a < b) {
            return Err(format!("cannot reduce the dims {:?} of {}", self.dims, ins[0]));
        }
        if self.kind == ReduceKind::Max && self.out != ins[0].dtype {
            return Err(format!(
                "the maximum of {} must have its element type, not {}",
                ins[0], self.out
            ));
        }
        Ok(vec![(self.out, without(&ins[0].shape, &self.dims))])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let (full, kept) = letters(ins[0].len(), &self.dims);
        let rule = Rule::declare(&format!("{full} -> {kept}"), ins, outs);
        match self.kind {
            ReduceKind::Sum => rule.linear(&[&[0]]),
            // A partial maximum is not a partial sum, so the reduced dims stay whole.
            ReduceKind::Max => {
                let names: Vec<String> = self.dims.iter().map(|d| format!("x{d}")).collect();
                rule.whole(&names.join(" "))
            }
        }
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (x, dy) = (g.input(0), g.dy()?);
        let ty = g.ty(x).clone();
        let spread = Broadcast { shape: ty.shape, dims: self.dims.clone() };
        let spread_dy = g.emit(spread.clone(), &[dy])?;
        match self.kind {
            ReduceKind::Sum => g.set(0, spread_dy),
            // Divided equally among the elements that equal the maximum, as in PyTorch's amax.
            ReduceKind::Max => {
                let top = g.emit(spread.clone(), &[g.output(0)])?;
                let hit = g.emit(Compare { kind: CompareKind::Eq }, &[x, top])?;
                let (one, zero) = (g.constant_like(x, 1.0)?, g.constant_like(x, 0.0)?);
                let hits = g.emit(Select, &[hit, one, zero])?;
                let sum = Reduce { kind: ReduceKind::Sum, ..self.clone() };
                let count = g.emit(sum, &[hits])?;
                let count = g.emit(spread, &[count])?;
                let share = g.emit(Binary { kind: BinaryKind::Div }, &[spread_dy, count])?;
                g.set_to(0, Binary { kind: BinaryKind::Mul }, &[share, hits])
            }
        }
    }
    fn accumulates(&self, _result: usize) -> bool {
        self.kind == ReduceKind::Sum
    }
}

impl OpDef for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().list("shape", &self.shape).list("dims", &self.dims)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let (rank, dims) = (self.shape.len(), &self.dims);
        if dims.iter().any(|&d| d >= rank) || !dims.is_sorted_by(|a, b| a < b) {
            return Err(format!("{dims:?} are not ascending dims of the shape {:?}", self.shape));
        }
        super::shape_is("the operand", ins[0], &without(&self.shape, dims))?;
        Ok(vec![(ins[0].dtype, self.shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let (full, kept) = letters(self.shape.len(), &self.dims);
        Rule::declare(&format!("{kept} -> {full}"), ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let dims = self.dims.clone();
        let op = Reduce { kind: ReduceKind::Sum, dims, out: g.dtype(0) };
        g.set_to(0, op, &[g.dy()?])
    }
}
