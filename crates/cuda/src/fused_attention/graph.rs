//! Graphs of operations, for which the library has one fused kernel.

use std::ffi::c_void;

use super::descriptor::{Descriptor, Kind, Of};
use super::{AttentionLibrary, check};
use crate::error::CudaError;
use crate::libraries::{Address, Cudnn, Handle};

/// Element types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Element {
    F32 = 0,
    F16 = 2,
    I32 = 4,
    Bf16 = 9,
    Bool = 11,
}

/// Functions of elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Function {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exp = 13,
    Log = 15,
    NotLess = 303,
    Index = 501,
    Select = 601,
}

/// Reductions over the dims that a result has one element of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Over {
    Sum = 0,
    Largest = 3,
}

/// A tensor of a graph: its number, to which a call binds memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TensorId(i64);

/// Where a tensor lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lies {
    /// In memory that a call gives.
    InMemory,
    /// Inside the fused kernel.
    Inside,
    /// It is a number that a call passes by value.
    ByValue,
}

/// Extents and strides of four dims.
pub(super) type View = ([i64; 4], [i64; 4]);

/// A graph that is being built.
pub(super) struct Graph {
    table: &'static Cudnn,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
}

impl Graph {
    pub(super) fn new(library: &AttentionLibrary) -> Self {
        Self { table: library.table, tensors: Vec::new(), operations: Vec::new() }
    }

    pub(super) fn tensor(
        &mut self,
        of: Element,
        (extents, strides): View,
        lies: Lies,
    ) -> Result<TensorId, CudaError> {
        let id = self.tensors.len() as i64;
        let tensor = Descriptor::new(self.table, Kind::Tensor)?;
        tensor
            .set(901, Of::DataType, &[of as i32])?
            .set(902, Of::I64, &extents)?
            .set(903, Of::I64, &strides)?
            .set(906, Of::I64, &[id])?
            .set(900, Of::I64, &[16i64])?;
        match lies {
            Lies::InMemory => {}
            Lies::Inside => drop(tensor.set(907, Of::Bool, &[true])?),
            Lies::ByValue => drop(tensor.set(908, Of::Bool, &[true])?),
        }
        self.tensors.push(tensor.finish()?);
        Ok(TensorId(id))
    }

    fn at(&self, tensor: TensorId) -> Handle {
        self.tensors[tensor.0 as usize].handle
    }

    /// `c = a·b`, for every pair of the outer dims.
    pub(super) fn matmul(
        &mut self,
        a: TensorId,
        b: TensorId,
        c: TensorId,
    ) -> Result<(), CudaError> {
        let how = Descriptor::new(self.table, Kind::Matmul)?;
        how.set(1500, Of::DataType, &[Element::F32 as i32])?;
        let (how, op) = (how.finish()?, Descriptor::new(self.table, Kind::MatmulOperation)?);
        op.set(1520, Of::Descriptor, &[self.at(a)])?
            .set(1521, Of::Descriptor, &[self.at(b)])?
            .set(1522, Of::Descriptor, &[self.at(c)])?
            .set(1523, Of::Descriptor, &[how.handle])?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// `y = function(x, b, t)`; indices are along an axis.
    pub(super) fn pointwise(
        &mut self,
        function: Function,
        [x, b, t]: [Option<TensorId>; 3],
        y: TensorId,
        axis: Option<i64>,
    ) -> Result<(), CudaError> {
        let how = Descriptor::new(self.table, Kind::Pointwise)?;
        let math = if function == Function::NotLess { Element::Bool } else { Element::F32 };
        how.set(0, Of::PointwiseMode, &[function as i32])?.set(1, Of::DataType, &[math as i32])?;
        if let Some(axis) = axis {
            how.set(9, Of::I64, &[axis])?;
        }
        let (how, op) = (how.finish()?, Descriptor::new(self.table, Kind::PointwiseOperation)?);
        op.set(750, Of::Descriptor, &[how.handle])?;
        for (attribute, tensor) in [(751, x), (752, b), (758, t), (753, Some(y))] {
            if let Some(tensor) = tensor {
                op.set(attribute, Of::Descriptor, &[self.at(tensor)])?;
            }
        }
        op.set(754, Of::F32, &[1.0f32])?.set(755, Of::F32, &[1.0f32])?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    pub(super) fn reduce(&mut self, over: Over, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let how = Descriptor::new(self.table, Kind::Reduction)?;
        how.set(1601, Of::DataType, &[Element::F32 as i32])?.set(
            1600,
            Of::Reduction,
            &[over as i32],
        )?;
        let (how, op) = (how.finish()?, Descriptor::new(self.table, Kind::ReductionOperation)?);
        op.set(1610, Of::Descriptor, &[self.at(x)])?
            .set(1611, Of::Descriptor, &[self.at(y)])?
            .set(1612, Of::Descriptor, &[how.handle])?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// The same elements with other strides.
    pub(super) fn reshape(&mut self, x: TensorId, y: TensorId) -> Result<(), CudaError> {
        let op = Descriptor::new(self.table, Kind::ReshapeOperation)?;
        op.set(2200, Of::Descriptor, &[self.at(x)])?.set(2201, Of::Descriptor, &[self.at(y)])?;
        self.operations.push(op.finish()?);
        Ok(())
    }

    /// The library's first proposal, of those from number `from` on, that it can build and that needs no more
    /// than `most` bytes of workspace; nothing if it can build none.
    pub(super) fn plan(
        self,
        library: &AttentionLibrary,
        (from, most): (usize, usize),
    ) -> Result<Option<Plan>, CudaError> {
        let graph = Descriptor::new(self.table, Kind::OperationGraph)?;
        let operations: Vec<Handle> = self.operations.iter().map(|op| op.handle).collect();
        graph.set(801, Of::Descriptor, &operations)?.set(800, Of::Handle, &[library.handle])?;
        let graph = graph.finish()?;
        let heuristics = Descriptor::new(self.table, Kind::EngineHeuristics)?;
        heuristics.set(201, Of::Descriptor, &[graph.handle])?.set(
            200,
            Of::HeuristicMode,
            &[MODE_A],
        )?;
        let heuristics = heuristics.finish()?;
        let configs: Vec<Descriptor> = (0..MOST_PLANS)
            .map(|_| Descriptor::new(self.table, Kind::EngineConfig))
            .collect::<Result<_, _>>()?;
        let mut room: Vec<Handle> = configs.iter().map(|config| config.handle).collect();
        let count = heuristics.get(202, Of::Descriptor, &mut room)?;
        let mut least = None;
        for (number, config) in configs.into_iter().enumerate().take(count).skip(from) {
            let plan = Descriptor::new(self.table, Kind::ExecutionPlan)?;
            plan.set(400, Of::Handle, &[library.handle])?.set(
                401,
                Of::Descriptor,
                &[config.handle],
            )?;
            let Ok(plan) = plan.finish() else { continue };
            let mut bytes = [0i64];
            plan.get(402, Of::I64, &mut bytes)?;
            let workspace = bytes[0] as usize;
            if workspace <= most {
                return Ok(Some(Plan {
                    plan,
                    number,
                    #[cfg(test)]
                    workspace,
                    _made_from: (self, graph, config),
                }));
            }
            least = Some(least.unwrap_or(workspace).min(workspace));
        }
        least.map_or(Ok(None), |least| Err(too_large(least, most)))
    }
}

fn too_large(workspace: usize, most: usize) -> CudaError {
    let why = format!(
        "all kernels that it proposes ask for a workspace of {workspace} bytes or more, and {most} were planned: \
         this version of cuDNN needs more than those that were tried (docs/gpu.md)"
    );
    CudaError::Call { function: "cuDNN's heuristics", why }
}

/// Of the library's heuristics: those that it knows best.
const MODE_A: i32 = 3;

/// The most proposals that are looked at.
pub(super) const MOST_PLANS: usize = 8;

/// A graph for which the library has a kernel.
pub(super) struct Plan {
    plan: Descriptor,
    /// Which of the library's proposals it is.
    pub(super) number: usize,
    /// Bytes that the library asks for.
    #[cfg(test)]
    pub(super) workspace: usize,
    _made_from: (Graph, Descriptor, Descriptor),
}

/// Memory that a plan is bound to.
pub(super) struct Bound {
    pack: Descriptor,
    /// The library reads numbers by value from here at every call.
    _scalars: Box<[f32]>,
}

impl Plan {
    pub(super) fn bind(
        &self,
        library: &AttentionLibrary,
        memory: &[(TensorId, Address)],
        scalars: &[(TensorId, f32)],
        workspace: Address,
    ) -> Result<Bound, CudaError> {
        let values: Box<[f32]> = scalars.iter().map(|(_, value)| *value).collect();
        let mut ids: Vec<i64> = memory.iter().map(|(id, _)| id.0).collect();
        let mut pointers: Vec<*const c_void> =
            memory.iter().map(|(_, address)| *address as *const c_void).collect();
        for ((id, _), value) in scalars.iter().zip(&values) {
            ids.push(id.0);
            pointers.push((&raw const *value).cast());
        }
        let pack = Descriptor::new(library.table, Kind::VariantPack)?;
        pack.set(1003, Of::Pointer, &[workspace as *const c_void])?
            .set(1001, Of::Pointer, &pointers)?
            .set(1000, Of::I64, &ids)?;
        Ok(Bound { pack: pack.finish()?, _scalars: values })
    }

    /// Issues it on the library's stream.
    ///
    /// # Safety
    /// All tensors of the graph are bound to memory that this call may use.
    pub(super) unsafe fn run(
        &self,
        library: &AttentionLibrary,
        bound: &Bound,
    ) -> Result<(), CudaError> {
        let (plan, pack) = (self.plan.handle, bound.pack.handle);
        // SAFETY: the caller's.
        let status = unsafe { (library.table.cudnnBackendExecute)(library.handle, plan, pack) };
        check(library.table, "cudnnBackendExecute", status)
    }
}
