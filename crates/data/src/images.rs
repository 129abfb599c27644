//! Images with a class each: what every source of them can do.

use std::sync::Arc;

use crate::{Corpus, DataError, Split};

/// Images of one size, in grey, each with a class.
pub trait Images: Send + Sync {
    /// Height and width.
    fn size(&self) -> [usize; 2];

    /// One more than the largest class.
    fn classes(&self) -> usize;

    /// How many images a part has.
    fn samples(&self, split: Split) -> u64;

    /// Writes an image, row after row, from 0 (black) to 255, and returns its class. The result depends
    /// on the index alone, never on what was read before.
    fn read(&self, split: Split, index: u64, pixels: &mut [u8]) -> Result<u8, DataError>;

    /// One line of text: what it is and how large.
    fn describe(&self) -> String;
}

/// The mean and the standard deviation of MNIST's pixels, as shares of white: images are given out minus
/// the one, divided by the other.
pub const MEAN: f32 = 0.1307;
/// See [`MEAN`].
pub const DEVIATION: f32 = 0.3081;

/// A pixel as models read it.
pub(crate) fn normalised(pixel: u8) -> f32 {
    (f32::from(pixel) / 255.0 - MEAN) / DEVIATION
}

/// What batches are made of.
#[derive(Clone)]
pub enum Samples {
    /// Pieces of a long sequence of tokens.
    Tokens(Arc<dyn Corpus>),
    /// Images with a class each.
    Images(Arc<dyn Images>),
}

impl Samples {
    /// One line of text: what it is and how large.
    pub fn describe(&self) -> String {
        match self {
            Samples::Tokens(corpus) => corpus.describe(),
            Samples::Images(images) => images.describe(),
        }
    }

    /// The loss that no model can beat, if it is known.
    pub fn entropy_floor(&self) -> Option<f64> {
        match self {
            Samples::Tokens(corpus) => corpus.entropy_floor(),
            Samples::Images(_) => None,
        }
    }
}
