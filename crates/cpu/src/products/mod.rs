//! Own matrix products: `C = A·B` where the `gemm` crate is not the best that a processor can do.
//!
//! A product is cut into tiles of the result. A [`MicroKernel`] computes one, with the instructions
//! of a [`CpuUnit`]; everything else is the same for all units. Operands are seen as 32-bit words: a
//! word is a single, or two `bf16` that are neighbours in the inner dimension. The right operand is
//! packed into panels, once for all threads ([`pack_right`]); the left one is read where it lies if its
//! rows run along the inner dimension, and otherwise copied block by block ([`multiply`]).
//!
//! The order of a sum depends on the unit alone: the inner dimension is cut at the same places for every
//! shape of the result and for any number of threads, so bits don't depend on them.

mod blocks;
mod choice;
mod micro;
mod multiply;
mod pack;
mod peak;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod units;
mod whole;

pub use blocks::{Grid, PANEL_COLUMNS, panel_bytes, panel_words};
pub(crate) use choice::OwnSides;
pub use choice::ProductUnits;
pub use micro::{MicroKernel, PanelWord};
pub use multiply::{Addition, ProductTarget, multiply, multiply_scratch, multiply_scratch_up_to};
pub use pack::{PanelElement, pack_right};
pub use units::{CpuUnit, UnitSet};
pub use whole::{Packed, PackedPart, multiply_packed, pack_whole, packed_words};
