//! Descriptors of cuDNN's backend interface: everything is one, with attributes set by number.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::check;
use crate::error::CudaError;
use crate::libraries::{Cudnn, Handle};

/// Kinds of descriptors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    PointwiseOperation = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
}

/// Types of attributes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    Handle = 0,
    DataType = 1,
    Bool = 2,
    I64 = 3,
    F32 = 4,
    Pointer = 6,
    HeuristicMode = 8,
    PointwiseMode = 14,
    Descriptor = 15,
    Reduction = 18,
}

/// A descriptor.
pub(super) struct Descriptor {
    table: &'static Cudnn,
    pub(super) handle: Handle,
}

// SAFETY: a descriptor is this value's own, and is not changed once it is final.
unsafe impl Send for Descriptor {}
// SAFETY: as above; calls only read it.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) fn new(table: &'static Cudnn, kind: Kind) -> Result<Self, CudaError> {
        let mut handle = null_mut();
        // SAFETY: the out-pointer is valid.
        let status = unsafe { (table.cudnnBackendCreateDescriptor)(kind as i32, &mut handle) };
        check(table, "cudnnBackendCreateDescriptor", status)?;
        Ok(Self { table, handle })
    }

    /// Sets an attribute; the values must have the type that is said.
    pub(super) fn set<T: Copy>(
        &self,
        attribute: i32,
        of: Of,
        values: &[T],
    ) -> Result<&Self, CudaError> {
        let (count, at) = (values.len() as i64, values.as_ptr().cast::<c_void>());
        // SAFETY: the library copies so many values of this type.
        let status = unsafe {
            (self.table.cudnnBackendSetAttribute)(self.handle, attribute, of as i32, count, at)
        };
        check(self.table, "cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    /// Reads up to as many values of an attribute as there is room for; says how many there are.
    pub(super) fn get<T>(
        &self,
        attribute: i32,
        of: Of,
        room: &mut [T],
    ) -> Result<usize, CudaError> {
        let (mut count, size) = (0i64, room.len() as i64);
        // SAFETY: the out-pointers are valid, and there is room for as many values as is said.
        let status = unsafe {
            (self.table.cudnnBackendGetAttribute)(
                self.handle,
                attribute,
                of as i32,
                size,
                &mut count,
                room.as_mut_ptr().cast(),
            )
        };
        check(self.table, "cudnnBackendGetAttribute", status)?;
        Ok(count as usize)
    }

    /// Makes it final: its attributes do not change any more.
    pub(super) fn finish(self) -> Result<Self, CudaError> {
        // SAFETY: the descriptor is valid.
        let status = unsafe { (self.table.cudnnBackendFinalize)(self.handle) };
        check(self.table, "cudnnBackendFinalize", status)?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is this value's own.
        unsafe { (self.table.cudnnBackendDestroyDescriptor)(self.handle) };
    }
}
