//! The text form of programs: what `explain` prints, tests compare and the parser reads.
//!
//! ```text
//! mesh dp=2 tp=4
//! program block {
//!   h: boundary bf16[8,4096,2048]{0:dp 1:tp}
//!   norm1: param bf16[2048]
//!   %2, %3 = rms_norm(h, norm1, eps=0.00001) : bf16[8,4096,2048]{0:dp 1:tp}, f32[8,4096]{0:dp 1:tp}
//!   %4 = all_gather<tp>(%2, dim=1) : bf16[8,4096,2048]{0:dp}
//!   return h: boundary %4
//! }
//! ```
//!
//! An instruction of a joint graph that is not forward ends in `@B` or `@W`. What follows `//` at the
//! beginning of a line, or two spaces and `//` within one, is a comment.

mod parse;
mod print;

pub use parse::parse;
pub use print::{call, commented, instr, value_name};
