//! What the tests share: programs of one expression, reverse mode by the ops' own `vjp`, and
//! central differences.

use phalanx_ir::ops::{Binary, BinaryKind};
use phalanx_ir::random::Stream;
use phalanx_ir::vjp::Vjp;
use phalanx_ir::{
    Builder, DType, OpDef, Phase, Program, Role, Tensor as Value, TensorType, ValueId,
};
use phalanx_reference::{Tensor, run};

/// Normal numbers that differ from name to name.
pub(crate) fn normal(name: &str, shape: &[usize]) -> Tensor {
    Tensor::normal(DType::F64, shape, Stream::named(17, name))
}

/// A tensor of `f64`.
pub(crate) fn tensor(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::from_f64(shape, values).unwrap()
}

/// A tensor of `i32`.
pub(crate) fn ids(shape: &[usize], values: &[i32]) -> Tensor {
    Tensor::from_i32(shape, values).unwrap()
}

/// sin(0.37·i), a deterministic filling that other programs reproduce easily.
pub(crate) fn wave(shape: &[usize], scale: f64, shift: f64) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n)
        .map(|i| (i as f64 * 0.37).sin() * scale + shift)
        .collect();
    tensor(shape, &values)
}

/// Runs one expression over inputs that are all given, and returns its results.
pub(crate) fn eval(
    inputs: &[(&str, Tensor)],
    expression: impl for<'b> FnOnce(&'b Builder, &[Value<'b>]) -> Vec<Value<'b>>,
) -> Vec<Tensor> {
    let b = Builder::new("expression", DType::F64);
    let handles: Vec<Value<'_>> = (inputs.iter())
        .map(|(name, t)| b.input(name, Role::Data, TensorType::new(t.dtype(), t.shape())))
        .collect();
    for (i, value) in expression(&b, &handles).into_iter().enumerate() {
        b.probe(&format!("y{i}"), value);
    }
    let outputs = run(&b.finish().unwrap(), inputs).unwrap();
    outputs.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Fails unless all numbers are within `tolerance` of the expected ones.
pub(crate) fn assert_close(got: &Tensor, expected: &[f64], tolerance: f64) {
    let got = got.values();
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs();
        assert!(
            error <= tolerance * (1.0 + expected.abs()),
            "element {i} is {got}, expected {expected}"
        );
    }
}

/// A gradient check: parameters, other inputs, and an expression of both.
pub(crate) struct Check {
    name: String,
    params: Vec<(String, Tensor)>,
    data: Vec<(String, Tensor)>,
}

impl Check {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        let (name, params, data) = (name.into(), Vec::new(), Vec::new());
        Self { name, params, data }
    }

    /// A parameter of normal numbers.
    pub(crate) fn param(self, name: &str, shape: &[usize]) -> Self {
        let values = normal(&format!("{}.{name}", self.name), shape);
        self.given(name, values)
    }

    /// A parameter of these numbers.
    pub(crate) fn given(mut self, name: &str, values: Tensor) -> Self {
        self.params.push((name.to_owned(), values));
        self
    }

    /// An input that is not differentiated.
    pub(crate) fn data(mut self, name: &str, values: Tensor) -> Self {
        self.data.push((name.to_owned(), values));
        self
    }

    /// Compares the gradient of Σ weight·y, for random weights, with central differences: for
    /// every element of every parameter.
    pub(crate) fn run(
        self,
        expression: impl for<'b> FnOnce(&'b Builder, &[Value<'b>]) -> Value<'b>,
    ) {
        let b = Builder::new(&self.name, DType::F64);
        let input = |role: Role, (name, t): &(String, Tensor)| {
            b.input(name, role, TensorType::new(t.dtype(), t.shape()))
        };
        let mut handles: Vec<Value<'_>> =
            self.params.iter().map(|p| input(Role::Param, p)).collect();
        handles.extend(self.data.iter().map(|d| input(Role::Data, d)));
        let y = expression(&b, &handles);
        let shape = y.shape();
        let weights = b.input(
            "weights",
            Role::Data,
            TensorType::new(y.dtype(), shape.clone()),
        );
        b.loss("loss", (y * weights).sum_all().cast(DType::F64));
        let program = b.finish().unwrap();
        let stream = Stream::named(23, &self.name);
        let dtype = program
            .ty(program.input_named("weights").unwrap().value)
            .dtype;
        let mut all: Vec<(String, Tensor)> = [self.params.clone(), self.data].concat();
        all.push(("weights".to_owned(), Tensor::normal(dtype, &shape, stream)));

        let joint = differentiate(&program);
        let gradients = outputs(&joint, &all);
        for (at, (name, values)) in self.params.iter().enumerate() {
            let gradient = gradients.iter().find(|(n, _)| *n == format!("d{name}"));
            let analytic = gradient.unwrap().1.values();
            for (i, analytic) in analytic.iter().enumerate() {
                let numeric = slope(&program, &all, at, values, i);
                let error = (analytic - numeric).abs();
                assert!(
                    error <= 1e-7 * (1.0 + numeric.abs()),
                    "{}: d{name}[{i}] is {analytic}, central differences give {numeric}",
                    self.name
                );
            }
        }
    }
}

/// The central difference of the loss with respect to element `i` of input `at`.
fn slope(
    program: &Program,
    inputs: &[(String, Tensor)],
    at: usize,
    values: &Tensor,
    i: usize,
) -> f64 {
    const STEP: f64 = 1e-5;
    let loss = |by: f64| {
        let mut moved = values.values();
        moved[i] += by;
        let mut inputs = inputs.to_vec();
        inputs[at].1 = tensor(values.shape(), &moved);
        outputs(program, &inputs)[0].1.values()[0]
    };
    (loss(STEP) - loss(-STEP)) / (2.0 * STEP)
}

fn outputs(program: &Program, inputs: &[(String, Tensor)]) -> Vec<(String, Tensor)> {
    let inputs: Vec<(&str, Tensor)> = (inputs.iter())
        .map(|(name, t)| (name.as_str(), t.clone()))
        .collect();
    run(program, &inputs).unwrap()
}

/// The program with the gradients of its parameters as further outputs: reverse mode in its
/// plainest form, by each op's own `vjp`.
pub(crate) fn differentiate(program: &Program) -> Program {
    let mut joint = program.clone();
    let mut active = vec![false; program.values().len()];
    for port in program.inputs_with(Role::Param) {
        active[port.value.index()] = true;
    }
    for instr in program.instrs() {
        if instr.inputs.iter().any(|v| active[v.index()]) {
            let floats = instr
                .outputs
                .iter()
                .filter(|v| program.ty(**v).dtype.is_float());
            floats.for_each(|v| active[v.index()] = true);
        }
    }
    let mut gradients: Vec<Option<ValueId>> = vec![None; program.values().len()];
    let loss = program.outputs_with(Role::Loss).next().unwrap().value;
    gradients[loss.index()] = Some(joint.constant(DType::F64, &[], 1.0, Phase::B).unwrap());
    for instr in program.instrs().iter().rev() {
        let cotangents: Vec<_> = instr.outputs.iter().map(|v| gradients[v.index()]).collect();
        if cotangents.iter().all(Option::is_none)
            || !instr.outputs.iter().any(|v| active[v.index()])
        {
            continue;
        }
        let wanted = (instr.inputs.iter())
            .map(|v| active[v.index()].then_some(program.ty(*v).dtype))
            .collect();
        let mut vjp = Vjp::new(&mut joint, instr.clone(), cotangents, wanted);
        instr.op.vjp(&mut vjp).unwrap();
        for (&operand, new) in instr.inputs.iter().zip(vjp.finish()) {
            let (Some(new), true) = (new, active[operand.index()]) else {
                continue;
            };
            assert_eq!(joint.ty(new), joint.ty(operand), "{}", instr.op.name());
            let kind = BinaryKind::Add;
            gradients[operand.index()] = Some(match gradients[operand.index()] {
                None => new,
                Some(old) => joint
                    .push(Binary { kind }.into(), &[old, new], Phase::B)
                    .unwrap()[0],
            });
        }
    }
    for port in program.inputs_with(Role::Param) {
        let gradient = gradients[port.value.index()];
        let gradient = gradient.unwrap_or_else(|| panic!("`{}` has no gradient", port.name));
        joint.output(format!("d{}", port.name), Role::Gradient, gradient);
    }
    joint
}
