//! What a task has while it runs: the memory of its operands, and where it reports errors.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_call::{Slot, Tier};
use phalanx_engine::Args;
use phalanx_ir::DType;

use super::{Endpoint, Outstanding, Share, Var};

/// The first bytes of the arenas, by tier.
#[derive(Clone, Copy)]
pub(crate) struct Bases(pub(crate) [*mut u8; Tier::ALL.len()]);

/// What a running task has: its share, the memory, and a place for errors.
pub(crate) struct Context<'a> {
    pub(crate) share: Share,
    pub(crate) bases: Bases,
    pub(crate) args: Args<'a>,
    pub(crate) scratch: *mut u8,
    pub(crate) scratch_bytes: usize,
    pub(crate) failure: &'a Failure,
    /// The endpoint to other ranks, if there are any.
    pub(crate) comm: Option<&'a Endpoint>,
    /// For each value: the calls that were started and not yet waited for.
    pub(crate) handles: &'a [Outstanding],
}

impl Context<'_> {
    fn address(&self, slot: Slot) -> *mut u8 {
        let (span, offset) = match slot {
            Slot::Input(i) => (&self.args.inputs[i], 0),
            Slot::Output(o) => (&self.args.outputs[o].span, 0),
            Slot::Workspace(offset) => (&self.args.workspace, offset),
            Slot::Unused => unreachable!("an operand of a task has memory"),
        };
        self.bases.0[span.tier.index()].wrapping_add(span.offset + offset)
    }

    /// The address of a value's first element.
    pub(crate) fn ptr<T>(&self, var: &Var) -> *mut T {
        self.address(var.slot).cast()
    }

    /// The address of scratch memory in the workspace.
    pub(crate) fn workspace<T>(&self, offset: usize) -> *mut T {
        self.address(Slot::Workspace(offset)).cast()
    }

    /// Elements of a value, to read.
    ///
    /// # Safety
    /// The task declared the access, and `T` is the value's element type.
    pub(crate) unsafe fn get<T>(&self, var: &Var, elements: Range<usize>) -> &[T] {
        debug_assert!(elements.end <= var.elements() && size_of::<T>() == var.dtype.size());
        // SAFETY: the planner gave the value this memory, aligned, for its whole life; barriers
        // keep writers of other workers away, and the task writes it through no other reference.
        unsafe {
            std::slice::from_raw_parts(self.ptr::<T>(var).add(elements.start), elements.len())
        }
    }

    /// Elements of a value, to write.
    ///
    /// # Safety
    /// The task declared the access, `T` is the value's element type, and no other reference to
    /// these elements is in use.
    #[allow(
        clippy::mut_from_ref,
        reason = "shares are disjoint, which barriers and borders ensure"
    )]
    pub(crate) unsafe fn get_mut<T>(&self, var: &Var, elements: Range<usize>) -> &mut [T] {
        debug_assert!(elements.end <= var.elements() && size_of::<T>() == var.dtype.size());
        // SAFETY: as above; the caller holds no other reference, and workers' shares are disjoint.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr::<T>(var).add(elements.start), elements.len())
        }
    }

    /// A scalar of the step.
    ///
    /// # Safety
    /// The task declared that it reads the value, which is an `f32` or `f64` scalar.
    pub(crate) unsafe fn scalar(&self, var: &Var) -> f64 {
        // SAFETY: the caller's.
        unsafe {
            match var.dtype {
                DType::F64 => self.get::<f64>(var, 0..1)[0],
                _ => f64::from(self.get::<f32>(var, 0..1)[0]),
            }
        }
    }

    /// This worker's scratch memory.
    ///
    /// # Safety
    /// No other slice of it is in use: a second one would alias the first.
    #[allow(clippy::mut_from_ref, reason = "each worker has its own")]
    pub(crate) unsafe fn scratch<T: bytemuck::Pod>(&self, elements: usize) -> &mut [T] {
        assert!(elements * size_of::<T>() <= self.scratch_bytes, "scratch memory is too small");
        // SAFETY: the memory is this worker's own for the run, page-aligned and initialised; the
        // caller uses no other slice of it.
        unsafe { std::slice::from_raw_parts_mut(self.scratch.cast(), elements) }
    }

    /// Whether a value is added to what its output holds.
    pub(crate) fn adds(&self, var: &Var) -> bool {
        matches!(var.slot, Slot::Output(o) if self.args.outputs[o].add)
    }
}

/// The first error of a run.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    message: Mutex<Option<String>>,
    /// Nanoseconds that the first worker spent in matrix products.
    matmul: AtomicU64,
}

impl Failure {
    pub(crate) fn report(&self, message: String) {
        if let Ok(mut first) = self.message.lock() {
            first.get_or_insert(message);
        }
    }

    pub(crate) fn take(&self) -> Option<String> {
        self.message.lock().ok().and_then(|mut m| m.take())
    }

    pub(crate) fn add_product_time(&self, nanoseconds: u64) {
        self.matmul.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn matmul_nanoseconds(&self) -> u64 {
        self.matmul.load(Ordering::Relaxed)
    }
}
