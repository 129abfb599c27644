//! Pooling: the largest or the mean of a window's inputs, for each channel alone.

use super::window::{self, Window, image};
use super::{OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::halo::Reach;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// What is taken of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolKind {
    /// The largest input; the first of equal ones. Missing inputs do not count.
    Max,
    /// The sum of the inputs divided by the number of taps: missing inputs count as zeros.
    Mean,
}

/// Operand x `[b, h, w, c]`; results y `[b, y, x, c]` and, of maxima, the tap (`i32`) that was
/// taken, which the gradient reads: −1 if all inputs are missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pooling {
    /// What is taken.
    pub kind: PoolKind,
    /// Of which inputs.
    pub window: Window,
}

/// Operands dy and, of maxima, the taps that were taken; the result is dx.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolingGrad {
    /// The pooling.
    pub of: Pooling,
    /// The height and width of x, which do not follow from those of dy.
    pub image: [usize; 2],
}

pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Result<Pooling, String> {
    let kind = if name.starts_with("max") { PoolKind::Max } else { PoolKind::Mean };
    Ok(Pooling { kind, window: window::read(attrs)? })
}

pub(super) fn read_grad(name: &str, attrs: &mut AttrReader) -> Result<PoolingGrad, String> {
    Ok(PoolingGrad { of: read(name, attrs)?, image: window::pair("image", attrs)? })
}

impl Pooling {
    /// The outputs, after checking that no window lies outside. Half a window may be missing.
    fn outputs(&self, inputs: [usize; 2]) -> Result<[usize; 2], String> {
        let Window { size, pad, .. } = self.window;
        if (0..2).any(|d| pad[d] > size[d] / 2) {
            return Err(format!("pad {pad:?} is more than half of the window of {size:?}"));
        }
        self.window.outputs(inputs)
    }
}

impl OpDef for Pooling {
    fn name(&self) -> &'static str {
        match self.kind {
            PoolKind::Max => "max_pool",
            PoolKind::Mean => "mean_pool",
        }
    }

    fn attrs(&self) -> Attrs {
        self.window.attrs(Attrs::new())
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let [b, h, w, c] = image("x", ins[0])?;
        let [y, x] = self.outputs([h, w])?;
        let shape = vec![b, y, x, c];
        let mut results = vec![(ins[0].dtype, shape.clone())];
        results.extend((self.kind == PoolKind::Max).then_some((DType::I32, shape)));
        Ok(results)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [images, outputs, whole] = self.window.factors(ins[0], outs[0]);
        let one = format!("b{images} c -> b{outputs} c");
        match self.kind {
            PoolKind::Max => Rule::declare(&format!("{one}, b{outputs} c"), ins, outs),
            PoolKind::Mean => Rule::declare(&one, ins, outs).linear(&[&[0]]),
        }
        .whole(&whole)
        .in_blocks(Window::DIMS)
    }

    fn reaches(&self) -> Vec<Reach> {
        self.window.reaches(0)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let shape = &g.ty(g.input(0)).shape;
        let grad = PoolingGrad { of: *self, image: [shape[1], shape[2]] };
        let mut operands = vec![g.dy()?];
        operands.extend((self.kind == PoolKind::Max).then(|| g.output(1)));
        g.set_to(0, grad, &operands)
    }
}

impl OpDef for PoolingGrad {
    fn name(&self) -> &'static str {
        match self.of.kind {
            PoolKind::Max => "max_pool_grad",
            PoolKind::Mean => "mean_pool_grad",
        }
    }

    fn attrs(&self) -> Attrs {
        self.of.window.attrs(Attrs::new()).list("image", &self.image)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, if self.of.kind == PoolKind::Max { 2 } else { 1 })?;
        let [b, y, x, c] = image("dy", ins[0])?;
        let outputs = self.of.outputs(self.image)?;
        if outputs != [y, x] {
            return Err(format!(
                "dy is {}, but images of {:?} have {outputs:?} outputs",
                ins[0], self.image
            ));
        }
        if let Some(taken) = ins.get(1) {
            super::dtype_is("the taps that were taken", taken, DType::I32)?;
            super::shape_is("the taps that were taken", taken, &ins[0].shape)?;
        }
        Ok(vec![(ins[0].dtype, vec![b, self.image[0], self.image[1], c])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [images, outputs, whole] = self.of.window.factors(outs[0], ins[0]);
        let one = format!("b{outputs} c -> b{images} c");
        match self.of.kind {
            PoolKind::Max => Rule::declare(&format!("b{outputs} c, {one}"), ins, outs),
            PoolKind::Mean => Rule::declare(&one, ins, outs),
        }
        .whole(&whole)
        .in_blocks(Window::DIMS)
        .linear(&[&[0]])
    }

    fn reaches(&self) -> Vec<Reach> {
        let operands = if self.of.kind == PoolKind::Max { 2 } else { 1 };
        (0..operands).flat_map(|operand| self.of.window.reaches_back(operand)).collect()
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }
}
