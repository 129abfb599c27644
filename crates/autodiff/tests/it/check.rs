//! A gradient check of one expression: through the joint graph and FBW, against central differences.

use std::collections::BTreeMap;

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Role, Tensor as Value, TensorType};
use phalanx_reference::RefTensor;
use phalanx_testing::normal;

use crate::slope::slope;
use crate::support::{assert_same_bits, chain, chains};

/// A gradient check: parameters, other inputs, and an expression of both.
pub(crate) struct Check {
    name: String,
    params: Vec<(String, RefTensor)>,
    data: Vec<(String, RefTensor)>,
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
    pub(crate) fn given(mut self, name: &str, values: RefTensor) -> Self {
        self.params.push((name.to_owned(), values));
        self
    }

    /// An input that is not differentiated.
    pub(crate) fn data(mut self, name: &str, values: RefTensor) -> Self {
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
        let input = |role: Role, (name, t): &(String, RefTensor)| {
            b.input(name, role, TensorType::new(t.dtype(), t.shape()))
        };
        let mut handles: Vec<Value<'_>> =
            self.params.iter().map(|p| input(Role::Param, p)).collect();
        // Random ops look their key up by name.
        let role = |name: &str| if name == "key" { Role::Random } else { Role::Data };
        handles.extend(self.data.iter().map(|d| input(role(&d.0), d)));
        let y = expression(&b, &handles);
        let shape = y.shape();
        let weights = b.input("weights", Role::Data, TensorType::new(y.dtype(), shape.clone()));
        b.loss("loss", (y * weights).sum_all().cast(DType::F64));
        let program = b.finish().unwrap();
        let stream = Stream::named(23, &self.name);
        let dtype = program.ty(program.input_named("weights").unwrap().value).dtype;
        let mut all: Vec<(String, RefTensor)> = [self.params.clone(), self.data].concat();
        all.push(("weights".to_owned(), RefTensor::normal(dtype, &shape, stream)));

        let joint = joint(&program, DType::F64).unwrap();
        let phases = slice(&joint, Recompute::None);
        let numbers: BTreeMap<String, RefTensor> = all.into_iter().collect();
        let results = chain(&[&phases.fbw], &numbers);
        for (order, programs) in chains(&phases) {
            let what = format!("{}: {order}", self.name);
            assert_same_bits(&chain(&programs, &numbers), &results, &what);
        }
        for (name, values) in &self.params {
            let gradient = results[&(Role::Gradient, name.clone())].values();
            assert_eq!(gradient.len(), values.values().len());
            for (i, found) in gradient.iter().enumerate() {
                let expected = slope(&program, &numbers, name, i);
                assert!(
                    (found - expected).abs() <= 1e-7 * (1.0 + expected.abs()),
                    "{}: d{name}[{i}] is {found}, central differences give {expected}",
                    self.name
                );
            }
        }
    }
}
