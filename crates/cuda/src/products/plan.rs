//! Products of the library: described once, with one of the algorithms that it proposes.

use std::ffi::c_void;
use std::ptr::null_mut;

use phalanx_ir::DType;

use super::choice::IssuedOn;
use super::shape::{Epilogue, ProductShape};
use crate::error::CudaError;
use crate::libraries::{Address, CublasLt, Handle, Heuristic};

/// Bytes of the library's workspace, for each rank.
pub(crate) const WORKSPACE: usize = 32 << 20;

/// How many proposals the library is asked for.
const MOST_PROPOSALS: usize = 8;

/// An algorithm, as the library writes it down.
pub(super) use crate::choice::Proposal as Algorithm;

/// Where the operands and results of an epilogue lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extra {
    pub(crate) bias: Address,
    pub(crate) gelu: Option<Address>,
}

/// The library, for one rank.
pub(crate) struct ProductLibrary {
    pub(super) table: &'static CublasLt,
    handle: Handle,
    /// Whether products of f32 round their operands to TF32.
    pub(crate) tf32: bool,
    /// Whether proposals are measured; otherwise the first one is taken.
    pub(crate) measures: bool,
}

// SAFETY: the handle is this value's own, and one thread at a time uses it.
unsafe impl Send for ProductLibrary {}

/// The library's numbers: attributes, element types, ways of computing.
const TRANSPOSE_A: i32 = 3;
const TRANSPOSE_B: i32 = 4;
const BATCH_COUNT: i32 = 5;
const BATCH_STRIDE: i32 = 6;
const MOST_WORKSPACE: i32 = 1;
const ALIGNMENT_A: i32 = 5;
const EPILOGUE: i32 = 7;
const BIAS_POINTER: i32 = 8;
const AUX_POINTER: i32 = 11;
const AUX_LEADING: i32 = 12;
const ADD_BIAS: i32 = 4;
const ADD_BIAS_AND_GELU: i32 = 164;
const COMPUTE_F32: i32 = 68;
const COMPUTE_F64: i32 = 70;
const COMPUTE_TF32: i32 = 77;

fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => 1,
        DType::F16 => 2,
        DType::Bf16 => 14,
        _ => 0,
    }
}

impl ProductLibrary {
    pub(crate) fn new() -> Result<Self, CudaError> {
        let table = CublasLt::get()?;
        let mut handle = null_mut();
        // SAFETY: the out-pointer is valid.
        check("cublasLtCreate", unsafe { (table.cublasLtCreate)(&mut handle) })?;
        Ok(Self { table, handle, tf32: false, measures: true })
    }

    /// A product with the proposal that is best for it, or nothing if the library has none.
    pub(crate) fn plan(
        &self,
        shape: &ProductShape,
        place: &IssuedOn<'_>,
    ) -> Result<Option<ProductPlan>, CudaError> {
        let mut plan = ProductPlan::described(self.table, shape, self.tf32)?;
        let proposals = self.proposals(shape, &plan)?;
        let Some(&first) = proposals.first() else { return Ok(None) };
        plan.algorithm = first;
        if self.measures && shape.is_worth_measuring() && proposals.len() > 1 {
            plan.algorithm = self.chosen(shape, &mut plan, &proposals, place)?;
        }
        Ok(Some(plan))
    }

    /// What the library proposes for a product, best first as it believes.
    fn proposals(
        &self,
        shape: &ProductShape,
        plan: &ProductPlan,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let (mut preference, mut found) = (null_mut(), [Heuristic::default(); MOST_PROPOSALS]);
        let mut count = 0;
        // SAFETY: the out-pointers are valid, all descriptors are, and there is room for the results.
        let status = unsafe {
            check(
                "cublasLtMatmulPreferenceCreate",
                (self.table.cublasLtMatmulPreferenceCreate)(&mut preference),
            )?;
            let set = |attribute: i32, value: *const c_void, bytes: usize| {
                (self.table.cublasLtMatmulPreferenceSetAttribute)(
                    preference, attribute, value, bytes,
                )
            };
            let most = WORKSPACE;
            set(MOST_WORKSPACE, (&raw const most).cast(), size_of::<usize>());
            let [a, b, d] = &shape.aligned;
            for (i, bytes) in [a, b, d, d].into_iter().enumerate() {
                set(ALIGNMENT_A + i as i32, (&raw const *bytes).cast(), size_of::<u32>());
            }
            let status = (self.table.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                plan.product,
                plan.matrices[0],
                plan.matrices[1],
                plan.matrices[2],
                plan.matrices[2],
                preference,
                MOST_PROPOSALS as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            (self.table.cublasLtMatmulPreferenceDestroy)(preference);
            status
        };
        let count = if status == 0 { count.max(0) as usize } else { 0 };
        let fit = |one: &&Heuristic| one.state == 0 && one.workspace <= WORKSPACE;
        Ok(found.iter().take(count).filter(fit).map(|one| one.algorithm).collect())
    }
}

impl Drop for ProductLibrary {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own.
        unsafe { (self.table.cublasLtDestroy)(self.handle) };
    }
}

/// A product that the library can run.
pub(crate) struct ProductPlan {
    table: &'static CublasLt,
    swapped: bool,
    wide: bool,
    product: Handle,
    matrices: [Handle; 3],
    pub(super) algorithm: Algorithm,
}

// SAFETY: the descriptors are this value's own.
unsafe impl Send for ProductPlan {}
// SAFETY: plans belong to one engine, which one thread at a time uses; only the address of a bias is
// changed once they are made, right before the call that reads it.
unsafe impl Sync for ProductPlan {}

impl ProductPlan {
    fn described(
        table: &'static CublasLt,
        shape: &ProductShape,
        tf32: bool,
    ) -> Result<Self, CudaError> {
        let wide = shape.of == DType::F64;
        let (compute, scale) = match shape.of {
            DType::F64 => (COMPUTE_F64, DType::F64),
            DType::F32 if tf32 => (COMPUTE_TF32, DType::F32),
            _ => (COMPUTE_F32, DType::F32),
        };
        let mut plan = Self {
            table,
            swapped: shape.swapped,
            wide,
            product: null_mut(),
            matrices: [null_mut(); 3],
            algorithm: [0; 8],
        };
        let [m, n, k] = shape.sides;
        let [ta, tb] = shape.transposed;
        let turned = |turn: bool, rows, cols| if turn { (cols, rows) } else { (rows, cols) };
        let kinds =
            [(shape.of, turned(ta, m, k)), (shape.of, turned(tb, k, n)), (shape.out, (m, n))];
        // SAFETY: the out-pointers are valid; attributes have their documented sizes.
        unsafe {
            check(
                "cublasLtMatmulDescCreate",
                (table.cublasLtMatmulDescCreate)(&mut plan.product, compute, code(scale)),
            )?;
            plan.set(TRANSPOSE_A, &i32::from(ta))?;
            plan.set(TRANSPOSE_B, &i32::from(tb))?;
            // Of addresses, their alignment is what counts before they are known.
            let later = Address::from(256u32);
            match shape.epilogue {
                Epilogue::Nothing => {}
                Epilogue::Bias => {
                    plan.set(EPILOGUE, &ADD_BIAS)?;
                    plan.set(BIAS_POINTER, &later)?;
                }
                Epilogue::BiasAndGelu => {
                    plan.set(EPILOGUE, &ADD_BIAS_AND_GELU)?;
                    plan.set(BIAS_POINTER, &later)?;
                    plan.set(AUX_POINTER, &later)?;
                    plan.set(AUX_LEADING, &(shape.leading[2] as i64))?;
                }
            }
            for (i, (dtype, (rows, cols))) in kinds.into_iter().enumerate() {
                let matrix = &mut plan.matrices[i];
                let (rows, cols, leading) = (rows as u64, cols as u64, shape.leading[i] as i64);
                check(
                    "cublasLtMatrixLayoutCreate",
                    (table.cublasLtMatrixLayoutCreate)(matrix, code(dtype), rows, cols, leading),
                )?;
                let (count, step) = (shape.batch.0 as i32, shape.batch.1[i] as i64);
                if count > 1 {
                    let set = table.cublasLtMatrixLayoutSetAttribute;
                    let status = set(*matrix, BATCH_COUNT, (&raw const count).cast(), 4);
                    check("cublasLtMatrixLayoutSetAttribute", status)?;
                    let status = set(*matrix, BATCH_STRIDE, (&raw const step).cast(), 8);
                    check("cublasLtMatrixLayoutSetAttribute", status)?;
                }
            }
        }
        Ok(plan)
    }

    /// Sets an attribute of the product.
    ///
    /// # Safety
    /// The value has the attribute's type.
    unsafe fn set<T>(&self, attribute: i32, value: &T) -> Result<(), CudaError> {
        // SAFETY: the caller's; the library copies the value.
        let status = unsafe {
            let value = (&raw const *value).cast();
            let set = self.table.cublasLtMatmulDescSetAttribute;
            set(self.product, attribute, value, size_of::<T>())
        };
        check("cublasLtMatmulDescSetAttribute", status)
    }

    /// Issues the product of the program's operands, added to what lies at `old`, and the epilogue that the
    /// plan is for.
    ///
    /// # Safety
    /// The addresses are of matrices as the plan describes them, which are this run's to use.
    pub(crate) unsafe fn run(
        &self,
        library: &ProductLibrary,
        place: &IssuedOn<'_>,
        [a, b]: [Address; 2],
        old: Option<Address>,
        mut out: Address,
        extra: Option<Extra>,
    ) -> Result<(), CudaError> {
        if let Some(Extra { bias, gelu }) = extra {
            // SAFETY: the attribute is an address. One thread at a time uses a plan.
            unsafe { self.set(BIAS_POINTER, &bias)? };
            if let Some(gelu) = gelu {
                // SAFETY: as above. The sum is the library's second result.
                unsafe { self.set(AUX_POINTER, &out)? };
                out = gelu;
            }
        }
        let (a, b) = if self.swapped { (b, a) } else { (a, b) };
        let beta = f64::from(u8::from(old.is_some()));
        let (one, beta) = ([1.0f64, 1.0], [beta, beta]);
        let (one32, beta32) = ([1.0f32], [beta[0] as f32]);
        let scalars: [*const c_void; 2] = match self.wide {
            true => [one.as_ptr().cast(), beta.as_ptr().cast()],
            false => [one32.as_ptr().cast(), beta32.as_ptr().cast()],
        };
        let [first, second, result] = self.matrices;
        let (workspace, bytes) = place.workspace;
        // SAFETY: the caller's; scalars are read before the call returns, and the workspace is used
        // by this stream alone.
        let status = unsafe {
            (self.table.cublasLtMatmul)(
                library.handle,
                self.product,
                scalars[0],
                a,
                first,
                b,
                second,
                scalars[1],
                old.unwrap_or(out),
                result,
                out,
                result,
                self.algorithm.as_ptr().cast(),
                workspace,
                bytes,
                place.stream.handle(),
            )
        };
        check("cublasLtMatmul", status)
    }
}

impl Drop for ProductPlan {
    fn drop(&mut self) {
        // SAFETY: the descriptors are this value's own; those that were not made are null.
        unsafe {
            for matrix in self.matrices.into_iter().filter(|m| !m.is_null()) {
                (self.table.cublasLtMatrixLayoutDestroy)(matrix);
            }
            if !self.product.is_null() {
                (self.table.cublasLtMatmulDescDestroy)(self.product);
            }
        }
    }
}

pub(super) fn check(function: &'static str, status: i32) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Call { function, why: format!("status {status}") }),
    }
}
