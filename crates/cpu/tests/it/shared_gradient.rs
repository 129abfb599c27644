//! One value that is the gradient of two parameters: accumulated in one, it is not what the other
//! must get.

use std::collections::BTreeMap;

use phalanx_cpu::CpuEngine;
use phalanx_ir::{Builder, DType, Init, Model, Param};
use phalanx_reference::RefTensor;
use phalanx_script::accumulate;
use phalanx_testing::{Rig, RigBatch, Setup, optimise};

const ROWS: usize = 4;
const COLUMNS: usize = 3;

/// Squared error of x + a + b: both biases have the same gradient, which becomes one value.
fn model() -> Model {
    let b = Builder::new("biases", DType::F32);
    let x = b.data("x", DType::F32, [ROWS, COLUMNS]);
    let y = (x + b.param("a", [COLUMNS])) + b.param("b", [COLUMNS]);
    let target = b.data("y", DType::F32, [ROWS, COLUMNS]);
    b.loss("loss", y.squared_error(target) * b.scalar("inv_tokens"));
    let mut model = Model::new("biases");
    let segment = model.segment(b.finish().unwrap());
    let params: BTreeMap<String, usize> = (["a", "b"].into_iter())
        .map(|name| {
            let (init, shape) = (Init::Constant(0.0), vec![COLUMNS]);
            let param = Param { name: name.to_owned(), shape, init, decay: false, dealt: 1 };
            (name.to_owned(), model.param(param).unwrap())
        })
        .collect();
    model.append("biases", segment, params).unwrap();
    model
}

#[test]
fn both_parameters_get_the_whole_sum() {
    let rows = |of: &dyn Fn(usize) -> f64| {
        let values: Vec<f64> = (0..ROWS * COLUMNS).map(of).collect();
        RefTensor::new(DType::F32, &[ROWS, COLUMNS], &values).unwrap()
    };
    let x = |mb: usize| move |i: usize| (i + 10 * mb) as f64;
    let batch = |mb: usize| RigBatch {
        data: vec![("x".to_owned(), rows(&x(mb))), ("y".to_owned(), rows(&|_| 1.0))],
        first: 0,
    };
    let setup = Setup {
        microbatches: 3,
        schedule: accumulate,
        compile: optimise,
        ..Setup::new(DType::F32)
    };
    let mut rig = Rig::new(CpuEngine::new(1).unwrap(), &model(), &setup);
    rig.initialise(0);
    rig.step(&[batch(0), batch(1), batch(2)], 0.0, 1.0);
    // d/da of the sum of (x - 1)^2 over rows and micro-batches, at a = b = 0.
    let expected: Vec<f64> = (0..COLUMNS)
        .map(|c| {
            let rows = (0..3).flat_map(|mb| (0..ROWS).map(move |r| (mb, r)));
            rows.map(|(mb, r)| 2.0 * (x(mb)(r * COLUMNS + c) - 1.0)).sum()
        })
        .collect();
    assert_eq!(rig.gradient("a"), expected);
    assert_eq!(rig.gradient("b"), expected);
}
