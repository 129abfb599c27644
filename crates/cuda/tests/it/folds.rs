//! Biases and residuals that instructions add to their results, against the interpreter.

use phalanx_cuda::CudaEngine;
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Program};
use phalanx_passes::fuse;
use phalanx_reference::{RefTensor, run as interpret};
use phalanx_testing::threads::furthest;

use crate::{gpu, ops};

/// The largest difference of a program's results from the interpreter's.
fn difference(engine: &mut CudaEngine, program: &Program) -> f64 {
    let given: Vec<RefTensor> = (program.inputs().iter())
        .map(|port| {
            let ty = program.ty(port.value);
            RefTensor::normal(ty.dtype, &ty.shape, Stream::named(5, &port.name))
        })
        .collect();
    let names = program.inputs().iter().map(|port| port.name.as_str());
    let named: Vec<(&str, RefTensor)> = names.zip(given.iter().cloned()).collect();
    let expected = interpret(program, &named).unwrap();
    let found = ops::run(engine, program, &given, 0.0);
    found.iter().zip(&expected).map(|(a, (_, b))| furthest(a, b)).fold(0.0, f64::max)
}

#[test]
fn linear_layers_add_biases_and_residuals() {
    if !gpu::is_here("linear_layers_add_biases_and_residuals") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    for (dtype, width) in [(DType::Bf16, 64), (DType::Bf16, 65), (DType::F32, 64)] {
        let b = Builder::new("t", dtype);
        let h = b.boundary("h", [2, 37, width]);
        let linear = |name: &str, to: usize| {
            let weight = b.param(name, [width, to]).scale(0.1);
            h.matmul(weight) + b.param(&format!("{name}_bias"), [to])
        };
        let (q, k) = (linear("q", width), linear("k", width));
        b.output("q", q);
        b.output("y", h + k);
        b.output("gelu", linear("up", 2 * width).gelu());
        let program = fuse(&b.finish().unwrap());
        let far = difference(&mut engine, &program);
        assert!(far < if dtype == DType::F32 { 2e-5 } else { 3e-2 }, "{dtype} {width}: {far}");
    }
}
