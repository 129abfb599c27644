//! Cross-entropy, alone and fused with the projection before it.

use super::{OpDef, Product, Shaped, Touched};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Operands logits `[…, v]`, targets `[…]` (negative: ignored); results −log p(target), zero where
/// ignored, and the log-sum-exp of each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CrossEntropy;

/// `(softmax − onehot) · dnll`: operands logits, targets, log-sum-exp, dnll.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CrossEntropyGrad;

/// Projection, cross-entropy and both gradients in chunks of rows, so that the logits of only one
/// chunk exist at a time.
///
/// Operands x `[…, d]`, w (`[d, v]`, or `[v, d]` if `transposed`), targets, and dnll, one number
/// for all rows. Results: −log p(target), dx, dw. It replaces
/// `matmul, cross_entropy, broadcast, cross_entropy_grad, matmul, matmul`, with logits and their
/// gradient in the accumulator type, since they never leave the op; a pass inserts it where a
/// program has all of these.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinearCrossEntropy {
    /// Whether w is `[v, d]`, as a tied embedding is.
    pub transposed: bool,
    /// Rows per chunk.
    pub chunk: usize,
    /// The element type of dw.
    pub out: DType,
}

pub(super) fn read_linear(attrs: &mut AttrReader) -> Result<LinearCrossEntropy, String> {
    Ok(LinearCrossEntropy {
        transposed: attrs.take("transposed")?,
        chunk: attrs.take("chunk")?,
        out: attrs.take("out")?,
    })
}

fn rows<'a>(logits: &'a TensorType, targets: &TensorType) -> Result<&'a [usize], String> {
    let (Some((_, rows)), true) = (logits.shape.split_last(), logits.dtype.is_float()) else {
        return Err(format!("the first operand is {logits}, expected a float with a last dim"));
    };
    super::dtype_is("targets", targets, DType::I32)?;
    super::shape_is("targets", targets, rows)?;
    Ok(rows)
}

impl OpDef for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let row = (ins[0].dtype.accumulator(), rows(ins[0], ins[1])?.to_vec());
        Ok(vec![row.clone(), row])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... v, ... -> ..., ...", ins, outs).lowered("v").in_blocks("v")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let operands = [g.input(0), g.input(1), g.output(1), g.dy()?];
        g.set_to(0, CrossEntropyGrad, &operands)
    }

    fn exchanges(&self) -> usize {
        // The maximum, the sum of exponentials relative to it, and the target's logit.
        3
    }
}

impl OpDef for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 4)?;
        let rows = rows(ins[0], ins[1])?;
        for (what, ty) in [("the log-sum-exp", ins[2]), ("dnll", ins[3])] {
            super::shape_is(what, ty, rows)?;
            super::dtype_is(what, ty, ins[0].dtype.accumulator())?;
        }
        Ok(vec![(ins[0].dtype, ins[0].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... v, ..., ..., ... -> ... v", ins, outs).linear(&[&[3]]).in_blocks("v")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }
}

impl LinearCrossEntropy {
    /// The vocabulary size, from w's shape.
    pub fn vocab(&self, w: &[usize]) -> usize {
        w[usize::from(!self.transposed)]
    }
}

impl OpDef for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        "linear_cross_entropy"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new()
            .with("transposed", self.transposed)
            .with("chunk", self.chunk)
            .with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 4)?;
        let (x, w) = (ins[0], ins[1]);
        let rows = rows(x, ins[2])?.to_vec();
        let width = x.shape[rows.len()];
        if w.shape.len() != 2 || w.shape[usize::from(self.transposed)] != width {
            return Err(format!("x is {x} and w is {w}; the width of x must be a dim of w"));
        }
        super::dtype_is("w", w, x.dtype)?;
        if self.chunk == 0 {
            return Err("a chunk needs at least one row".to_owned());
        }
        super::shape_is("dnll", ins[3], &[])?;
        let accumulator = x.dtype.accumulator();
        super::dtype_is("dnll", ins[3], accumulator)?;
        Ok(vec![(accumulator, rows), (x.dtype, x.shape.clone()), (self.out, w.shape.clone())])
    }

    /// The vocabulary must not be sharded: otherwise dx would be a partial sum and the loss not.
    /// With a sharded vocabulary the ops stay separate, and the partitioner chooses how dx is
    /// summed.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let w = if self.transposed { "v d" } else { "d v" };
        let text = format!("... d, {w}, ..., -> ..., ... d, {w}");
        Rule::declare(&text, ins, outs).whole("d v")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "it already contains its gradient"))
    }

    /// The logits, dx and dw.
    fn products(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        let (x, vocab) = (ins[0], self.vocab(ins[1]));
        let (width, rows) = (x[x.len() - 1], x[..x.len() - 1].iter().product());
        let product = |rows, cols, inner| Product { batch: 1, rows, cols, inner };
        vec![product(rows, vocab, width), product(rows, width, vocab), product(width, vocab, rows)]
    }

    /// The logits of all rows pass through the scratch memory: a product writes them, the softmax
    /// reads them and writes their gradient, two products read that. They read x and w once more; w
    /// and the current dw are read for every chunk.
    fn touches(&self, ins: &[Shaped], outs: &[Shaped]) -> Touched {
        let (x, w, dw) = (super::bytes(&ins[0]), super::bytes(&ins[1]), super::bytes(&outs[2]));
        let (dtype, shape) = &ins[0];
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let chunks = rows.div_ceil(self.chunk) as u64;
        let logits = super::bytes(&(dtype.accumulator(), vec![rows, self.vocab(&ins[1].1)]));
        let others = super::bytes(&ins[2]) + super::bytes(&ins[3]);
        let (nll, dx) = (super::bytes(&outs[0]), super::bytes(&outs[1]));
        let again = chunks.saturating_sub(1) * dw;
        Touched {
            read: 2 * x + 2 * chunks * w + others + 3 * logits + again,
            written: nll + dx + dw + 2 * logits + again,
        }
    }

    fn accumulates(&self, result: usize) -> bool {
        result == 2
    }
}
