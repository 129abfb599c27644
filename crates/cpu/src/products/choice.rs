//! Which products are own ones, and on which units.

use std::fmt;

use phalanx_ir::{DType, ProductLoops};

use super::blocks::panel_bytes;
use super::micro::{MicroKernel, PanelWord};
use super::units::{CpuUnit, UnitSet};

/// The micro-kernels that an engine uses; other products are the `gemm` crate's.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductUnits {
    floats: Option<MicroKernel>,
    pairs: Option<MicroKernel>,
}

impl ProductUnits {
    /// Where own products are faster than the `gemm` crate: on tiles, and on units that multiply pairs at
    /// twice the rate of singles. On Intel's processors `vdpbf16ps` does not, and products of widened
    /// pairs lose to copies in singles that the library multiplies; in singles its kernel is the faster
    /// one (`docs/performance.md`). Only units that this processor has are used.
    pub fn fastest(units: UnitSet) -> Self {
        let fast = |unit: &CpuUnit| match unit {
            CpuUnit::Amx => true,
            CpuUnit::Avx512Bf16 => UnitSet::dots_are_fast(),
            CpuUnit::Avx2 | CpuUnit::Avx512 => false,
        };
        let units = units.and(UnitSet::here()).iter().filter(fast).collect();
        Self { floats: None, pairs: MicroKernel::best(units, PanelWord::Pair) }
    }

    /// Own products wherever a unit of this processor can compute them, fast or not: for comparisons.
    pub fn every(units: UnitSet) -> Self {
        let units = units.and(UnitSet::here());
        let best = |word| MicroKernel::best(units, word);
        Self { floats: best(PanelWord::Float), pairs: best(PanelWord::Pair) }
    }

    /// What multiplies operands of a type, and the peak of its unit for one core in FLOP/s. Where that is
    /// the library, which has no rate of its own, the peak is that of the unit which it uses.
    pub fn peak(&self, operand: DType) -> Option<(String, f64)> {
        if let Some(kernel) = self.kernel(operand, DType::F32) {
            return Some((kernel.unit.name().to_owned(), kernel.peak()));
        }
        let beside = MicroKernel::best(UnitSet::here(), PanelWord::Float)?;
        let known = matches!(operand, DType::F32 | DType::Bf16 | DType::F16);
        known.then(|| (format!("the library, on {}", beside.unit.name()), beside.peak()))
    }

    /// The micro-kernel for operands and a result of these types, if it is an own product.
    pub(crate) fn kernel(&self, operand: DType, result: DType) -> Option<MicroKernel> {
        match (operand, result) {
            (DType::Bf16, DType::Bf16 | DType::F32) => self.pairs,
            (DType::F32, DType::F32) => self.floats,
            _ => None,
        }
    }

    /// Bytes of the panels of a product, if it is an own one: one product of two matrices, padding
    /// included.
    pub(crate) fn panels(&self, loops: &ProductLoops, [operand, result]: [DType; 2]) -> usize {
        match self.kernel(operand, result) {
            Some(_) if loops.is_plain() => {
                let words = loops.inner.extent.div_ceil(size_of::<u32>() / operand.size());
                panel_bytes(words, OwnSides::of(loops).columns.size)
            }
            _ => 0,
        }
    }
}

/// What multiplies each type; types that are not named are the library's.
impl fmt::Display for ProductUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = [("f32", self.floats), ("bf16", self.pairs)];
        let named: Vec<String> = (own.into_iter())
            .filter_map(|(dtype, kernel)| Some(format!("{dtype} on {}", kernel?.unit.name())))
            .collect();
        f.write_str(if named.is_empty() { "none" } else { "" })?;
        f.write_str(&named.join(", "))
    }
}

/// Which operand of a product is the left one: a result whose columns are adjacent is computed as its
/// transpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnSides {
    pub(crate) rows: phalanx_ir::StridedLoop,
    pub(crate) columns: phalanx_ir::StridedLoop,
    /// Which operands are left and right.
    pub(crate) operands: [usize; 2],
}

impl OwnSides {
    pub(crate) fn of(loops: &ProductLoops) -> Self {
        let ProductLoops { rows, cols, .. } = *loops;
        match rows.strides[2] == 1 && cols.strides[2] != 1 && cols.size > 1 {
            true => Self { rows: cols, columns: rows, operands: [1, 0] },
            false => Self { rows, columns: cols, operands: [0, 1] },
        }
    }
}
