//! A GPU: its context and its kernels, which all ranks of a process share.

mod graph;
mod mark;
mod memory;
mod stream;

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::compiler::{self, Cubin};
use crate::error::CudaError;
use crate::kernels::KernelSpec;
use crate::libraries::{Driver, Handle, Nvrtc, driver_call};

pub(crate) use graph::CapturedWork;
pub(crate) use mark::Mark;
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use stream::{Stream, TimeMark};

/// The GPU that this process uses, of those that the driver shows (`CUDA_VISIBLE_DEVICES` chooses them): the
/// first, or the one that [`Device::choose`] names.
pub struct Device {
    driver: &'static Driver,
    context: Handle,
    name: String,
    uuid: [u8; 16],
    /// Its version as compilers name it, such as `sm_90`.
    architecture: String,
    processors: u32,
    functions: Mutex<HashMap<String, Function>>,
    /// How many engines of this process use it.
    seats: Mutex<usize>,
}

/// An engine's place among those that use a GPU.
pub(crate) struct EngineSeat(Arc<Device>);

impl Drop for EngineSeat {
    fn drop(&mut self) {
        *self.0.seats.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

// SAFETY: the context and the functions are handles that any thread may use once it has made the
// context current, which `enter` does.
unsafe impl Send for Device {}
// SAFETY: as above; the table of functions has a lock.
unsafe impl Sync for Device {}

/// A compiled kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(Handle);

// SAFETY: a function is a handle, valid until the process ends, since modules are never unloaded.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Which GPU this process uses.
static PLACE: AtomicUsize = AtomicUsize::new(0);

/// The numbers of attributes in the driver's interface.
const PROCESSORS: i32 = 16;
const MAJOR: i32 = 75;
const MINOR: i32 = 76;
const DYNAMIC_SHARED: i32 = 8;

/// What every kernel may have without asking.
const PLAIN_SHARED: u32 = 48 << 10;

impl Device {
    /// The process's GPU, with all libraries that the engine cannot do without.
    pub fn first() -> Result<Arc<Self>, CudaError> {
        static DEVICE: OnceLock<Result<Arc<Device>, CudaError>> = OnceLock::new();
        DEVICE.get_or_init(|| Self::open().map(Arc::new)).clone()
    }

    /// Lets this process use the GPU of its place among the processes of its host; with more processes than
    /// GPUs, some share one. It must be called before the first use.
    pub fn choose(place: usize) {
        PLACE.store(place, Ordering::Relaxed);
    }

    /// How many GPUs the driver shows.
    pub fn count() -> Result<usize, CudaError> {
        let (driver, mut count) = (Driver::get()?, 0);
        // SAFETY: the out-pointer is valid.
        unsafe {
            driver_call!(driver, cuInit(0))?;
            driver_call!(driver, cuDeviceGetCount(&mut count))?;
        }
        Ok(count as usize)
    }

    fn open() -> Result<Self, CudaError> {
        let driver = Driver::get()?;
        Nvrtc::get()?;
        let (mut number, mut count, mut context) = (0, 0, null_mut());
        let (mut name, mut uuid) = ([0; 128], [0; 16]);
        // SAFETY: the out-pointers are valid, and the name's length is given.
        unsafe {
            driver_call!(driver, cuInit(0))?;
            driver_call!(driver, cuDeviceGetCount(&mut count))?;
            let place = PLACE.load(Ordering::Relaxed) % count.max(1) as usize;
            driver_call!(driver, cuDeviceGet(&mut number, place as i32))?;
            driver_call!(driver, cuDeviceGetName(name.as_mut_ptr(), 127, number))?;
            driver_call!(driver, cuDeviceGetUuid_v2(&mut uuid, number))?;
            driver_call!(driver, cuDevicePrimaryCtxRetain(&mut context, number))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: the out-pointer is valid.
            unsafe { driver_call!(driver, cuDeviceGetAttribute(&mut value, which, number)) }?;
            Ok(value)
        };
        let (major, minor) = (attribute(MAJOR)?, attribute(MINOR)?);
        if major < 8 {
            let why = format!("its version is {major}.{minor}, and bf16 needs 8.0 or newer");
            return Err(CudaError::Call { function: "opening the GPU", why });
        }
        let name = name.iter().take_while(|&&c| c != 0).map(|&c| c as u8 as char).collect();
        let device = Self {
            driver,
            context,
            name,
            uuid,
            architecture: format!("sm_{major}{minor}"),
            processors: attribute(PROCESSORS)? as u32,
            functions: Mutex::default(),
            seats: Mutex::default(),
        };
        device.enter()?;
        Ok(device)
    }

    /// Counts an engine; waits while another captures a step.
    pub(crate) fn seat(self: &Arc<Self>) -> EngineSeat {
        *self.seats.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        EngineSeat(self.clone())
    }

    /// Does something while no other engine exists, and none can begin to; nothing if there are others.
    pub(crate) fn alone<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        (*seats == 1).then(act)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What no other GPU has.
    pub(crate) fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// Free and total bytes of its memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out-pointers are valid.
        unsafe { driver_call!(self.driver, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    /// How many processors it has: kernels that walk over many elements take a few blocks on each.
    pub(crate) fn processors(&self) -> u32 {
        self.processors
    }

    /// Makes its context current for the calling thread.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context is kept until the process ends.
        unsafe { driver_call!(self.driver, cuCtxSetCurrent(self.context)) }
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Compiled kernels, in the order in which they are asked for. Those that are new are compiled
    /// together, or read from the cache on disk.
    pub(crate) fn functions(&self, specs: &[&KernelSpec]) -> Result<Vec<Function>, CudaError> {
        self.enter()?;
        let mut known = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<&KernelSpec> = Vec::new();
        for spec in specs {
            let asked = missing.iter().any(|other| other.entry == spec.entry);
            if !asked && !known.contains_key(&spec.entry) {
                missing.push(spec);
            }
        }
        if !missing.is_empty() {
            let cubin = compiler::compile(&missing, &self.architecture)?;
            let module = self.load(&cubin)?;
            for (spec, name) in missing.iter().zip(&cubin.names) {
                known.insert(spec.entry.clone(), self.function(module, name, spec.shared)?);
            }
        }
        Ok(specs.iter().map(|spec| known[&spec.entry]).collect())
    }

    fn load(&self, cubin: &Cubin) -> Result<Handle, CudaError> {
        let mut module = null_mut();
        // SAFETY: the cubin is complete, as its checksum says, and the driver copies it.
        unsafe {
            let image = cubin.bytes.as_ptr().cast::<c_void>();
            driver_call!(self.driver, cuModuleLoadData(&mut module, image))?;
        }
        Ok(module)
    }

    fn function(&self, module: Handle, name: &str, shared: u32) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Call {
            function: "cuModuleGetFunction",
            why: format!("{name:?} is not a name"),
        })?;
        let mut function = null_mut();
        // SAFETY: the module is loaded, and the name is a string.
        unsafe {
            driver_call!(self.driver, cuModuleGetFunction(&mut function, module, text.as_ptr()))?;
            if shared > PLAIN_SHARED {
                let bytes = shared as i32;
                driver_call!(self.driver, cuFuncSetAttribute(function, DYNAMIC_SHARED, bytes))?;
            }
        }
        Ok(Function(function))
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    /// Bytes of shared memory that the launch asks for.
    pub(crate) shared: u32,
}

impl Function {
    /// Launches it with the values at these addresses as arguments.
    ///
    /// # Safety
    /// The addresses point to as many values as the kernel has parameters, of their types; and what
    /// the kernel reads and writes is this launch's to use, in the order of the stream.
    pub(crate) unsafe fn launch(
        self,
        stream: &Stream,
        grid: Grid,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let ([x, y, z], driver) = (grid.blocks, stream.driver());
        // SAFETY: the caller's; the driver copies the arguments before it returns.
        unsafe {
            driver_call!(
                driver,
                cuLaunchKernel(
                    self.0,
                    x,
                    y,
                    z,
                    grid.threads,
                    1,
                    1,
                    grid.shared,
                    stream.handle(),
                    arguments.as_mut_ptr(),
                    null_mut(),
                )
            )
        }
    }
}
