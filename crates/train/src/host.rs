//! The engine that the command and the library train with on this machine.

use std::time::Instant;

use phalanx_cpu::CpuEngine;
use phalanx_engine::{Args, Engine, EngineError, Span, Target};
use phalanx_ir::{Builder, DType, Role, TensorType};
use phalanx_script::{Lane, Slots};

use crate::bench::{Pass, Product};
use crate::error::Result;

/// The engine of this machine.
pub type HostEngine = CpuEngine;

/// How often a product is timed; the median counts.
const TRIES: usize = 9;

/// An engine with this many threads.
pub fn host_engine(threads: usize) -> Result<HostEngine> {
    Ok(CpuEngine::new(threads)?)
}

/// Seconds that the engine has spent in matrix products so far, if it measures them.
pub(crate) fn product_seconds(engine: &HostEngine) -> Option<f64> {
    Some(engine.matmul_seconds())
}

/// Seconds that one product takes by itself, on all threads of the engine.
pub(crate) fn time_product(engine: &mut HostEngine, product: &Product) -> Option<f64> {
    median_seconds(engine.threads(), product).ok()
}

/// Runs the product as a program of its own, on an engine with memory of its own.
fn median_seconds(threads: usize, product: &Product) -> Result<f64, EngineError> {
    let Product {
        pass,
        rows,
        from,
        to,
        transposed,
    } = *product;
    let weight = if transposed {
        ("ed", [to, from])
    } else {
        ("de", [from, to])
    };
    let (spec, a, b) = match pass {
        Pass::Forward => (format!("sd,{}->se", weight.0), [rows, from], weight.1),
        Pass::InputGradient => (format!("se,{}->sd", weight.0), [rows, to], weight.1),
        Pass::WeightGradient => (format!("sd,se->{}", weight.0), [rows, from], [rows, to]),
    };
    let builder = Builder::new("product", DType::F32);
    let input = |name, shape| builder.input(name, Role::Data, TensorType::new(DType::F32, shape));
    builder.probe("c", input("a", a).einsum(input("b", b), &spec));
    let program = builder.finish().map_err(|e| EngineError::Failed {
        program: "product".to_owned(),
        why: e.to_string(),
    })?;
    let slots = Slots::assign(&program);
    let mut engine = CpuEngine::new(threads)?;
    let kernel = engine.compile(&program, &slots)?;
    let mut end = 0;
    let spans: Vec<Span> = (program.inputs().iter().chain(program.outputs()))
        .map(|port| {
            let span = Span {
                offset: end,
                bytes: program.ty(port.value).bytes(),
            };
            end += span.bytes.next_multiple_of(64);
            span
        })
        .collect();
    engine.reserve(end)?;
    let outputs = [Target {
        span: spans[2],
        add: false,
    }];
    let args = Args {
        inputs: &spans[..2],
        outputs: &outputs,
        workspace: Span::default(),
    };
    let mut times = Vec::new();
    for _ in 0..TRIES + 2 {
        let begun = Instant::now();
        let event = engine.launch(&kernel, &args, Lane::Compute, &[])?;
        engine.wait(event)?;
        times.push(begun.elapsed().as_secs_f64());
    }
    // The first two touch the memory for the first time.
    let timed = &mut times[2..];
    timed.sort_by(f64::total_cmp);
    Ok(timed[TRIES / 2])
}
