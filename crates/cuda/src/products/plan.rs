//! Products of the library: described once, with the algorithm that it proposes first.
//!
//! The library thinks in columns. A row-major matrix is the transpose of a column-major one in the
//! same memory, so a row-major result is asked for as its transpose, with the operands exchanged.

use std::ffi::c_void;
use std::ptr::null_mut;

use phalanx_ir::{DType, ProductLoops, StridedLoop};

use crate::error::CudaError;
use crate::libraries::{Address, CublasLt, Handle, Heuristic};
use crate::tasks::Run;

/// Bytes of the library's workspace, for each rank.
pub(crate) const WORKSPACE: usize = 32 << 20;

/// A product in the library's terms: `D[m×n] = op(A)·op(B) + beta·C`, columns first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ProductShape {
    /// Whether the library's A is the program's second operand.
    swapped: bool,
    sides: [usize; 3],
    /// Whether A and B are transposed.
    transposed: [bool; 2],
    /// Leading dimensions of A, B and D.
    leading: [usize; 3],
    /// How many products, and the elements from one to the next in A, B and D.
    batch: (usize, [usize; 3]),
    of: DType,
    out: DType,
    /// Bytes of which all addresses of A, B and D are multiples.
    aligned: [u32; 3],
    /// What is computed besides the product.
    epilogue: Epilogue,
}

/// What the library computes with a product, before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Epilogue {
    Nothing,
    /// A number for each row of D is added.
    Bias,
    /// The same, and the GELU of the sum is stored too.
    BiasAndGelu,
}

/// Where the operands and results of an epilogue lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extra {
    pub(crate) bias: Address,
    pub(crate) gelu: Option<Address>,
}

impl ProductShape {
    /// The library's terms for these loops, or nothing if it cannot describe some matrix.
    pub(crate) fn of(
        loops: &ProductLoops,
        batch: Option<StridedLoop>,
        [of, out]: [DType; 2],
    ) -> Option<Self> {
        let StridedLoop { size, .. } = loops.inner;
        let nothing = size == 0 || loops.sums.iter().any(|axis| axis.size == 0);
        if nothing || loops.rows.size == 0 || loops.cols.size == 0 {
            return None;
        }
        let (rows, cols) = (loops.rows, loops.cols);
        // Along which index results are neighbours.
        let swapped = cols.strides[2] == 1 || (rows.strides[2] != 1 && cols.size == 1);
        let (m, n, first, second) = match swapped {
            true => (cols, rows, 1, 0),
            false => (rows, cols, 0, 1),
        };
        let k = loops.inner;
        let (near, result) = matrix((m.size, m.strides[2]), (n.size, n.strides[2]))?;
        if near {
            return None;
        }
        let (ta, lda) = matrix((m.size, m.strides[first]), (k.size, k.strides[first]))?;
        let (tb, ldb) = matrix((k.size, k.strides[second]), (n.size, n.strides[second]))?;
        let strides = |t: usize| batch.map_or(0, |axis| axis.strides[t]);
        let steps = [strides(first), strides(second), strides(2)];
        // Every loop around the product moves all three addresses.
        let align = |t: usize, size: usize| {
            let around = loops.outer.iter().chain(&loops.sums).map(|axis| axis.strides[t] * size);
            around.fold(16, |all: usize, step| match step {
                0 => all,
                _ => all.min(1 << step.trailing_zeros()),
            }) as u32
        };
        Some(Self {
            swapped,
            sides: [m.size, n.size, k.size],
            transposed: [ta, tb],
            leading: [lda, ldb, result],
            batch: (batch.map_or(1, |axis| axis.size), steps),
            of,
            out,
            aligned: [align(first, of.size()), align(second, of.size()), align(2, out.size())],
            epilogue: Epilogue::Nothing,
        })
    }

    /// The same with a bias for each column of the program's result, if these are the rows of D, and with
    /// the GELU of the sum.
    pub(crate) fn with_bias(self, gelu: bool) -> Option<Self> {
        let epilogue = if gelu { Epilogue::BiasAndGelu } else { Epilogue::Bias };
        self.swapped.then_some(Self { epilogue, ..self })
    }
}

/// Whether a matrix, whose rows and columns have these sizes and strides, must be transposed to have its
/// columns together, and its leading dimension.
fn matrix(rows: (usize, usize), cols: (usize, usize)) -> Option<(bool, usize)> {
    let together = |(size, stride): (usize, usize)| size == 1 || stride == 1;
    // A stride that is never taken can be any.
    let leading = |(size, stride): (usize, usize), inner: usize| {
        if size == 1 { inner } else { stride }
    };
    if together(rows) && leading(cols, rows.0) >= rows.0 {
        return Some((false, leading(cols, rows.0)));
    }
    if together(cols) && leading(rows, cols.0) >= cols.0 {
        return Some((true, leading(rows, cols.0)));
    }
    None
}

/// The library, for one rank.
pub(crate) struct ProductLibrary {
    table: &'static CublasLt,
    handle: Handle,
    /// Whether products of f32 round their operands to TF32.
    pub(crate) tf32: bool,
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
        Ok(Self { table, handle, tf32: false })
    }

    /// The library's first proposal for a product, or nothing if it has none.
    pub(crate) fn plan(&self, shape: &ProductShape) -> Result<Option<ProductPlan>, CudaError> {
        let mut plan = ProductPlan::described(self.table, shape, self.tf32)?;
        let (mut preference, mut found) = (null_mut(), [Heuristic::default()]);
        let mut count = 0;
        // SAFETY: the out-pointers are valid, all descriptors are, and there is room for one result.
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
                1,
                found.as_mut_ptr(),
                &mut count,
            );
            (self.table.cublasLtMatmulPreferenceDestroy)(preference);
            status
        };
        let [first] = found;
        let fits = status == 0 && count > 0 && first.state == 0 && first.workspace <= WORKSPACE;
        plan.algorithm = first.algorithm;
        Ok(fits.then_some(plan))
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
    algorithm: [u64; 8],
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
        run: &Run<'_>,
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
        let (workspace, bytes) = run.workspace;
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
                run.stream.handle(),
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

fn check(function: &'static str, status: i32) -> Result<(), CudaError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaError::Call { function, why: format!("status {status}") }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn shape(spec: &str, a: &[usize], b: &[usize], out: &[usize]) -> Option<ProductShape> {
        let loops = ProductLoops::new(&spec.parse().unwrap(), [a, b, out], a);
        let batch = loops.outer.iter().copied().max_by_key(|axis| axis.size);
        ProductShape::of(&loops, batch, [DType::Bf16, DType::F32])
    }

    #[test]
    fn products_of_layers_are_described_without_copies() {
        // y = x·w: asked for as yᵀ = wᵀ·xᵀ, in which both lie as columns.
        let forward = shape("bsd,de->bse", &[2, 3, 4], &[4, 5], &[2, 3, 5]).unwrap();
        assert!(forward.swapped);
        assert_eq!((forward.sides, forward.transposed), ([5, 6, 4], [false, false]));
        assert_eq!(forward.leading, [5, 4, 5]);
        let inputs = shape("bse,de->bsd", &[2, 3, 5], &[4, 5], &[2, 3, 4]).unwrap();
        assert_eq!((inputs.sides, inputs.transposed), ([4, 6, 5], [true, false]));
        let weights = shape("bsd,bse->de", &[2, 3, 4], &[2, 3, 5], &[4, 5]).unwrap();
        assert_eq!((weights.sides, weights.transposed), ([5, 4, 6], [false, true]));
    }

    #[test]
    fn batches_have_strides_and_odd_ones_limit_the_alignment() {
        let scores = shape("bshd,bthd->bhst", &[2, 3, 7, 5], &[2, 4, 7, 5], &[2, 7, 3, 4]).unwrap();
        assert_eq!(scores.batch, (7, [5, 5, 12]));
        assert_eq!(scores.aligned, [2, 2, 16]);
    }
}
