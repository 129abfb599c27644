//! Which of the library's proposals a product takes (`crate::choice`).

use phalanx_ir::DType;

use super::plan::{Algorithm, Extra, ProductLibrary, ProductPlan, WORKSPACE, check};
use super::shape::{Epilogue, ProductShape};
use crate::cache;
use crate::choice::{self, random_memory};
use crate::device::{DeviceMemory, Stream};
use crate::error::CudaError;
use crate::kernels::is_narrow;
use crate::libraries::Address;

/// Where a product is issued, and the library's workspace there.
pub(crate) struct IssuedOn<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) workspace: (Address, usize),
}

impl ProductShape {
    /// Whether its proposals can differ by more than the launch of a kernel costs: such products take 20 µs and more.
    pub(super) fn is_worth_measuring(&self) -> bool {
        is_narrow(self.of) && self.flops() >= 10_000_000_000
    }
}

impl ProductLibrary {
    /// The best of some proposals, as it was measured here or by an earlier run.
    pub(super) fn chosen(
        &self,
        shape: &ProductShape,
        plan: &mut ProductPlan,
        proposals: &[Algorithm],
        place: &IssuedOn<'_>,
    ) -> Result<Algorithm, CudaError> {
        let gpu = place.stream.device().name();
        let asked = format!("{shape:?}, {WORKSPACE} bytes, {} proposals", proposals.len());
        let key = cache::key("product", &[gpu, &self.version()?, &asked]);
        choice::chosen(key, proposals, || {
            let Some(data) = Data::of(shape, place.stream)? else { return Ok(None) };
            let issue = |proposal: usize| {
                plan.algorithm = proposals[proposal];
                let Data { a, b, out, extra, .. } = data;
                // SAFETY: the plan was made for this shape, and the matrices are large enough for it.
                unsafe { plan.run(self, place, [a, b], None, out, extra) }
            };
            choice::fastest(place.stream, proposals.len(), issue).map(Some)
        })
    }

    fn version(&self) -> Result<String, CudaError> {
        let mut numbers = [0; 3];
        for (i, number) in numbers.iter_mut().enumerate() {
            // SAFETY: the out-pointer is valid.
            let status = unsafe { (self.table.cublasLtGetProperty)(i as i32, number) };
            check("cublasLtGetProperty", status)?;
        }
        Ok(format!("cublasLt {numbers:?}"))
    }
}

/// Matrices to measure with.
struct Data {
    a: Address,
    b: Address,
    out: Address,
    extra: Option<Extra>,
    _memory: DeviceMemory,
}

impl Data {
    /// Nothing if the GPU has no room for them.
    fn of(shape: &ProductShape, stream: &Stream) -> Result<Option<Self>, CudaError> {
        let [a, b, out] = shape.extents();
        let (of, result) = (shape.of.size(), shape.out.size());
        let bias = shape.sides[0] * DType::F32.size();
        let sizes = [a * of, b * of, out * result, out * result, bias];
        let sizes = sizes.map(|bytes| bytes.next_multiple_of(256));
        let Some(memory) = random_memory(stream, sizes.iter().sum())? else { return Ok(None) };
        let mut at = memory.address();
        let places = sizes.map(|bytes| {
            at += bytes as Address;
            at - bytes as Address
        });
        let [a, b, out, gelu, bias] = places;
        // The operands in the program's order.
        let (a, b) = if shape.swapped { (b, a) } else { (a, b) };
        let extra = match shape.epilogue {
            Epilogue::Nothing => None,
            Epilogue::Bias => Some(Extra { bias, gelu: None }),
            Epilogue::BiasAndGelu => Some(Extra { bias, gelu: Some(gelu) }),
        };
        Ok(Some(Self { a, b, out, extra, _memory: memory }))
    }
}
