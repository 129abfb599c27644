//! Which of the library's proposals an attention takes (`crate::choice`).
//!
//! Only the forward is measured: for heads of 64 elements its second proposal is the faster one (173 beside 206 µs for
//! GPT-2 on an H200). Backward, other proposals took twice as long, and need not form dq in a fixed order.

use super::graph::{Bound, MOST_PLANS, TensorId};
use super::{AttentionLibrary, AttentionPlan, FusedShape, check};
use crate::cache;
use crate::choice::{Proposal, chosen, fastest, random_memory};
use crate::device::Stream;
use crate::error::CudaError;
use crate::libraries::Address;

impl AttentionLibrary {
    /// The best proposal for an attention, as it was measured on this stream or by an earlier run.
    pub(crate) fn best_plan(
        &self,
        shape: &FusedShape,
        stream: &Stream,
    ) -> Result<Option<AttentionPlan>, CudaError> {
        if shape.backward {
            return self.plan(shape, 0);
        }
        let numbers: [Proposal; MOST_PLANS] = std::array::from_fn(|number| [number as u64; 8]);
        let asked = format!("{shape:?}, {MOST_PLANS} proposals");
        let key = cache::key("attention", &[stream.device().name(), &self.version()?, &asked]);
        let number = chosen(key, &numbers, || self.fastest(shape, stream))?[0];
        self.plan(shape, number as usize)
    }

    /// The number of the fastest proposal; none if the GPU has no room to measure, or the library no kernel.
    fn fastest(&self, shape: &FusedShape, stream: &Stream) -> Result<Option<usize>, CudaError> {
        let mut plans = Vec::new();
        while let Ok(Some(plan)) = self.plan(shape, plans.last().map_or(0, next)) {
            plans.push(plan);
        }
        if plans.len() < 2 {
            return Ok(plans.first().map(|plan| plan.made.plan.number));
        }
        // As much for every operand as for the largest.
        let queries = shape.batch * shape.heads * shape.positions;
        let each = (queries * shape.of.size().max(4) * shape.size).next_multiple_of(256);
        let operands = plans[0].made.tensors.len();
        let memory = random_memory(stream, each * operands + shape.workspace())?;
        let Some(memory) = memory else { return Ok(None) };
        let at = |operand: usize| memory.address() + (each * operand) as Address;
        let bound = |plan: &AttentionPlan| -> Result<Bound, CudaError> {
            let tensors = plan.made.tensors.iter().copied().enumerate();
            let places: Vec<(TensorId, Address)> = tensors.map(|(i, id)| (id, at(i))).collect();
            plan.made.plan.bind(self, &places, &plan.made.scalars, at(operands))
        };
        let bound = plans.iter().map(bound).collect::<Result<Vec<_>, _>>()?;
        let issue = |proposal: usize| {
            // SAFETY: every tensor of the graph is bound to memory that is large enough for it.
            unsafe { plans[proposal].made.plan.run(self, &bound[proposal]) }
        };
        Ok(Some(plans[fastest(stream, plans.len(), issue)?].made.plan.number))
    }

    fn version(&self) -> Result<String, CudaError> {
        let mut numbers = [0; 3];
        for (i, number) in numbers.iter_mut().enumerate() {
            // SAFETY: the out-pointer is valid.
            let status = unsafe { (self.table.cudnnGetProperty)(i as i32, number) };
            check(self.table, "cudnnGetProperty", status)?;
        }
        Ok(format!("cuDNN {numbers:?}"))
    }
}

/// The number of the proposal after this one.
fn next(plan: &AttentionPlan) -> usize {
    plan.made.plan.number + 1
}
