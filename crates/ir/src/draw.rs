//! Initial values: each is a pure function of the seed, the parameter's name and the element's global index, so
//! every rank, and every device, draws its own part.

use crate::DType;
use crate::model::{Init, Param};
use crate::random::Stream;

/// The initial values of a parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Draw {
    /// Where random ones come from.
    pub stream: Stream,
    /// What is made of them.
    pub init: Init,
}

impl Draw {
    /// Those of a parameter, under a seed.
    pub fn of(param: &Param, seed: u64) -> Self {
        Self { stream: Stream::named(seed, &param.name), init: param.init }
    }

    /// The value of an element, by its global row-major index, in full precision.
    #[inline]
    pub fn at(self, index: u64) -> f64 {
        match self.init {
            Init::Constant(value) => value,
            Init::Normal(std) => std * self.stream.normal(index),
            Init::Uniform(bound) => bound * (2.0 * self.stream.uniform(index) - 1.0),
        }
    }
}

/// How drawn values are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Rounded to an element type.
    As(DType),
    /// Upper halves of singles, as `bf16` ([`crate::halves`]).
    Upper,
    /// Their lower halves, as `u16`.
    Lower,
}

impl Stored {
    /// The element type of the memory.
    pub fn dtype(self) -> DType {
        match self {
            Stored::As(dtype) => dtype,
            Stored::Upper => DType::Bf16,
            Stored::Lower => DType::U16,
        }
    }

    /// Whether it is one of two halves.
    pub fn is_half(self) -> bool {
        matches!(self, Stored::Upper | Stored::Lower)
    }
}
