//! Windows over height and width: which inputs an output of a convolution or a pooling reads.
//!
//! Images are `[batch, height, width, channels]`. Tap `j` of output `y` reads input
//! `y · stride + j · dilation − pad`; what lies outside counts as zero, or is left out of a maximum.

use crate::attr::{AttrReader, Attrs};
use crate::halo::Reach;
use crate::mesh::Mesh;
use crate::types::TensorType;

/// A window over two dims, height first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// How many taps it has.
    pub size: [usize; 2],
    /// Inputs from one output's window to the next one's.
    pub stride: [usize; 2],
    /// Inputs from one tap to the next.
    pub dilation: [usize; 2],
    /// Inputs that are missing before the first and after the last.
    pub pad: [usize; 2],
}

impl Window {
    /// The factors of an image's height and width.
    pub(super) const DIMS: &str = "y x";

    /// A window of these taps, side by side, that moves by one input, without missing inputs.
    pub fn of(size: [usize; 2]) -> Self {
        Self { size, stride: [1; 2], dilation: [1; 2], pad: [0; 2] }
    }

    /// The same with other steps between outputs.
    pub fn stride(self, stride: [usize; 2]) -> Self {
        Self { stride, ..self }
    }

    /// The same with other steps between taps.
    pub fn dilation(self, dilation: [usize; 2]) -> Self {
        Self { dilation, ..self }
    }

    /// The same with inputs that are missing at the edges.
    pub fn pad(self, pad: [usize; 2]) -> Self {
        Self { pad, ..self }
    }

    /// How many taps it has in all.
    pub fn taps(&self) -> usize {
        self.size[0] * self.size[1]
    }

    /// The outputs over images of this height and width.
    pub fn outputs(&self, inputs: [usize; 2]) -> Result<[usize; 2], String> {
        let mut outputs = [0; 2];
        for (dim, output) in outputs.iter_mut().enumerate() {
            let (size, stride) = (self.size[dim], self.stride[dim]);
            let (dilation, pad) = (self.dilation[dim], self.pad[dim]);
            let what = ["height", "width"][dim];
            if size == 0 || stride == 0 || dilation == 0 {
                return Err(format!(
                    "along the {what}, the window has size {size}, stride {stride} and dilation \
                     {dilation}; each must be at least 1"
                ));
            }
            let sizes = (size - 1).checked_mul(dilation).zip(pad.checked_mul(2));
            let sizes = sizes.and_then(|(span, pads)| {
                Some((span.checked_add(1)?, pads.checked_add(inputs[dim])?))
            });
            let Some((span, padded)) = sizes else {
                return Err(format!("along the {what}, the window is too large to be counted"));
            };
            if padded < span {
                return Err(format!(
                    "along the {what}, a window spans {span} inputs, but there are {} and {pad} \
                     missing ones at each edge",
                    inputs[dim]
                ));
            }
            *output = (padded - span) / stride + 1;
        }
        Ok(outputs)
    }

    /// How a rank reads images for its part of the outputs, or backwards, outputs for its part of images:
    /// what is read is the rank's block with what comes from neighbours. `None` if a dim is not sharded in
    /// blocks.
    pub fn spans(
        &self,
        images: &TensorType,
        outputs: &TensorType,
        (mesh, rank): (&Mesh, usize),
        backwards: bool,
    ) -> Option<[WindowSpan; 2]> {
        let read = if backwards { outputs } else { images };
        let reaches = if backwards { self.reaches_back(0) } else { self.reaches(0) };
        let mut spans = [None, None];
        for (dim, span) in spans.iter_mut().enumerate() {
            let part = read.part(dim + 1, mesh, rank);
            let (start, whole) = (part.start()?, part.shards == 1);
            let [before, after] = match whole {
                true => [0, 0],
                false => [reaches[dim].before, reaches[dim].after],
            };
            // Of the elements that are held now, those that exist in the whole.
            let end = (read.shape[dim + 1] + before).saturating_sub(start);
            let held = [before.saturating_sub(start), end.min(part.len() + before + after)];
            let other = if backwards { images } else { outputs };
            let other = [0, other.local_valid(mesh, rank)[dim + 1]];
            *span = Some(WindowSpan {
                size: self.size[dim],
                stride: self.stride[dim],
                dilation: self.dilation[dim],
                shift: match (backwards, whole) {
                    (true, _) => self.pad[dim] + before * self.stride[dim],
                    (false, true) => self.pad[dim],
                    (false, false) => self.pad[dim] - before,
                },
                inputs: if backwards { other } else { held },
                outputs: if backwards { held } else { other },
            });
        }
        let [rows, columns] = spans;
        rows.zip(columns).map(|(rows, columns)| [rows, columns])
    }

    /// The dims of images and of outputs as factors, for images and outputs of these sizes: an output's row
    /// goes with `stride` rows of the image, if there are as many. Otherwise the dims are whole.
    pub(super) fn factors(&self, images: &[usize], outputs: &[usize]) -> [String; 3] {
        let mut texts = [String::new(), String::new(), "k l s t".to_owned()];
        for (dim, [image, row, step]) in [["h", "y", "s"], ["w", "x", "t"]].iter().enumerate() {
            let along = images[dim + 1] == outputs[dim + 1] * self.stride[dim];
            texts[0] += &if along { format!(" ({row} {step})") } else { format!(" {image}") };
            texts[1] += &format!(" {row}");
            texts[2] += &if along { String::new() } else { format!(" {image} {row}") };
        }
        texts
    }

    /// How far outputs read beyond the rows of images that go with them.
    pub(super) fn reaches(&self, operand: usize) -> Vec<Reach> {
        let reach = |dim: usize| {
            let span = (self.size[dim] - 1) * self.dilation[dim];
            let after = (span + 1).saturating_sub(self.pad[dim] + self.stride[dim]);
            Reach { operand, dim: dim + 1, before: self.pad[dim], after }
        };
        vec![reach(0), reach(1)]
    }

    /// How far the gradient of images reads beyond the outputs that go with them.
    pub(super) fn reaches_back(&self, operand: usize) -> Vec<Reach> {
        let reach = |dim: usize| {
            let (span, stride) = ((self.size[dim] - 1) * self.dilation[dim], self.stride[dim]);
            let before = span.saturating_sub(self.pad[dim]) / stride;
            Reach { operand, dim: dim + 1, before, after: self.pad[dim].div_ceil(stride) }
        };
        vec![reach(0), reach(1)]
    }

    pub(super) fn attrs(&self, attrs: Attrs) -> Attrs {
        (attrs.list("size", &self.size).list("stride", &self.stride))
            .list("dilation", &self.dilation)
            .list("pad", &self.pad)
    }
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<Window, String> {
    Ok(Window {
        size: pair("size", attrs)?,
        stride: pair("stride", attrs)?,
        dilation: pair("dilation", attrs)?,
        pad: pair("pad", attrs)?,
    })
}

/// Two numbers, of height and width.
pub(super) fn pair(key: &str, attrs: &mut AttrReader) -> Result<[usize; 2], String> {
    let list = attrs.take_list(key)?;
    list.try_into().map_err(|list| format!("`{key}` is {list:?}, expected two numbers"))
}

/// The dims of images, which must be four.
pub(super) fn image(what: &str, ty: &TensorType) -> Result<[usize; 4], String> {
    let dims = ty.shape.as_slice().try_into();
    match (dims, ty.dtype.is_float()) {
        (Ok(dims), true) => Ok(dims),
        _ => Err(format!("{what} is {ty}, expected floats [batch, height, width, channels]")),
    }
}

/// How one dim of a window is read on a rank: tap `tap` of output `y` is input
/// `y · stride + tap · dilation − shift`, in elements that the rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowSpan {
    /// How many taps there are.
    pub size: usize,
    /// Inputs from one output to the next.
    pub stride: usize,
    /// Inputs from one tap to the next.
    pub dilation: usize,
    /// What is missing before the first input that is held.
    pub shift: usize,
    /// The inputs that exist, of those that are held: from, to.
    pub inputs: [usize; 2],
    /// The outputs that exist, of those that are held: from, to.
    pub outputs: [usize; 2],
}

impl WindowSpan {
    /// The input that a tap of an output reads, if it exists.
    #[inline]
    pub fn input(&self, output: usize, tap: usize) -> Option<usize> {
        let at = (output * self.stride + tap * self.dilation).checked_sub(self.shift)?;
        (self.inputs[0] <= at && at < self.inputs[1]).then_some(at)
    }

    /// The output whose tap reads an input, if there is one.
    #[inline]
    pub fn output(&self, input: usize, tap: usize) -> Option<usize> {
        let at = (input + self.shift).checked_sub(tap * self.dilation)?;
        let output = at / self.stride;
        let exists = self.outputs[0] <= output && output < self.outputs[1];
        (at % self.stride == 0 && exists).then_some(output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_counted_as_pytorch_counts_them() {
        let window = Window::of([3, 3]);
        assert_eq!(window.pad([1, 1]).outputs([28, 28]), Ok([28, 28]));
        assert_eq!(window.stride([2, 3]).outputs([28, 28]), Ok([13, 9]));
        assert_eq!(window.dilation([2, 1]).pad([0, 2]).outputs([7, 5]), Ok([3, 7]));
        assert!(window.outputs([28, 2]).unwrap_err().contains("spans 3 inputs, but there are 2"));
        assert!(window.stride([0, 1]).outputs([28, 28]).unwrap_err().contains("stride 0"));
        assert!(window.pad([usize::MAX, 0]).outputs([28, 28]).is_err());
    }

    #[test]
    fn a_span_maps_both_ways() {
        let span = WindowSpan {
            size: 3,
            stride: 2,
            dilation: 2,
            shift: 3,
            inputs: [0, 9],
            outputs: [1, 5],
        };
        for output in 1..5 {
            for tap in 0..3 {
                if let Some(input) = span.input(output, tap) {
                    assert_eq!(span.output(input, tap), Some(output));
                }
            }
        }
        assert_eq!(span.input(0, 1), None);
        assert_eq!(span.output(0, 1), None, "the first output does not exist");
        assert_eq!(span.output(2, 1), None, "no output reads it");
    }
}
