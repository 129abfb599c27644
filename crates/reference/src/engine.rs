//! The interpreter behind the engine trait: every call runs at once, on one arena of bytes.

use std::ops::Range;

use phalanx_call::{Lane, Slots};
use phalanx_engine::{Args, Engine, EngineError, Event, Span};
use phalanx_ir::{Port, Program};

use crate::error::ReferenceError;
use crate::interpret::run;
use crate::tensor::Tensor;

/// An engine that interprets. It has no kernels and uses no workspace: a call reads whole tensors
/// from its inputs' places, runs the program on them and writes its outputs where they belong.
#[derive(Debug, Default)]
pub struct ReferenceEngine {
    arena: Vec<u8>,
    calls: u64,
}

impl ReferenceEngine {
    /// An engine without memory yet.
    pub fn new() -> Self {
        Self::default()
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

    /// The tensor that lies where a port is bound.
    fn load(&self, program: &Program, port: &Port, span: Span) -> Result<Tensor, EngineError> {
        let ty = program.ty(port.value);
        let bytes = (self.arena.get(range(span)))
            .ok_or_else(|| outside(&program.name, span, self.arena.len()))?;
        Tensor::from_bytes(ty.dtype, &ty.shape, bytes)
            .map_err(|e| failed(&program.name, format!("`{}`: {e}", port.name)))
    }

    fn place(&mut self, program: &str, span: Span) -> Result<&mut [u8], EngineError> {
        let len = self.arena.len();
        self.arena.get_mut(range(span)).ok_or_else(|| outside(program, span, len))
    }
}

impl Engine for ReferenceEngine {
    type Kernel = Program;

    fn name(&self) -> &'static str {
        "reference"
    }

    fn compile(
        &mut self,
        program: &Program,
        _slots: &Slots,
        _ranks: &[usize],
    ) -> Result<Program, EngineError> {
        Ok(program.clone())
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError> {
        let mut arena = Vec::new();
        arena
            .try_reserve_exact(bytes)
            .map_err(|e| EngineError::Memory { bytes, why: e.to_string() })?;
        arena.resize(bytes, 0);
        self.arena = arena;
        Ok(())
    }

    fn launch(
        &mut self,
        kernel: &Program,
        args: &Args<'_>,
        _lane: Lane,
        _after: &[Event],
    ) -> Result<Event, EngineError> {
        self.run(kernel, args)?;
        self.calls += 1;
        Ok(Event(self.calls))
    }

    fn wait(&mut self, _event: Event) -> Result<(), EngineError> {
        Ok(())
    }

    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        let span = Span { offset, bytes: bytes.len() };
        self.place("upload", span)?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError> {
        let span = Span { offset, bytes: out.len() };
        out.copy_from_slice(self.place("download", span)?);
        Ok(())
    }

    fn launch_observed(
        &mut self,
        kernel: &Program,
        args: &Args<'_>,
        _pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.run(kernel, args)?;
        Ok(None)
    }
}

/// The sum of what a place holds and a result, rounded to their element type.
fn sum(held: &Tensor, result: &Tensor) -> Result<Tensor, ReferenceError> {
    let values: Vec<f64> =
        (held.values().iter().zip(result.values())).map(|(a, b)| a + b).collect();
    Tensor::new(held.dtype(), held.shape(), &values)
}

fn range(span: Span) -> Range<usize> {
    span.offset..span.offset + span.bytes
}

fn failed(program: &str, why: String) -> EngineError {
    let program = program.to_owned();
    EngineError::Failed { program, why }
}

fn outside(program: &str, span: Span, arena: usize) -> EngineError {
    failed(
        program,
        format!(
            "bytes {} to {} are not in the arena of {arena} bytes; reserve it first",
            span.offset,
            span.offset + span.bytes
        ),
    )
}
