//! A launch of a kernel, with its arguments as they are known before it runs.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use phalanx_call::Slot;

use super::{Place, Run};
use crate::device::{DeviceMemory, Function, Grid};
use crate::error::CudaError;
use crate::kernels::KernelSpec;

/// An argument of a kernel.
#[derive(Clone)]
pub(crate) enum Arg {
    /// The address of a place.
    Pointer(Place),
    /// Several addresses that are one structure; nothing for a null.
    Pointers(Vec<Option<Place>>),
    /// No address.
    Null,
    /// Numbers that the engine keeps.
    Constant(Arc<DeviceMemory>),
    /// Whether a value is added to what its output holds.
    Adds(Slot),
    /// A whole number.
    Int(i64),
    /// A number.
    Real(f64),
    /// A structure of numbers of eight bytes.
    Words(Vec<i64>),
    /// Where bad ids are reported.
    Fault,
}

/// A kernel and how it is launched.
pub(crate) struct KernelTask {
    pub(crate) kernel: KernelSpec,
    /// Set when the program's kernels are compiled.
    pub(crate) function: Option<Function>,
    grid: Grid,
    args: Vec<Arg>,
}

/// The most arguments of a kernel, and the most addresses in structures of one.
const MOST: usize = 32;

impl KernelTask {
    pub(crate) fn new(kernel: KernelSpec, blocks: [u32; 3], threads: u32, args: Vec<Arg>) -> Self {
        assert!(args.len() <= MOST, "{} has too many arguments", kernel.entry);
        Self { kernel, function: None, grid: Grid { blocks, threads, shared: 0 }, args }
    }

    /// The same with shared memory.
    pub(crate) fn sharing(mut self, bytes: usize) -> Self {
        self.grid.shared = bytes as u32;
        self
    }

    /// Launches it.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and its operands are this run's to use.
    pub(crate) unsafe fn run(&self, run: &Run<'_>) -> Result<(), CudaError> {
        let Some(function) = self.function else {
            let why = format!("{} was not compiled", self.kernel.entry);
            return Err(CudaError::Call { function: "cuLaunchKernel", why });
        };
        // Values and their addresses, on the stack: running allocates nothing.
        let mut values = [0u64; MOST];
        let mut structures = [0u64; MOST];
        let mut used = 0;
        let mut pointers = [null_mut::<c_void>(); MOST];
        for (i, arg) in self.args.iter().enumerate() {
            let value = match arg {
                Arg::Pointer(place) => run.address(*place),
                Arg::Null => 0,
                Arg::Constant(memory) => memory.address(),
                Arg::Adds(slot) => u64::from(run.adds(*slot)),
                Arg::Int(number) => *number as u64,
                Arg::Real(number) => number.to_bits(),
                Arg::Fault => run.fault,
                Arg::Words(words) => {
                    pointers[i] = words.as_ptr().cast_mut().cast();
                    continue;
                }
                Arg::Pointers(places) => {
                    pointers[i] = structures[used..].as_mut_ptr().cast();
                    for place in places {
                        structures[used] = place.map_or(0, |place| run.address(place));
                        used += 1;
                    }
                    continue;
                }
            };
            values[i] = value;
            pointers[i] = (&raw mut values[i]).cast();
        }
        // SAFETY: every pointer is to a value that lives until the call returns; the rest is the
        // caller's.
        unsafe { function.launch(run.stream, self.grid, &mut pointers[..self.args.len()]) }
    }
}
