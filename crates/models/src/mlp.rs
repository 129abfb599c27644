//! A plain multi-layer perceptron for regression, with squared error.

use phalanx_ir::ops::UnaryKind;
use phalanx_ir::{Builder, DType, Init, IrError, Model};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;

/// Fully connected layers with an activation between them. The loss is the squared error times
/// [`port::INV_TOKENS`], which is 1 / (samples × outputs), so it is the mean squared error.
#[derive(Clone, PartialEq, Debug)]
pub struct Mlp {
    /// Features of a sample.
    pub inputs: usize,
    /// Widths of the hidden layers; without any it is a linear regression.
    pub hidden: Vec<usize>,
    /// Values predicted for a sample.
    pub outputs: usize,
    /// The function between layers.
    pub activation: UnaryKind,
}

impl Mlp {
    fn layer(&self, i: usize, batch: usize, compute: DType, purpose: Purpose) -> Builder {
        let (from, to) = (self.width(i), self.width(i + 1));
        let (first, last) = (i == 0, i == self.hidden.len());
        let b = Builder::new("layer", compute);
        let x = match first {
            true => b.data(port::X, DType::F32, [batch, from]).cast(compute),
            false => b.boundary(port::H, [batch, from]),
        };
        let y = x.matmul(b.param("weight", [from, to])) + b.param("bias", [to]);
        match (last, purpose) {
            (false, _) => b.output(port::H, y.unary(self.activation)),
            (true, Purpose::Predict) => b.probe(port::PREDICTION, y),
            (true, _) => {
                // Differences of 16-bit numbers would be too inexact for the loss.
                let wide = compute.accumulator();
                let target = b.data(port::Y, DType::F32, [batch, to]).cast(wide);
                let total = y.cast(wide).squared_error(target);
                b.loss(port::LOSS, total * b.scalar(port::INV_TOKENS));
            }
        }
        b
    }

    /// The width before layer `i`, or after the last.
    fn width(&self, i: usize) -> usize {
        match i {
            0 => self.inputs,
            _ => self.hidden.get(i - 1).copied().unwrap_or(self.outputs),
        }
    }

    fn check(&self, batch: usize) -> Result<(), IrError> {
        let check = Check { model: "mlp" };
        let hidden = self.hidden.iter().enumerate();
        let hidden: Vec<(String, usize)> =
            hidden.map(|(i, &width)| (format!("hidden[{i}]"), width)).collect();
        let mut widths = vec![("inputs", self.inputs)];
        widths.extend(hidden.iter().map(|(name, width)| (name.as_str(), *width)));
        widths.push(("outputs", self.outputs));
        check.sizes(&[("batch", batch)])?;
        check.sizes(&widths)?;
        for pair in widths.windows(2) {
            check.tensor(pair)?;
            check.tensor(&[("batch", batch), pair[0]])?;
            check.tensor(&[("batch", batch), pair[1]])?;
        }
        Ok(())
    }
}

impl Architecture for Mlp {
    fn name(&self) -> &str {
        "mlp"
    }

    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
        self.check(shape.batch)?;
        let mut chain = Chain::new(self.name());
        for i in 0..=self.hidden.len() {
            // Weights and biases start as in torch.nn.Linear.
            let init = Init::Uniform(1.0 / (self.width(i) as f64).sqrt());
            let layer = self.layer(i, shape.batch, compute, purpose);
            chain.under(&format!("layers.{i}"), layer, |_| init)?;
        }
        Ok(chain.finish())
    }
}
