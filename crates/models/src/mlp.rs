//! A plain multi-layer perceptron: regression with squared error, or classification with
//! cross-entropy.

use phalanx_ir::ops::UnaryKind;
use phalanx_ir::{Builder, DType, Init, IrError, Model, Tensor};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;

/// Fully connected layers with an activation between them.
///
/// It reads the data port `x`, `f32[samples, inputs]`, and `y`, which its [`Loss`] describes. Its
/// parameters are `layers.0.weight`, `layers.0.bias`, `layers.1.weight` and so on.
///
/// ```
/// use phalanx_ir::ops::UnaryKind;
/// use phalanx_models::{Architecture, Loss, Mlp};
///
/// let classifier = Mlp::classifier(4, [16], 3);
/// assert_eq!((classifier.loss, classifier.activation), (Loss::CrossEntropy, Some(UnaryKind::Relu)));
/// // Two linear layers in a row, without an activation.
/// let linear = Mlp { activation: None, ..Mlp::regression(10, [50], 10) };
/// assert_eq!(linear.parameters()?, 10 * 50 + 50 + 50 * 10 + 10);
/// # Ok::<(), phalanx_ir::IrError>(())
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct Mlp {
    /// Features of a sample.
    pub inputs: usize,
    /// Widths of the hidden layers; without any it is a linear regression.
    pub hidden: Vec<usize>,
    /// Values predicted for a sample: numbers of a regression, logits of a classification.
    pub outputs: usize,
    /// The function between layers; `None` for none.
    pub activation: Option<UnaryKind>,
    /// What is trained to be small.
    pub loss: Loss,
}

/// What a perceptron is trained for. Both are sums times [`port::INV_TOKENS`], so they are means.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Loss {
    /// The squared difference from `y`, `f32[samples, outputs]`: the mean squared error.
    SquaredError,
    /// The cross-entropy of the logits with the classes `y`, `i32[samples]`, from 0 to outputs − 1.
    /// Negative ones do not count.
    CrossEntropy,
}

impl Mlp {
    /// Predicts numbers: ReLU between the layers, squared error.
    pub fn regression(inputs: usize, hidden: impl Into<Vec<usize>>, outputs: usize) -> Self {
        let (hidden, activation) = (hidden.into(), Some(UnaryKind::Relu));
        Self { inputs, hidden, outputs, activation, loss: Loss::SquaredError }
    }

    /// Predicts one of `classes`: ReLU between the layers, cross-entropy.
    pub fn classifier(inputs: usize, hidden: impl Into<Vec<usize>>, classes: usize) -> Self {
        Self { loss: Loss::CrossEntropy, ..Self::regression(inputs, hidden, classes) }
    }

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
            (false, _) => b.output(port::H, self.activation.map_or(y, |kind| y.unary(kind))),
            (true, Purpose::Predict) => b.probe(port::PREDICTION, y),
            (true, _) => {
                let total = self.total_loss(&b, y, batch, compute);
                b.loss(port::LOSS, total * b.scalar(port::INV_TOKENS));
            }
        }
        b
    }

    /// The sum of the losses of all samples.
    fn total_loss<'b>(
        &self,
        b: &'b Builder,
        y: Tensor<'b>,
        batch: usize,
        compute: DType,
    ) -> Tensor<'b> {
        match self.loss {
            Loss::SquaredError => {
                // Differences of 16-bit numbers would be too inexact for the loss.
                let wide = compute.accumulator();
                let target = b.data(port::Y, DType::F32, [batch, self.outputs]).cast(wide);
                y.cast(wide).squared_error(target)
            }
            Loss::CrossEntropy => y.cross_entropy(b.data(port::Y, DType::I32, [batch])).sum_all(),
        }
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
