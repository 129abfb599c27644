//! Convolution of images, and its two gradients.
//!
//! Weights are `[height, width, channels in, channels out]`, so that the patches of all outputs,
//! side by side, times the weights as one matrix are the result. Batch and both channels may be
//! sharded, as in a matrix product; height and width too, where every output goes with as many rows of
//! the image as the stride: then neighbours exchange rows ([`crate::Halo`]).

use super::window::{self, Window, image};
use super::{OpDef, Product, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::halo::Reach;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Operands x `[b, h, w, i]` and weights `[k, l, i, o]`; the result is `[b, y, x, o]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv2d {
    /// Its window; the size is that of the weights.
    pub window: Window,
}

/// The gradient with respect to x: operands dy and the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv2dInputGrad {
    /// The window of the convolution.
    pub window: Window,
    /// The height and width of x, which do not follow from those of dy.
    pub image: [usize; 2],
}

/// The gradient with respect to the weights: operands x and dy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conv2dWeightGrad {
    /// The window of the convolution.
    pub window: Window,
    /// The element type of the gradient.
    pub out: DType,
}

pub(super) fn read_input_grad(attrs: &mut AttrReader) -> Result<Conv2dInputGrad, String> {
    Ok(Conv2dInputGrad { window: window::read(attrs)?, image: window::pair("image", attrs)? })
}

pub(super) fn read_weight_grad(attrs: &mut AttrReader) -> Result<Conv2dWeightGrad, String> {
    Ok(Conv2dWeightGrad { window: window::read(attrs)?, out: attrs.take("out")? })
}

/// The channels in and out, after checking that weights fit the window.
fn channels(window: &Window, w: &TensorType, dtype: DType) -> Result<[usize; 2], String> {
    let [k, l, i, o] = image("the weights", w)
        .map_err(|_| format!("the weights are {w}, expected [height, width, in, out]"))?;
    super::dtype_is("the weights", w, dtype)?;
    if [k, l] != window.size {
        return Err(format!("the weights are {w}, but the window has size {:?}", window.size));
    }
    Ok([i, o])
}

fn agree(what: &str, ty: &TensorType, found: usize, expected: usize) -> Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("{what} is {ty}, with {found} channels instead of {expected}")),
    }
}

/// The product of a convolution of these shapes: patches times weights.
fn product(small: &[usize], weights: [usize; 4]) -> Product {
    let [k, l, i, o] = weights;
    Product { batch: 1, rows: small[..3].iter().product(), cols: o, inner: k * l * i }
}

impl OpDef for Conv2d {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn attrs(&self) -> Attrs {
        self.window.attrs(Attrs::new())
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let [b, h, w, c] = image("x", ins[0])?;
        let [i, o] = channels(&self.window, ins[1], ins[0].dtype)?;
        agree("x", ins[0], c, i)?;
        let [y, x] = self.window.outputs([h, w])?;
        Ok(vec![(ins[0].dtype, vec![b, y, x, o])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [images, outputs, whole] = self.window.factors(ins[0], outs[0]);
        Rule::declare(&format!("b{images} i, k l i o -> b{outputs} o"), ins, outs)
            .whole(&whole)
            .in_blocks(Window::DIMS)
            .linear(&[&[0], &[1]])
    }

    fn reaches(&self) -> Vec<Reach> {
        self.window.reaches(0)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (dy, window) = (g.dy()?, self.window);
        let shape = &g.ty(g.input(0)).shape;
        let image = [shape[1], shape[2]];
        g.set_to(0, Conv2dInputGrad { window, image }, &[dy, g.input(1)])?;
        g.set_to(1, Conv2dWeightGrad { window, out: g.dtype(1) }, &[g.input(0), dy])
    }

    fn products(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Vec<Product> {
        vec![product(outs[0], std::array::from_fn(|d| ins[1][d]))]
    }
}

impl OpDef for Conv2dInputGrad {
    fn name(&self) -> &'static str {
        "conv2d_input_grad"
    }

    fn attrs(&self) -> Attrs {
        self.window.attrs(Attrs::new()).list("image", &self.image)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let [b, y, x, c] = image("dy", ins[0])?;
        let [i, o] = channels(&self.window, ins[1], ins[0].dtype)?;
        agree("dy", ins[0], c, o)?;
        let outputs = self.window.outputs(self.image)?;
        if outputs != [y, x] {
            return Err(format!(
                "dy is {}, but images of {:?} have {outputs:?} outputs",
                ins[0], self.image
            ));
        }
        Ok(vec![(ins[0].dtype, vec![b, self.image[0], self.image[1], i])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [images, outputs, whole] = self.window.factors(outs[0], ins[0]);
        Rule::declare(&format!("b{outputs} o, k l i o -> b{images} i"), ins, outs)
            .whole(&whole)
            .in_blocks(Window::DIMS)
            .linear(&[&[0], &[1]])
    }

    fn reaches(&self) -> Vec<Reach> {
        self.window.reaches_back(0)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn products(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        vec![product(ins[0], std::array::from_fn(|d| ins[1][d]))]
    }
}

impl OpDef for Conv2dWeightGrad {
    fn name(&self) -> &'static str {
        "conv2d_weight_grad"
    }

    fn attrs(&self) -> Attrs {
        self.window.attrs(Attrs::new()).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 2)?;
        let [b, h, w, i] = image("x", ins[0])?;
        let [_, _, _, o] = image("dy", ins[1])?;
        let [y, x] = self.window.outputs([h, w])?;
        super::dtype_is("dy", ins[1], ins[0].dtype)?;
        super::shape_is("dy", ins[1], &[b, y, x, o])?;
        let [k, l] = self.window.size;
        Ok(vec![(self.out, vec![k, l, i, o])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let [images, outputs, whole] = self.window.factors(ins[0], ins[1]);
        Rule::declare(&format!("b{images} i, b{outputs} o -> k l i o"), ins, outs)
            .whole(&whole)
            .in_blocks(Window::DIMS)
            .linear(&[&[0], &[1]])
    }

    fn reaches(&self) -> Vec<Reach> {
        self.window.reaches(0)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    fn products(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Vec<Product> {
        vec![product(ins[1], std::array::from_fn(|d| outs[0][d]))]
    }

    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}
