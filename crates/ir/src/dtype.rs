//! Element types.

use std::fmt;
use std::str::FromStr;

/// The type of one element of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// The upper half of a single-precision float: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Signed 32-bit integer: token ids, targets, positions, random keys.
    I32,
    /// Unsigned 16-bit integer: the lower halves of masters ([`crate::halves`]).
    U16,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every element type, in printing order.
    pub const ALL: [DType; 7] =
        [DType::F64, DType::F32, DType::Bf16, DType::F16, DType::I32, DType::U16, DType::Bool];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 | DType::U16 => 2,
            DType::Bool => 1,
        }
    }

    /// Whether values of this type can carry gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::Bf16 | DType::F16)
    }

    /// The type that sums, norms and statistics of values of this type are kept in: `f64` for
    /// `f64`, `f32` for every narrower float.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            DType::F32 | DType::Bf16 | DType::F16 => DType::F32,
            other => other,
        }
    }

    /// The name used in program text, configurations and messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::U16 => "u16",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        DType::ALL.into_iter().find(|d| d.name() == text).ok_or_else(|| {
            format!("unknown element type `{text}` (known: f64, f32, bf16, f16, i32, u16, bool)")
        })
    }
}
