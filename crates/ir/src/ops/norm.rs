//! Normalisation over the last dim, with the statistics its gradient needs as results.

use super::{OpDef, Shaped};
use crate::attr::Attrs;
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// `x · rstd · gain` with `rstd = 1/√(mean(x²) + eps)` (Zhang and Sennrich, 2019): operands x,
/// gain; results y, rstd.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub eps: f64,
}

/// Operands x, gain, rstd, dy; results dx, dgain.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RmsNormGrad {
    /// The element type of dgain.
    pub out: DType,
}

/// `(x − mean) · rstd · gain + bias` (Ba et al., 2016): operands x, gain, bias; results y, mean,
/// rstd.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

/// Operands x, gain, mean, rstd, dy; results dx, dgain, dbias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LayerNormGrad {
    /// The element type of dgain and dbias.
    pub out: DType,
}

/// The result shape and the statistics' shape, after checking that the vectors fit the last dim.
fn shapes(x: &TensorType, vectors: &[&TensorType]) -> Result<(Shaped, Shaped), String> {
    let (Some((width, rows)), true) = (x.shape.split_last(), x.dtype.is_float()) else {
        return Err(format!("x is {x}, expected a float with at least one dim"));
    };
    for vector in vectors {
        super::dtype_is("a gain or bias", vector, x.dtype)?;
        super::shape_is("a gain or bias", vector, &[*width])?;
    }
    Ok(((x.dtype, x.shape.clone()), (x.dtype.accumulator(), rows.to_vec())))
}

fn statistics(x: &TensorType, stats: &[&TensorType], dy: &TensorType) -> Result<(), String> {
    super::shape_is("dy", dy, &x.shape)?;
    super::dtype_is("dy", dy, x.dtype)?;
    for stat in stats {
        super::dtype_is("a statistic", stat, x.dtype.accumulator())?;
        super::shape_is("a statistic", stat, &x.shape[..x.shape.len() - 1])?;
    }
    Ok(())
}

impl OpDef for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("eps", self.eps)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let (y, stat) = shapes(ins[0], &ins[1..])?;
        Ok(vec![y, stat])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d, d -> ... d, ...", ins, outs).lowered("d")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let operands = [g.input(0), g.input(1), g.output(1), g.dy()?];
        g.set_all_to(RmsNormGrad { out: g.dtype(1) }, &operands)
    }

    fn exchanges(&self) -> usize {
        // The sum of squares.
        1
    }
}

impl OpDef for RmsNormGrad {
    fn name(&self) -> &'static str {
        "rms_norm_grad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 4)?;
        let (dx, _) = shapes(ins[0], &ins[1..2])?;
        statistics(ins[0], &ins[2..3], ins[3])?;
        Ok(vec![dx, (self.out, ins[1].shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d, d, ..., ... d -> ... d, d", ins, outs).lowered("d").linear(&[&[3]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn exchanges(&self) -> usize {
        // The sum of x·dy·gain.
        1
    }

    fn accumulates(&self, result: usize) -> bool {
        result > 0
    }
}

impl OpDef for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("eps", self.eps)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 3)?;
        let (y, stat) = shapes(ins[0], &ins[1..])?;
        Ok(vec![y, stat.clone(), stat])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d, d, d -> ... d, ..., ...", ins, outs).lowered("d")
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let operands = [g.input(0), g.input(1), g.output(1), g.output(2), g.dy()?];
        g.set_all_to(LayerNormGrad { out: g.dtype(1) }, &operands)
    }

    fn exchanges(&self) -> usize {
        // The mean and the sum of squares around it.
        2
    }
}

impl OpDef for LayerNormGrad {
    fn name(&self) -> &'static str {
        "layer_norm_grad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 5)?;
        let (dx, _) = shapes(ins[0], &ins[1..2])?;
        statistics(ins[0], &ins[2..4], ins[4])?;
        let vector = (self.out, ins[1].shape.clone());
        Ok(vec![dx, vector.clone(), vector])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::declare("... d, d, ..., ..., ... d -> ... d, d, d", ins, outs)
            .lowered("d")
            .linear(&[&[4]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn exchanges(&self) -> usize {
        // The sums of dy·gain and of that times the normalised x.
        2
    }

    fn accumulates(&self, result: usize) -> bool {
        result > 0
    }
}
