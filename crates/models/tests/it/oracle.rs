//! Whole models against code nobody here wrote: logits, loss, every gradient and twenty steps of
//! AdamW, as `transformers` (f32) and plain torch modules (f64) compute them on the fixtures.

use std::io::Write;

use phalanx_autodiff::Recompute;
use phalanx_cpu::CpuEngine;
use phalanx_cuda::CudaEngine;
use phalanx_engine::Engine;
use phalanx_ir::{DType, Model, Param};
use phalanx_models::hf::ModelSpec;
use phalanx_models::{Architecture, BatchShape, Capacity, Experts, Gpt, Llama, Router, T5, port};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_script::Compiled;
use phalanx_testing::{Errors, Rig, RigBatch, Setup, compile, optimise, worst};

use crate::fixtures::{CASES, Loaded, Raw, case, load, numbers, read_raw};

/// What may differ, and which results it is compared with.
pub(crate) struct Tolerance {
    dtype: DType,
    file: &'static str,
    losses: &'static str,
    norms: &'static str,
    logits: f64,
    gradients: f64,
    steps: f64,
}

pub(crate) const F64: Tolerance = Tolerance {
    dtype: DType::F64,
    file: "oracle_f64.safetensors",
    losses: "losses_f64",
    norms: "grad_norms_f64",
    logits: 1e-9,
    gradients: 1e-9,
    steps: 1e-9,
};

const F32: Tolerance = Tolerance {
    dtype: DType::F32,
    file: "oracle.safetensors",
    losses: "losses_f32",
    norms: "grad_norms_f32",
    logits: 1e-4,
    gradients: 1e-4,
    steps: 1e-3,
};

#[test]
fn the_reference_engine() {
    for tolerance in [&F64, &F32] {
        all(tolerance, compile, ReferenceEngine::new);
    }
}

#[test]
fn the_reference_engine_after_every_pass() {
    for tolerance in [&F64, &F32] {
        all(tolerance, optimise, ReferenceEngine::new);
    }
}

#[test]
fn the_cpu_engine() {
    for tolerance in [&F64, &F32] {
        all(tolerance, compile, || CpuEngine::new(1).unwrap());
    }
}

#[test]
fn the_cpu_engine_after_every_pass() {
    for threads in [1, 2, 3] {
        for tolerance in [&F64, &F32] {
            all(tolerance, optimise, || CpuEngine::new(threads).unwrap());
        }
    }
}

/// Needs a GPU, and says so where there is none.
#[test]
fn the_cuda_engine_after_every_pass() {
    if let Err(why) = CudaEngine::new() {
        let _ = writeln!(std::io::stderr(), "SKIPPED the_cuda_engine_after_every_pass: {why}");
        return;
    }
    for tolerance in [&F64, &F32] {
        all(tolerance, optimise, || CudaEngine::new().unwrap());
    }
}

/// Runs every fixture on an engine.
fn all<E: Engine>(tolerance: &Tolerance, compile: Compile, engine: impl Fn() -> E) {
    let setup = Setup { compile, ..Setup::new(tolerance.dtype) };
    for name in CASES {
        Case::read(name, tolerance).compare(&setup, engine());
    }
}

/// From a model to programs.
pub(crate) type Compile = fn(&Model, DType, Recompute) -> Compiled;

pub(crate) struct Case<'a> {
    name: &'static str,
    tolerance: &'a Tolerance,
    pub(crate) loaded: Loaded,
    expected: Raw,
    record: serde_json::Value,
    pub(crate) batches: Vec<RigBatch>,
    /// Targets of each batch that count.
    pub(crate) valid: Vec<usize>,
    pub(crate) shape: BatchShape,
}

impl<'a> Case<'a> {
    pub(crate) fn read(name: &'static str, tolerance: &'a Tolerance) -> Self {
        let dir = case(name);
        let record = std::fs::read_to_string(dir.join("losses.json")).unwrap();
        let raw = read_raw(&dir.join("oracle.safetensors"));
        let (shape, ids) = numbers(&raw, "ids");
        let (_, targets) = numbers(&raw, "targets");
        let (batch, seq) = (shape[1], shape[2]);
        let whole = |values: &[f64]| RefTensor::new(DType::I32, &[batch, seq], values).unwrap();
        let pieces = ids.chunks(batch * seq).zip(targets.chunks(batch * seq));
        let batches = (pieces.clone())
            .map(|(ids, targets)| RigBatch {
                data: vec![
                    (port::IDS.to_owned(), whole(ids)),
                    (port::TARGETS.to_owned(), whole(targets)),
                ],
                first: 0,
            })
            .collect();
        let valid =
            pieces.map(|(_, targets)| targets.iter().filter(|t| **t >= 0.0).count()).collect();
        Self {
            name,
            tolerance,
            loaded: load(&dir).unwrap(),
            expected: read_raw(&dir.join(tolerance.file)),
            record: serde_json::from_str(&record).unwrap(),
            batches,
            valid,
            shape: BatchShape { batch, seq },
        }
    }

    pub(crate) fn architecture(&self) -> Box<dyn Architecture> {
        match &self.loaded.spec {
            ModelSpec::Gpt(spec) => Box::new(Gpt::new(spec.clone())),
            ModelSpec::Llama(spec) => Box::new(Llama::new(spec.clone())),
            ModelSpec::Mixtral(spec) => {
                let router = Router::TopK { k: spec.top_k };
                let experts = Experts {
                    capacity: Capacity::Dropless,
                    every: spec.every,
                    aux_loss: self.record["aux_loss"].as_f64().unwrap(),
                    ..Experts::new(spec.experts, spec.expert_ffn, router)
                };
                Box::new(Llama { experts: Some(experts), ..Llama::new(spec.base.clone()) })
            }
            ModelSpec::T5(spec) => Box::new(T5::new(spec.clone())),
        }
    }

    fn compare<E: Engine>(&self, setup: &Setup, engine: E) {
        let architecture = self.architecture();
        let dtype = self.tolerance.dtype;
        let model = architecture.model(self.shape, dtype).unwrap();
        let logits = architecture.logits(self.shape, dtype).unwrap();
        let mut rig = Rig::with_forward(engine, &model, &logits, setup);
        rig.set_params(|param: &Param| self.loaded.tensors[&param.name].to_f64());
        self.logits(&mut rig);
        self.steps(&mut rig, &model);
    }

    fn logits<E: Engine>(&self, rig: &mut Rig<E>) {
        let found = rig.probe(&self.batches[0], "head", port::LOGITS);
        let error = worst(&found, &numbers(&self.expected, "logits").1);
        assert!(error <= self.tolerance.logits, "{}: logits are off by {error:e}", self.name);
    }

    /// Twenty steps, each on one micro-batch; step s uses batch s mod 4.
    fn steps<E: Engine>(&self, rig: &mut Rig<E>, model: &Model) {
        let lr = self.record["optimizer"]["lr"].as_f64().unwrap();
        let losses = self.series(self.tolerance.losses);
        let norms = self.series(self.tolerance.norms);
        assert_eq!(losses.len(), 20);
        for (step, (loss, norm)) in losses.into_iter().zip(norms).enumerate() {
            let index = step % self.batches.len();
            let inverse = 1.0 / self.valid[index] as f64;
            let found = rig.step(&self.batches[index..=index], lr, inverse);
            for (what, found, expected) in [("loss", found.0, loss), ("norm", found.1, norm)] {
                let error = worst(&[found], &[expected]);
                assert!(
                    error <= self.tolerance.steps,
                    "{}: the {what} of step {step} is {found}, not {expected} ({error:e})",
                    self.name
                );
            }
            if step == 0 {
                self.gradients(rig, model);
            }
        }
        if self.tolerance.dtype == DType::F64 {
            self.final_norms(rig, model);
        }
    }

    /// Where the parameters have got to, by the norm of each.
    fn final_norms<E: Engine>(&self, rig: &mut Rig<E>, model: &Model) {
        for param in model.params() {
            let squares = rig.param(&param.name).iter().map(|x| x * x).sum::<f64>();
            let expected = self.record["final_norms_f64"][&param.name].as_f64().unwrap();
            let error = worst(&[squares.sqrt()], &[expected]);
            let (case, name) = (self.name, &param.name);
            assert!(error <= self.tolerance.steps, "{case}: {name} is off by {error:e}");
        }
    }

    fn gradients<E: Engine>(&self, rig: &mut Rig<E>, model: &Model) {
        let mut errors = Errors::new();
        for param in model.params() {
            let (shape, expected) = numbers(&self.expected, &format!("grad.{}", param.name));
            assert_eq!(shape, param.shape, "{}", param.name);
            errors.add(&param.name, rig.gradient(&param.name), expected);
        }
        let stored = self.expected.keys().filter(|k| k.starts_with("grad."));
        assert_eq!(stored.count(), model.params().len());
        errors.assert_within(self.tolerance.gradients, self.name);
    }

    fn series(&self, key: &str) -> Vec<f64> {
        let values = self.record[key].as_array().unwrap();
        values.iter().map(|v| v.as_f64().unwrap()).collect()
    }
}
