//! Initial values, drawn where they lie: a billion of them take the host seconds, and a GPU milliseconds.

use std::ffi::c_void;

use phalanx_engine::{EngineError, Span};
use phalanx_ir::{DType, Draw, Init, Stored};

use super::CudaEngine;
use crate::device::Grid;
use crate::kernels::{KernelSpec, Source, type_name};
use crate::tasks::{Resources, THREADS};

impl CudaEngine {
    /// Draws values into a piece of the GPU's arena; `false` if it has no kernel for their type.
    pub(super) fn drawn(
        &mut self,
        into: Span,
        stored: Stored,
        draw: Draw,
        first: u64,
    ) -> Result<bool, EngineError> {
        let here = into.tier == phalanx_call::Tier::Device;
        let Some(element) = element(stored).filter(|_| here) else { return Ok(false) };
        let (kind, mut by) = match draw.init {
            Init::Constant(value) => ("CONSTANT", value),
            Init::Normal(std) => ("NORMAL", std),
            Init::Uniform(bound) => ("UNIFORM", bound),
        };
        let function = self.device.functions(&[&kernel(element, kind)])?[0];
        let count = into.bytes / stored.dtype().size();
        let word = |[low, high]: [u32; 2]| (u64::from(high) << 32 | u64::from(low)) as i64;
        let (key, purpose) = draw.stream.identity();
        let mut words = [
            self.arenas.address(into)? as i64,
            count as i64,
            first as i64,
            word(key),
            word(purpose),
        ];
        let mut arguments: Vec<*mut c_void> =
            words.iter_mut().map(|word| (&raw mut *word).cast()).collect();
        arguments.push((&raw mut by).cast());
        let blocks = count.div_ceil(THREADS as usize).clamp(1, self.blocks() as usize) as u32;
        let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 };
        // SAFETY: the kernel has five parameters of eight bytes and a number; the place lies in the arena, and
        // the caller waited for what uses it.
        unsafe { function.launch(&self.stream, grid, &mut arguments)? };
        Ok(true)
    }
}

/// The element's name in the kernel, if there is one.
fn element(stored: Stored) -> Option<&'static str> {
    match stored {
        Stored::Upper => Some("Upper"),
        Stored::Lower => Some("Lower"),
        Stored::As(dtype @ (DType::F64 | DType::F32 | DType::Bf16)) => Some(type_name(dtype)),
        Stored::As(_) => None,
    }
}

fn kernel(element: &str, kind: &str) -> KernelSpec {
    let spec = KernelSpec::of(Source::Draw, "draw", &[element, kind]);
    KernelSpec { shared: 0, ..spec }
}

/// All kernels, to see whether they compile.
#[cfg(test)]
pub(crate) fn kernels() -> impl Iterator<Item = KernelSpec> {
    let types = [DType::F64, DType::F32, DType::Bf16].map(Stored::As);
    let elements = types.into_iter().chain([Stored::Upper, Stored::Lower]).filter_map(element);
    elements.flat_map(|element| ["CONSTANT", "NORMAL", "UNIFORM"].map(|k| kernel(element, k)))
}
