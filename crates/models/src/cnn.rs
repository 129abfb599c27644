//! A small convolutional network that classifies images: the one that PyTorch's MNIST examples start from.

use phalanx_ir::ops::{Window, ZeroPadding};
use phalanx_ir::{Builder, DType, Init, IrError, Model, Tensor};

use crate::architecture::{Architecture, BatchShape, Purpose, port};
use crate::chain::Chain;
use crate::check::Check;

/// Two convolutions of 3 × 3 and two fully connected layers, with ReLU between them.
///
/// It reads the data port `x`, `f32[samples, height, width, 1]`, and the classes `y`, `i32[samples]`.
/// Parameters are `conv1.weight` (`[3, 3, in, out]`), `conv1.bias`, `conv2.…`, `fc1.weight`
/// (`[height · width · channels, hidden]`: places, then channels, as images lie in memory) and so on.
///
/// ```
/// use phalanx_models::{Architecture, Cnn};
///
/// assert_eq!(Cnn::mnist().parameters()?, 6_442_762);
/// # Ok::<(), phalanx_ir::IrError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cnn {
    /// Height and width of an image.
    pub image: [usize; 2],
    /// Channels after each convolution.
    pub channels: [usize; 2],
    /// Features between the fully connected layers.
    pub hidden: usize,
    /// Classes.
    pub classes: usize,
}

impl Cnn {
    /// For MNIST: 28 × 28 pixels, 32 and 64 channels, 128 features, ten classes.
    pub const fn mnist() -> Self {
        Self { image: [28, 28], channels: [32, 64], hidden: 128, classes: 10 }
    }

    /// The features that the first fully connected layer reads.
    pub const fn features(&self) -> usize {
        self.image[0] * self.image[1] * self.channels[1]
    }

    fn convolution(&self, i: usize, batch: usize, compute: DType) -> Builder {
        let [height, width] = self.image;
        let (from, to) = (if i == 0 { 1 } else { self.channels[0] }, self.channels[i]);
        let name = ["conv1", "conv2"][i];
        let b = Builder::new(name, compute);
        let x = match i {
            0 => b.data(port::X, DType::F32, [batch, height, width, from]).cast(compute),
            _ => b.boundary(port::H, [batch, height, width, from]),
        };
        let y = x.conv2d(
            b.param(&format!("{name}.weight"), [3, 3, from, to]),
            Window::of([3, 3]).pad([1, 1]),
        );
        b.output(port::H, (y + b.param(&format!("{name}.bias"), [to])).relu());
        b
    }

    fn flat(&self, batch: usize, compute: DType) -> Builder {
        let ([height, width], channels) = (self.image, self.channels[1]);
        let b = Builder::new("fc1", compute);
        let x = b.boundary(port::H, [batch, height, width, channels]);
        // What lies behind the last row of uneven heights becomes rows of the weight's gradient, and must
        // be zero there.
        let x = b.apply(ZeroPadding, &[x]).reshape([batch, self.features()]);
        b.output(port::H, linear(&b, "fc1", x, [self.features(), self.hidden]).relu());
        b
    }

    fn head(&self, batch: usize, compute: DType, purpose: Purpose) -> Builder {
        let b = Builder::new("fc2", compute);
        let x = b.boundary(port::H, [batch, self.hidden]);
        let y = linear(&b, "fc2", x, [self.hidden, self.classes]);
        // Training and evaluation count with it how often it is right.
        b.probe(port::PREDICTION, y);
        if purpose == Purpose::Predict {
            return b;
        }
        let total = y.cross_entropy(b.data(port::Y, DType::I32, [batch])).sum_all();
        b.loss(port::LOSS, total * b.scalar(port::INV_TOKENS));
        b
    }

    fn check(&self, batch: usize) -> Result<(), IrError> {
        let check = Check { model: "cnn" };
        let places = [("batch", batch), ("height", self.image[0]), ("width", self.image[1])];
        let channels = [("channels[0]", self.channels[0]), ("channels[1]", self.channels[1])];
        let ends = [("hidden", self.hidden), ("classes", self.classes)];
        check.sizes(&[&places[..], &channels, &ends].concat())?;
        check.tensor(&[&places[..], &channels[..1]].concat())?;
        check.tensor(&[&places[..], &channels[1..]].concat())?;
        check.tensor(&[&places[1..], &channels[1..], &ends[..1]].concat())
    }
}

/// `x · weight + bias`, with parameters of this name.
fn linear<'b>(b: &'b Builder, name: &str, x: Tensor<'b>, [from, to]: [usize; 2]) -> Tensor<'b> {
    let weight = b.param(&format!("{name}.weight"), [from, to]);
    x.matmul(weight) + b.param(&format!("{name}.bias"), [to])
}

impl Architecture for Cnn {
    fn name(&self) -> &str {
        "cnn"
    }

    fn build(&self, shape: BatchShape, compute: DType, purpose: Purpose) -> Result<Model, IrError> {
        let batch = shape.batch;
        self.check(batch)?;
        // As torch.nn.Conv2d and Linear start: up to one over the root of what a result sums over.
        let start = |summed: usize| Init::Uniform(1.0 / (summed as f64).sqrt());
        let mut chain = Chain::new(self.name());
        chain.once(self.convolution(0, batch, compute), |_| start(9))?;
        chain.once(self.convolution(1, batch, compute), |_| start(9 * self.channels[0]))?;
        chain.once(self.flat(batch, compute), |_| start(self.features()))?;
        chain.once(self.head(batch, compute, purpose), |_| start(self.hidden))?;
        Ok(chain.finish())
    }
}
