//! The default backends of the command and the library: ranks are threads on this machine, or the
//! processes of a job, and compute on its cores or on a GPU. Only this file names engines and
//! transports.

use std::sync::Arc;
use std::time::Duration;

use phalanx_call::Requirements;
use phalanx_comm::{Communicator, Launcher, Options, Processes, StateMemory, Threads};
use phalanx_config::{CpuUnitKind, CpuUnits, DeviceKind};
use phalanx_cpu::products::{CpuUnit, ProductUnits, UnitSet};
use phalanx_cpu::{CpuEngine, CpuRequirements};
pub use phalanx_cuda::GpuNow;
use phalanx_cuda::{CudaEngine, CudaRequirements, Device};
use phalanx_engine::{Counters, Engine};
use phalanx_ir::DType;

use crate::{Backend, EngineBackend, Size, again, job};
use phalanx_error::{Error, Problem, Result, bytes};

/// The memory that a device's engine needs besides the values of programs.
pub fn requirements_of(device: DeviceKind, units: CpuUnits) -> Arc<dyn Requirements> {
    match device {
        DeviceKind::Cpu => Arc::new(CpuRequirements { products: products_with(units) }),
        DeviceKind::Cuda => Arc::new(CudaRequirements::here()),
    }
}

/// The processes of the job that this process has joined, each with one rank, if a session has as
/// many ranks; otherwise threads.
pub fn ranks(device: DeviceKind) -> Box<dyn Backend> {
    backend(device, job_or_threads, |_| Options::default())
}

/// Ranks as threads that compute on the cores.
pub fn threads() -> Box<dyn Backend> {
    threads_of(DeviceKind::Cpu)
}

/// Ranks as threads that compute on a device.
pub fn threads_of(device: DeviceKind) -> Box<dyn Backend> {
    backend(device, only_threads, |_| Options::default())
}

/// The same as [`ranks`], for a program that has the machine to itself: each rank is bound to its own
/// core if there are enough cores.
pub fn own_machine(device: DeviceKind) -> Box<dyn Backend> {
    // A rank that computes on a GPU only issues work.
    let binds = device == DeviceKind::Cpu;
    let options = move |size: Size| Options { bind: binds && size.ranks > 1, ..Options::default() };
    backend(device, job_or_threads, options)
}

/// Ranks as threads that wait for each other as `options` say, and compute on the cores.
pub fn threads_with(options: Options) -> Box<dyn Backend> {
    backend(DeviceKind::Cpu, only_threads, move |_| options.clone())
}

/// Refuses a device that is not there, in one message that says what is missing.
pub fn require(device: DeviceKind) -> Result<()> {
    match device {
        DeviceKind::Cpu => Ok(()),
        DeviceKind::Cuda => gpu().map(drop),
    }
}

/// Refuses units that this processor does not have.
pub fn require_units(units: CpuUnits) -> Result<()> {
    let here = UnitSet::here();
    match units.asked().map(units_of).filter(|asked| asked.and(here) != *asked) {
        None => Ok(()),
        Some(asked) => Err(Error::refused(
            Problem::new(format!("run.cpu_units asks for {asked}"))
                .because(format!("this processor and its system offer {here}"))
                .nearest("run.cpu_units = \"auto\""),
        )),
    }
}

/// What multiplies on the cores, in words: units by what they multiply.
pub fn multipliers(units: CpuUnits) -> String {
    products_with(units).to_string()
}

/// What multiplies operands of a type on the cores, and the most that one core can do in FLOP/s.
pub fn product_peak(units: CpuUnits, operand: DType) -> Option<(String, f64)> {
    products_with(units).peak(operand)
}

/// What products are computed with.
fn products_with(units: CpuUnits) -> ProductUnits {
    match units.asked() {
        None => ProductUnits::fastest(UnitSet::here()),
        Some(asked) => ProductUnits::every(units_of(asked)),
    }
}

fn units_of(kinds: Vec<CpuUnitKind>) -> UnitSet {
    let unit = |kind: CpuUnitKind| match kind {
        CpuUnitKind::Avx2 => CpuUnit::Avx2,
        CpuUnitKind::Avx512 => CpuUnit::Avx512,
        CpuUnitKind::Avx512Bf16 => CpuUnit::Avx512Bf16,
        CpuUnitKind::Amx => CpuUnit::Amx,
    };
    kinds.into_iter().map(unit).collect()
}

/// What a GPU is, for reports.
#[derive(Clone, PartialEq, Debug)]
pub struct GpuFacts {
    /// Its name.
    pub name: String,
    /// Bytes of its memory that are free now.
    pub free: usize,
    /// Bytes of its memory.
    pub total: usize,
    /// Its peak rate of bf16 products in FLOP/s, if it is known.
    pub bf16_rate: Option<f64>,
}

/// The GPU of this process; a refusal that says what is missing if there is none.
pub fn gpu() -> Result<GpuFacts> {
    let device = own_gpu()?;
    let (free, total) = device.memory().map_err(unusable)?;
    Ok(GpuFacts { name: device.name().to_owned(), free, total, bf16_rate: rate(&device) })
}

/// What the GPU of this process does right now.
pub fn gpu_now() -> Result<GpuNow> {
    own_gpu()?.now().map_err(unusable)
}

/// The other processes that use the GPU of this one, in words; nothing if none are known.
pub fn gpu_users() -> Option<String> {
    let others = own_gpu().ok()?.others();
    let each: Vec<String> = (others.into_iter())
        .map(|(process, used)| match used {
            Some(used) => format!("process {process} with {}", bytes(used)),
            None => format!("process {process}"),
        })
        .collect();
    (!each.is_empty()).then(|| each.join(", "))
}

/// How many GPUs this many ranks compute on, and how many ranks share one at most. Threads share the one of
/// their process; the processes of a host take its GPUs in turns.
pub fn gpus(ranks: usize) -> Result<(usize, usize)> {
    let local = job::joined().filter(|job| job.ranks() == ranks);
    let Some((_, local)) = local.and_then(|job| job.environment().local) else {
        return Ok((1, ranks));
    };
    own_gpu()?;
    let here = Device::count().map_err(unusable)?.min(local).max(1);
    Ok((here * ranks.div_ceil(local), local.div_ceil(here)))
}

/// What is slower here than it could be, for those who compute in this type.
pub fn note(device: DeviceKind, compute: DType) -> Option<String> {
    if device != DeviceKind::Cuda || !matches!(compute, DType::Bf16 | DType::F16) {
        return None;
    }
    let missing = phalanx_cuda::without_attention_library()?;
    Some(format!("attention runs on kernels of ours, which are several times slower: {missing}"))
}

/// The GPU of this process's place on its host.
fn own_gpu() -> Result<Arc<Device>> {
    if let Some((place, _)) = job::environment()?.and_then(|environment| environment.local) {
        Device::choose(place);
    }
    phalanx_cuda::check().map_err(unusable)
}

fn unusable(error: phalanx_cuda::CudaError) -> Error {
    let problem = Problem::new("run.device = \"cuda\" cannot be used here");
    Error::refused(problem.because(error.to_string()).nearest("run.device = \"cpu\""))
}

/// The vendor's number for dense products.
fn rate(device: &Device) -> Option<f64> {
    let known = [("H200", 989e12), ("H100", 989e12), ("A100", 312e12)];
    known.iter().find(|(name, _)| device.name().contains(name)).map(|(_, rate)| *rate)
}

/// Ranks in the processes of a job, if there is one of this size, and otherwise threads.
fn job_or_threads(size: Size, options: Options) -> Box<dyn Launcher> {
    let ranks = size.ranks;
    match job::joined().filter(|job| job.ranks() == ranks) {
        None => only_threads(size, options),
        Some(job) => {
            let recorder = job::recorder().filter(|_| size.keeps).cloned();
            let memory = if size.keeps { again::memory() } else { StateMemory::Own };
            // Where the launcher ends ranks that hang, it does so before others lose patience.
            let more = if memory == StateMemory::Own { Duration::ZERO } else { job::LONGER };
            let options = Options { timeout: job.wait() + more, ..options };
            Box::new(Processes { job: job.clone(), options, recorder, memory })
        }
    }
}

fn only_threads(size: Size, options: Options) -> Box<dyn Launcher> {
    Box::new(Threads { ranks: size.ranks, options })
}

fn backend(
    device: DeviceKind,
    launcher: fn(Size, Options) -> Box<dyn Launcher>,
    options: impl Fn(Size) -> Options + Send + Sync + 'static,
) -> Box<dyn Backend> {
    match device {
        DeviceKind::Cpu => over(device, launcher, options, |size, endpoint| {
            Ok(rank_engine(size.threads, endpoint)?.with_products(products_with(size.units)))
        }),
        DeviceKind::Cuda => over(device, launcher, options, |size, endpoint| {
            own_gpu()?;
            Ok(CudaEngine::on_rank(endpoint)?.with_tf32(size.tf32))
        }),
    }
}

fn over<E: Engine + Counters + Send + 'static>(
    device: DeviceKind,
    launcher: fn(Size, Options) -> Box<dyn Launcher>,
    options: impl Fn(Size) -> Options + Send + Sync + 'static,
    engine: impl Fn(Size, Box<dyn Communicator>) -> Result<E> + Send + Sync + 'static,
) -> Box<dyn Backend> {
    // The memory of a GPU ends with its process: there is nothing for others to take over.
    let held = device == DeviceKind::Cpu;
    Box::new(EngineBackend {
        launcher: move |size: Size| -> Box<dyn Launcher> {
            let options = options(size);
            let depth = options.depth.max(size.depth.unwrap_or(0));
            let size = Size { keeps: size.keeps && held, ..size };
            let Size { threads: threads_per_rank, exchanges_first, .. } = size;
            launcher(size, Options { threads_per_rank, depth, exchanges_first, ..options })
        },
        engine,
        requirements: Box::new(move |units| requirements_of(device, units)),
    })
}

/// The launcher of such ranks for benchmarks of the transport alone, with one thread each.
pub fn launcher(ranks: usize) -> Box<dyn Launcher> {
    let (units, depth, exchanges_first) = (CpuUnits::Auto, None, false);
    let size = Size { ranks, threads: 1, depth, keeps: false, tf32: false, units, exchanges_first };
    job_or_threads(size, Options { bind: ranks > 1, ..Options::default() })
}

/// One rank's engine on the cores, with its endpoint to the others.
pub fn rank_engine(threads: usize, endpoint: Box<dyn Communicator>) -> Result<CpuEngine> {
    Ok(CpuEngine::on_rank(threads, endpoint)?)
}
