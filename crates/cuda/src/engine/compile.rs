//! A compiled program: its tasks in order.

use std::sync::Arc;

use phalanx_call::{LiveRange, Slot, Slots};
use phalanx_comm::CountedEndpoint;
use phalanx_engine::EngineError;
use phalanx_ir::Program;

use super::CudaEngine;
use super::touched::Touched;
use crate::device::{DeviceMemory, Function};
use crate::folds::Folds;
use crate::fused_attention::{AttentionPlan, FusedShape};
use crate::kernels::KernelSpec;
use crate::products::{IssuedOn, ProductPlan, ProductShape};
use crate::tasks::{self, Arg, Operation, Resources, Task, Transfer, Var};

/// A compiled program, or something else that can be called.
pub struct CudaKernel {
    pub(super) name: Arc<str>,
    pub(super) what: What,
    pub(super) slots: Slots,
    pub(super) instrs: usize,
    /// What each instruction touches, and at last what copies to outputs do, if there is a second queue.
    pub(super) touched: Vec<Touched>,
}

pub(super) enum What {
    /// The tasks of a program, each with the number of its instruction; copies to outputs come last.
    Program(Vec<(usize, Task)>),
    /// One task alone.
    Task(Box<Task>),
    /// A copy from one tier to another.
    Copy,
}

impl CudaKernel {
    pub(super) fn of(name: &str, what: What) -> Self {
        let (slots, touched) = (Slots::default(), Vec::new());
        Self { name: name.into(), what, slots, instrs: 0, touched }
    }

    /// Whether a piece of its workspace is scratch memory that a library has while it runs an attention.
    pub(super) fn lends(&self, life: &LiveRange) -> bool {
        let What::Program(tasks) = &self.what else { return false };
        let mut own = tasks.iter().filter(|(instr, _)| *instr == life.birth);
        let is_scratch = life.birth == life.death
            && self.slots.scratch.get(life.birth) == Some(&Some(life.offset));
        is_scratch && own.any(|(_, task)| matches!(task, Task::Attention(_)))
    }

    /// Its one task, if that is a collective or a message.
    pub(super) fn transfer(&self) -> Option<&Transfer> {
        match &self.what {
            What::Task(task) => match &**task {
                Task::Transfer(transfer) => Some(transfer),
                _ => None,
            },
            What::Program(tasks) => match tasks.as_slice() {
                [(_, Task::Transfer(transfer))] => Some(transfer),
                _ => None,
            },
            What::Copy => None,
        }
    }
}

impl CudaEngine {
    pub(super) fn compiled(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<CudaKernel, EngineError> {
        let rank = self.place_in(program, ranks)?;
        let mut made: Vec<(usize, Task)> = Vec::new();
        let folds = &Folds::of(program);
        for (index, instr) in program.instrs().iter().enumerate() {
            // Values that nothing reads are not computed.
            let results = instr.outputs.iter().map(|v| slots.by_value[v.index()]);
            if results.clone().all(|slot| slot == Slot::Unused) {
                continue;
            }
            let scratch = slots.scratch[index];
            let mut operation =
                Operation { program, instr, slots, folds, scratch, rank, ranks, engine: self };
            made.extend(tasks::compile(&mut operation)?.into_iter().map(|task| (index, task)));
        }
        let end = program.instrs().len();
        for &(output, value) in &slots.copies {
            let var = |slot| Var::of(program, value, slot, rank);
            let (from, to) = (var(slots.by_value[value.index()]), var(Slot::Output(output)));
            made.push((end, tasks::copy(self, &from, &to)));
        }
        self.resolve(&program.name, made.iter_mut().map(|(_, task)| task).collect())?;
        Ok(CudaKernel {
            name: program.name.as_str().into(),
            what: What::Program(made),
            slots: slots.clone(),
            instrs: end,
            touched: match &self.beside {
                Some(_) => {
                    let of = |instr| Touched::of(program, instr, slots, folds, rank);
                    (0..end).map(of).chain([Touched::by_copies(program, slots, rank)]).collect()
                }
                None => Vec::new(),
            },
        })
    }

    /// Compiles the kernels of some tasks.
    fn resolve(&self, program: &str, tasks: Vec<&mut Task>) -> Result<(), EngineError> {
        let mut kernels: Vec<_> = tasks.into_iter().flat_map(Task::kernels).collect();
        let specs: Vec<&KernelSpec> = kernels.iter().map(|task| &task.kernel).collect();
        let functions: Vec<Function> =
            self.device.functions(&specs).map_err(|error| error.during(program))?;
        for (kernel, function) in kernels.iter_mut().zip(functions) {
            kernel.function = Some(function);
        }
        Ok(())
    }
}

impl Resources for CudaEngine {
    fn constant(&mut self, bytes: &[u8]) -> Result<Arg, EngineError> {
        if let Some(known) = self.constants.get(bytes) {
            return Ok(Arg::Constant(known.clone()));
        }
        let memory = Arc::new(DeviceMemory::new(&self.device, bytes.len())?);
        // SAFETY: the memory is new, so nothing else uses it.
        unsafe { self.stream.upload(memory.address(), bytes)? };
        self.constants.insert(bytes.to_vec(), memory.clone());
        Ok(Arg::Constant(memory))
    }

    fn site(&mut self, program: &str, what: &'static str) -> i64 {
        let known = self.sites.iter().position(|(name, of)| name == program && *of == what);
        let site = known.unwrap_or_else(|| {
            self.sites.push((program.to_owned(), what));
            self.sites.len() - 1
        });
        site as i64
    }

    fn blocks(&self) -> u32 {
        16 * self.device.processors()
    }

    fn product(&mut self, shape: &ProductShape) -> Result<Option<Arc<ProductPlan>>, EngineError> {
        if let Some(known) = self.plans.get(shape) {
            return Ok(known.clone());
        }
        let (memory, stream) = (&self.workspace, &self.stream);
        let place = IssuedOn { stream, workspace: (memory.address(), memory.bytes()) };
        let plan = self.library.plan(shape, &place)?.map(Arc::new);
        self.plans.insert(*shape, plan.clone());
        Ok(plan)
    }

    fn attention(&mut self, shape: &FusedShape) -> Result<Option<Arc<AttentionPlan>>, EngineError> {
        if let Some(known) = self.attention_plans.get(shape) {
            return Ok(known.clone());
        }
        let Some(library) = &self.attention else { return Ok(None) };
        // What the library has no kernel for is computed by our own.
        let plan = if self.library.measures {
            library.best_plan(shape, &self.stream)
        } else {
            library.plan(shape, 0)
        };
        let plan = plan.map_err(|error| error.during("attention"))?.map(Arc::new);
        self.attention_plans.insert(*shape, plan.clone());
        Ok(plan)
    }

    fn endpoint(&mut self) -> Option<&mut CountedEndpoint> {
        self.endpoint.as_mut()
    }
}
