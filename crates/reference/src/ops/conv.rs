//! Convolution by its definition: for every output, tap and pair of channels one product.

use phalanx_ir::ops::Window;

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

/// The places of one product: in the images, in the weights and in the outputs.
type Places = [usize; 3];

pub(super) fn conv2d(window: &Window, call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, w) = (call.floats(0)?, call.floats(1)?);
    let mut y = vec![0.0; call.elements(0)];
    let shapes = [call.shape(0), call.shape(1), &call.outs[0].1];
    each(window, shapes, |[image, weight, output]| y[output] += x[image] * w[weight]);
    Ok(vec![call.result(0, y)])
}

pub(super) fn input_grad(
    window: &Window,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (dy, w) = (call.floats(0)?, call.floats(1)?);
    let mut dx = vec![0.0; call.elements(0)];
    let shapes = [&call.outs[0].1, call.shape(1), call.shape(0)];
    each(window, shapes, |[image, weight, output]| dx[image] += dy[output] * w[weight]);
    Ok(vec![call.result(0, dx)])
}

pub(super) fn weight_grad(
    window: &Window,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (x, dy) = (call.floats(0)?, call.floats(1)?);
    let mut dw = vec![0.0; call.elements(0)];
    let shapes = [call.shape(0), &call.outs[0].1, call.shape(1)];
    each(window, shapes, |[image, weight, output]| dw[weight] += x[image] * dy[output]);
    Ok(vec![call.result(0, dw)])
}

/// Calls `f` for every product of a convolution of these images, weights and outputs.
fn each(window: &Window, [images, weights, outputs]: [&[usize]; 3], mut f: impl FnMut(Places)) {
    let (height, width, ins) = (images[1], images[2], images[3]);
    let (rows, columns, outs) = (outputs[1], outputs[2], outputs[3]);
    for b in 0..outputs[0] {
        for y in 0..rows {
            for x in 0..columns {
                taps(window, [y, x], [height, width], |[k, l], [r, c]| {
                    for i in 0..ins {
                        for o in 0..outs {
                            let image = ((b * height + r) * width + c) * ins + i;
                            let weight = ((k * weights[1] + l) * ins + i) * outs + o;
                            f([image, weight, ((b * rows + y) * columns + x) * outs + o]);
                        }
                    }
                });
            }
        }
    }
}

/// Calls `f` for every tap of an output that is not missing, with the input that it reads.
pub(super) fn taps(
    window: &Window,
    output: [usize; 2],
    inputs: [usize; 2],
    mut f: impl FnMut([usize; 2], [usize; 2]),
) {
    let read = |dim: usize, tap: usize| {
        let at = output[dim] * window.stride[dim] + tap * window.dilation[dim];
        at.checked_sub(window.pad[dim]).filter(|&at| at < inputs[dim])
    };
    for k in 0..window.size[0] {
        for l in 0..window.size[1] {
            if let (Some(r), Some(c)) = (read(0, k), read(1, l)) {
                f([k, l], [r, c]);
            }
        }
    }
}
