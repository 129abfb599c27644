//! Attention by cuDNN, in bf16 or f16: the whole of it, forward or backward, is one fused kernel.

mod choice;
mod descriptor;
mod graph;
mod scaled;

use std::fmt;
use std::sync::{Mutex, PoisonError};

use phalanx_call::ALIGN;
use phalanx_ir::ops::AttentionKind;
use phalanx_ir::{DType, Instr, Op, Program};

use crate::error::CudaError;
use crate::kernels::is_narrow;
use crate::libraries::{Address, Cudnn, Handle};
use crate::tasks::{Place, Run};
use graph::{Bound, TensorId};

/// The sizes of a causal attention over whole sequences: q and o are `[batch, positions, heads, size]`,
/// k and v have fewer heads or as many.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct FusedShape {
    /// The element type of all but the log-sum-exp.
    pub(crate) of: DType,
    pub(crate) batch: usize,
    pub(crate) positions: usize,
    pub(crate) heads: usize,
    pub(crate) groups: usize,
    pub(crate) size: usize,
    pub(crate) backward: bool,
}

impl FusedShape {
    /// The attention of an instruction, if the library may compute it on ranks without padding: in bf16 or
    /// f16, causal over whole sequences, without dropout.
    pub(crate) fn of(program: &Program, instr: &Instr) -> Option<Self> {
        let (attention, backward) = match instr.op {
            Op::Attention(attention) => (attention, false),
            Op::AttentionGrad(grad) => (grad.of, true),
            _ => return None,
        };
        let ty = |i: usize| program.ty(instr.inputs[i]);
        let (q, k) = (ty(0).local_shape(program.mesh()), ty(1).local_shape(program.mesh()));
        let shape = Self {
            of: ty(0).dtype,
            batch: q[0],
            positions: q[1],
            heads: q[2],
            groups: k[2],
            size: q[3],
            backward,
        };
        let fits = attention.kind == AttentionKind::Flash
            && attention.causal
            && !attention.drops()
            && q[1] == k[1]
            && ty(0).part(1, program.mesh(), 0).shards == 1
            && shape.is_supported();
        fits.then_some(shape)
    }

    /// Bytes of workspace that the library asks for: backward, a number for each pair of positions, in whole
    /// tiles, and for groups of heads the gradients of each head's keys and values.
    pub(crate) fn workspace(&self) -> usize {
        const LEAST: usize = 256;
        if !self.backward {
            return LEAST;
        }
        let pairs = self.positions.next_multiple_of(64) * self.positions.next_multiple_of(128);
        let each = if self.groups < self.heads { 2 * self.positions * self.size } else { 0 };
        LEAST + self.of.size() * self.batch * self.heads * (pairs + each)
    }

    /// Bytes of one number for each query, which the gradient needs, in whole blocks of memory.
    pub(crate) fn per_query(&self) -> usize {
        let queries = self.batch * self.heads * self.positions;
        if self.backward { (queries * size_of::<f32>()).next_multiple_of(ALIGN) } else { 0 }
    }

    /// Bytes of scratch memory: a number for each query, then the library's workspace.
    pub(crate) fn scratch(&self) -> usize {
        self.per_query() + self.workspace()
    }

    /// Whether the library has kernels for such heads.
    pub(crate) fn is_supported(&self) -> bool {
        is_narrow(self.of)
            && self.size.is_multiple_of(8)
            && self.size <= 128
            && self.positions >= 64
    }
}

/// The library, for one rank.
pub(crate) struct AttentionLibrary {
    table: &'static Cudnn,
    handle: Handle,
}

// SAFETY: the handle is this value's own, and one thread at a time uses it.
unsafe impl Send for AttentionLibrary {}

impl AttentionLibrary {
    /// The library, which works on this stream.
    pub(crate) fn new(stream: Handle) -> Result<Self, CudaError> {
        let table = Cudnn::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the out-pointer is valid, and the stream outlives the library.
        unsafe {
            check(table, "cudnnCreate", (table.cudnnCreate)(&mut handle))?;
            check(table, "cudnnSetStream", (table.cudnnSetStream)(handle, stream))?;
        }
        Ok(Self { table, handle })
    }

    /// The library's first proposal for an attention, of those from number `from` on, that needs no more workspace
    /// than was planned for it; nothing if it has no kernel for such heads on this GPU.
    pub(crate) fn plan(
        &self,
        shape: &FusedShape,
        from: usize,
    ) -> Result<Option<AttentionPlan>, CudaError> {
        let made = match shape.backward {
            false => scaled::forward(self, (shape, from)),
            true => scaled::backward(self, (shape, from)),
        }?;
        Ok(made.map(|made| AttentionPlan { made }))
    }
}

impl Drop for AttentionLibrary {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own.
        unsafe { (self.table.cudnnDestroy)(self.handle) };
    }
}

/// An attention that the library can run.
pub(crate) struct AttentionPlan {
    made: scaled::Attention,
}

impl AttentionPlan {
    /// Bytes of workspace that it needs.
    #[cfg(test)]
    pub(crate) fn workspace(&self) -> usize {
        self.made.plan.workspace
    }
}

/// A call of a plan: its operands in the plan's order.
///
/// Forward: q, k, v, o, log-sum-exp. Backward: q, k, v, o, log-sum-exp, do, dq, dk, dv, and a number
/// for each query.
pub(crate) struct FusedCall {
    plan: std::sync::Arc<AttentionPlan>,
    /// The library's workspace, then the operands.
    places: Vec<Place>,
    /// What the library binds to addresses, for those that were used before.
    bound: Mutex<Vec<(Vec<Address>, Bound)>>,
}

impl fmt::Display for FusedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.places.len() > 6 { "attention, backward" } else { "attention" })
    }
}

impl FusedCall {
    /// With a workspace as large as the shape says.
    pub(crate) fn new(
        plan: std::sync::Arc<AttentionPlan>,
        workspace: Place,
        operands: Vec<Place>,
    ) -> Self {
        Self { plan, places: [vec![workspace], operands].concat(), bound: Mutex::default() }
    }

    /// Issues it.
    ///
    /// # Safety
    /// The operands and the workspace are this run's to use.
    pub(crate) unsafe fn run(
        &self,
        run: &Run<'_>,
        library: &AttentionLibrary,
    ) -> Result<(), CudaError> {
        let made = &self.plan.made;
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |known: &[Address]| {
            known.iter().zip(&self.places).all(|(address, place)| *address == run.address(*place))
        };
        let at = match bound.iter().position(|(known, _)| same(known)) {
            Some(at) => at,
            None => {
                let addresses: Vec<Address> =
                    self.places.iter().map(|place| run.address(*place)).collect();
                let operands = addresses[1..].iter().copied();
                let memory: Vec<(TensorId, Address)> =
                    made.tensors.iter().copied().zip(operands).collect();
                let pack = made.plan.bind(library, &memory, &made.scalars, addresses[0])?;
                bound.push((addresses, pack));
                bound.len() - 1
            }
        };
        // SAFETY: the caller's; every tensor of the graph is bound.
        unsafe { made.plan.run(library, &bound[at].1) }
    }
}

/// Fails unless a call's status is success.
fn check(table: &Cudnn, function: &'static str, status: i32) -> Result<(), CudaError> {
    if status == 0 {
        return Ok(());
    }
    let mut text = vec![0u8; 1024];
    // SAFETY: the buffer has the size that is given.
    unsafe { (table.cudnnGetLastErrorString)(text.as_mut_ptr(), text.len()) };
    let said = String::from_utf8_lossy(&text);
    let why = format!("{} (status {status})", said.trim_end_matches('\0'));
    Err(CudaError::Call { function, why })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::device::{Device, Stream};
    use std::sync::Arc;

    #[test]
    fn workspaces_are_known_beforehand() {
        let (Ok(device), Ok(_)) = (Device::first(), Cudnn::get()) else { return };
        let stream = Arc::new(Stream::new(&device).unwrap());
        let library = AttentionLibrary::new(stream.handle()).unwrap();
        for (batch, positions, heads, groups, size) in [
            (4, 4096, 16, 16, 128),
            (32, 1024, 12, 12, 64),
            (2, 256, 4, 2, 64),
            (1, 192, 4, 4, 32),
            (3, 77, 5, 5, 64),
            (2, 1000, 8, 2, 128),
        ] {
            for backward in [false, true] {
                let of = DType::Bf16;
                let shape = FusedShape { of, batch, positions, heads, groups, size, backward };
                let planned = shape.workspace();
                assert_eq!(
                    library.plan(&shape, 0).unwrap().unwrap().workspace(),
                    planned,
                    "{shape:?}"
                );
            }
        }
    }
}
