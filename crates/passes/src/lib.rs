//! Rewrites of programs that help every engine: program in, program out, same numbers.
//!
//! Each pass is one file with one idea, and takes a program that [`phalanx_ir::verify()`] accepts
//! to another such program. They share the [`Rewriter`](phalanx_ir::Rewriter), which copies a
//! program while instructions are dropped, replaced or added, and the [`Graph`](phalanx_ir::Graph),
//! which knows which instructions compute and read a value. Their order is defined in one place,
//! the script crate's `Lowering`.
#![forbid(unsafe_code)]

mod chunk_loss;
mod common;
mod dead_code;
mod fold_add;
mod fuse;
mod overlap;
mod pack;
mod sort_free;
mod stored_params;
mod stream;
#[cfg(test)]
mod testing;

pub use chunk_loss::chunk_loss;
pub use common::{common, common_at_once};
pub use dead_code::{dead_code, dead_code_and_inputs, some_outputs};
pub use fold_add::fold_add;
pub use fuse::{MAX_FULL_OPERANDS, MAX_OPERANDS, MAX_STEPS, fuse};
pub use overlap::overlap;
pub use pack::pack;
pub use sort_free::{peak_bytes, sort_free};
pub use stored_params::stored_params;
pub use stream::{stream, stream_keys};
