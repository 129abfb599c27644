//! Rows of a table, chosen by ids.

use super::{OpDef, Shaped, Touched};
use crate::attr::Attrs;
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// `table[ids]`: operands table `[vocabulary, width]` and ids. Over a sharded vocabulary it is a
/// contraction whose kernel knows its offset: rows of other ranks contribute zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Embedding;

/// The table's gradient: operands ids and dy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EmbeddingGrad {
    /// Rows of the table.
    pub vocab: usize,
    /// The gradient's element type.
    pub out: DType,
}

impl OpDef for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let [_, width] = ins[0].shape[..] else {
            return Err(format!("the table is {}, expected two dims", ins[0]));
        };
        super::dtype_is("ids", ins[1], DType::I32)?;
        Ok(vec![(ins[0].dtype, [ins[1].shape.as_slice(), &[width]].concat())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("v w, ... -> ... w", ins, outs).linear(&[&[0]]).in_blocks("v")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let vocab = g.ty(g.input(0)).shape[0];
        let op = EmbeddingGrad { vocab, out: g.dtype(0) };
        g.set_to(0, op, &[g.input(1), g.dy()?])
    }

    /// Only the requested rows of the table are read: as much as is written.
    fn touches(&self, ins: &[Shaped], outs: &[Shaped]) -> Touched {
        let rows = super::bytes(&outs[0]);
        Touched { read: super::bytes(&ins[1]) + rows, written: rows }
    }
}

impl OpDef for EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("vocab", self.vocab).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        super::dtype_is("ids", ins[0], DType::I32)?;
        let Some((&width, rows)) = ins[1].shape.split_last() else {
            return Err(format!("dy is {}, expected the ids' dims and a width", ins[1]));
        };
        super::shape_is("ids", ins[0], rows)?;
        Ok(vec![(self.out, vec![self.vocab, width])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("..., ... w -> v w", ins, outs).linear(&[&[1]]).in_blocks("v")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(1, "second derivatives are not formed"))
    }
    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}
