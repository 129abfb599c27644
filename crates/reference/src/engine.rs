//! The interpreter behind the engine trait: every call runs at once, on arenas of bytes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, NoScratch, Requirements, Slots, Tier};
use phalanx_engine::{
    Args, CallTimes, Calls, Engine, EngineError, Event, SequentialStep, Span, Stamps,
};
use phalanx_ir::{Port, Program};

use crate::error::ReferenceError;
use crate::interpret::run;
use crate::tensor::RefTensor;

/// An engine that interprets. It has no kernels and uses no workspace: a call reads whole tensors
/// from its inputs' places, runs the program on them and writes its outputs. All tiers are its own
/// memory.
#[derive(Debug, Default)]
pub struct ReferenceEngine {
    arenas: [Vec<u8>; Tier::ALL.len()],
    calls: u64,
    stamps: Stamps,
}

/// What the interpreter can run.
#[derive(Debug)]
pub enum ReferenceKernel {
    /// Running a program.
    Run(Program),
    /// Copying from one place to another.
    Copy {
        /// A description for errors.
        label: String,
    },
}

impl ReferenceEngine {
    /// An engine without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn call(&mut self, kernel: &ReferenceKernel, args: &Args<'_>) -> Result<(), EngineError> {
        match kernel {
            ReferenceKernel::Run(program) => self.run(program, args),
            ReferenceKernel::Copy { label } => {
                let bytes = self.bytes(label, args.inputs[0])?.to_vec();
                self.place(label, args.outputs[0].span)?.copy_from_slice(&bytes);
                Ok(())
            }
        }
    }

    fn run(&mut self, program: &Program, args: &Args<'_>) -> Result<(), EngineError> {
        let failed = |error: ReferenceError| failed(&program.name, error.to_string());
        let mut inputs = Vec::with_capacity(args.inputs.len());
        for (port, span) in program.inputs().iter().zip(args.inputs) {
            let tensor = self.load(program, port, *span)?;
            inputs.push((port.name.as_str(), tensor));
        }
        let outputs = run(program, &inputs).map_err(failed)?;
        for ((port, target), (_, result)) in
            program.outputs().iter().zip(args.outputs).zip(&outputs)
        {
            let bytes = if target.add {
                let held = self.load(program, port, target.span)?;
                sum(&held, result).map_err(failed)?.to_bytes()
            } else {
                result.to_bytes()
            };
            self.place(&program.name, target.span)?.copy_from_slice(&bytes);
        }
        Ok(())
    }

    /// The tensor at the place of a port.
    fn load(&self, program: &Program, port: &Port, span: Span) -> Result<RefTensor, EngineError> {
        let ty = program.ty(port.value);
        let bytes = self.bytes(&program.name, span)?;
        RefTensor::from_bytes(ty.dtype, &ty.shape, bytes)
            .map_err(|e| failed(&program.name, format!("`{}`: {e}", port.name)))
    }

    fn bytes(&self, program: &str, span: Span) -> Result<&[u8], EngineError> {
        let arena = &self.arenas[span.tier.index()];
        arena.get(range(span)).ok_or_else(|| outside(program, span, arena.len()))
    }

    fn place(&mut self, program: &str, span: Span) -> Result<&mut [u8], EngineError> {
        let arena = &mut self.arenas[span.tier.index()];
        let len = arena.len();
        arena.get_mut(range(span)).ok_or_else(|| outside(program, span, len))
    }
}

impl Engine for ReferenceEngine {
    type Kernel = ReferenceKernel;
    type Step = SequentialStep<ReferenceKernel>;

    fn name(&self) -> &'static str {
        "reference"
    }

    fn memory(&self) -> MemoryKind {
        MemoryKind::HOST
    }

    fn requirements(&self) -> Arc<dyn Requirements> {
        Arc::new(NoScratch)
    }

    fn compile(
        &mut self,
        program: &Program,
        _slots: &Slots,
        _ranks: &[usize],
    ) -> Result<ReferenceKernel, EngineError> {
        Ok(ReferenceKernel::Run(program.clone()))
    }

    fn copy(
        &mut self,
        _from: Tier,
        _into: Tier,
        _bytes: usize,
        label: &str,
    ) -> Result<ReferenceKernel, EngineError> {
        Ok(ReferenceKernel::Copy { label: label.to_owned() })
    }

    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError> {
        let mut arena = Vec::new();
        arena
            .try_reserve_exact(bytes)
            .map_err(|e| EngineError::Memory { bytes, why: e.to_string() })?;
        arena.resize(bytes, 0);
        self.arenas[tier.index()] = arena;
        Ok(())
    }

    fn prepare(&mut self, calls: Calls<ReferenceKernel>) -> Result<Self::Step, EngineError> {
        SequentialStep::new(calls)
    }

    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.begin(self)
    }

    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError> {
        step.end(self)
    }

    fn time(&mut self, origin: Option<Instant>) {
        self.stamps.time(origin);
    }

    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<CallTimes>, EngineError> {
        step.times(self)
    }

    fn launch(
        &mut self,
        kernel: &ReferenceKernel,
        args: &Args<'_>,
        _lane: Lane,
        _after: &[Event],
    ) -> Result<Event, EngineError> {
        self.calls += 1;
        let event = Event(self.calls);
        self.stamps.issue(event);
        self.stamps.start(event);
        self.call(kernel, args)?;
        self.stamps.end(event);
        Ok(event)
    }

    fn wait(&mut self, _event: Event) -> Result<(), EngineError> {
        Ok(())
    }

    /// Calls run when they are issued.
    fn is_over(&mut self, _event: Event) -> Result<bool, EngineError> {
        Ok(true)
    }

    fn happened(&self, event: Event) -> Option<CallTimes> {
        self.stamps.of(event)
    }

    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        into.holds(bytes.len())?;
        self.place("upload", into)?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError> {
        from.holds(out.len())?;
        out.copy_from_slice(self.bytes("download", from)?);
        Ok(())
    }

    fn launch_observed(
        &mut self,
        kernel: &ReferenceKernel,
        args: &Args<'_>,
        _pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.call(kernel, args)?;
        Ok(None)
    }
}

/// The sum of an old value and a result, rounded to their element type.
fn sum(held: &RefTensor, result: &RefTensor) -> Result<RefTensor, ReferenceError> {
    let values: Vec<f64> =
        (held.values().iter().zip(result.values())).map(|(a, b)| a + b).collect();
    RefTensor::new(held.dtype(), held.shape(), &values)
}

fn range(span: Span) -> Range<usize> {
    span.offset..span.end()
}

fn failed(program: &str, why: String) -> EngineError {
    let program = program.to_owned();
    EngineError::Failed { program, why }
}

fn outside(program: &str, span: Span, arena: usize) -> EngineError {
    failed(
        program,
        format!(
            "bytes {} to {} are not in the {} arena of {arena} bytes; reserve it first",
            span.offset,
            span.end(),
            span.tier
        ),
    )
}
