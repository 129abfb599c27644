//! Errors of interpreting a program.

use phalanx_ir::{DType, TensorType};

/// All errors of this crate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// A program input that was not given.
    #[error("program {program}: the input `{name}`, {ty}, was not given")]
    MissingInput {
        /// The program's name.
        program: String,
        /// The input's name.
        name: String,
        /// Its type.
        ty: Box<TensorType>,
    },
    /// A name that no input has.
    #[error("program {program} has no input `{name}` (it has: {})", known.join(", "))]
    UnknownInput {
        /// The program's name.
        program: String,
        /// The name given.
        name: String,
        /// The names that exist.
        known: Vec<String>,
    },
    /// An input of another element type or shape than the program declares.
    #[error("program {program}: the input `{name}` is {ty}, but {dtype}{shape:?} was given")]
    WrongInput {
        /// The program's name.
        program: String,
        /// The input's name.
        name: String,
        /// The declared type.
        ty: Box<TensorType>,
        /// The element type given.
        dtype: DType,
        /// The shape given.
        shape: Vec<usize>,
    },
    /// A value that is used before it is computed.
    #[error("program {program}: the value %{value} is used before it is computed")]
    Undefined {
        /// The program's name.
        program: String,
        /// The value's number.
        value: u32,
    },
    /// A declared result type that differs from the op's result.
    #[error("program {program}: %{value} = {op} is declared {declared}, but is {dtype}{shape:?}")]
    WrongResult {
        /// The program's name.
        program: String,
        /// The value's number.
        value: u32,
        /// The op.
        op: &'static str,
        /// The declared type.
        declared: Box<TensorType>,
        /// The element type that the op gives.
        dtype: DType,
        /// The shape that the op gives.
        shape: Vec<usize>,
    },
    /// Operands that do not fit an op.
    #[error("{op}: {what}")]
    Operands {
        /// The op.
        op: &'static str,
        /// What does not fit.
        what: String,
    },
    /// An id or target outside its table.
    #[error("{op}: the id {id} at position {position} is not in 0..{limit}")]
    IdOutOfRange {
        /// The op.
        op: &'static str,
        /// The id.
        id: i32,
        /// Its row-major position in the operand of ids.
        position: usize,
        /// How many rows the table has.
        limit: usize,
    },
    /// A number of elements or bytes that does not match a shape.
    #[error("{dtype}{shape:?} holds {expected} {unit}, but {got} were given")]
    Count {
        /// The element type.
        dtype: DType,
        /// The shape.
        shape: Vec<usize>,
        /// `elements` or `bytes`.
        unit: &'static str,
        /// How many were expected.
        expected: usize,
        /// How many there were.
        got: usize,
    },
}
