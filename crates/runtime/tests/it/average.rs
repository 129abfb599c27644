//! A third script over the same state: two replicas train by themselves and take the mean of their weights
//! every few steps. Training, averaging and the rule between them are data; nothing else knows of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_comm::{Communicator, RankPool, Threads};
use phalanx_cpu::CpuEngine;
use phalanx_engine::{Counters, Engine};
use phalanx_ir::{DType, Model, text};
use phalanx_models::{Architecture, BatchShape, initial_values};
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{
    Action, BufferKey, Choice, Controller, EveryStep, HeldRange, Kind, Lane, Moved, Optimizer,
    Outcome, Plan, Precision, RankPlace, Record, Route, Run, Scalar, Script, ScriptBuilder,
    ScriptError, ScriptKey, StageGroup, State, TrainingScript, View, World, Write, accumulate,
    merge_adjacent, traffic, train_script,
};
use phalanx_script::{Compiled, Library};
use phalanx_spmd::Sharing;
use phalanx_testing::{Rig, RigBatch, Setup, compile, mlp};

const STEPS: u64 = 7;
const EVERY: u64 = 3;
const LR: f64 = 0.05;

/// Averages after every so many steps.
#[derive(Debug)]
struct AverageEvery(u64);

impl Controller for AverageEvery {
    fn next(&self, step: u64, _records: &[Record]) -> Choice {
        Choice(match step.is_multiple_of(self.0) {
            true => [ScriptKey::Train, ScriptKey::Average].as_slice().into(),
            false => [ScriptKey::Train].as_slice().into(),
        })
    }
}

/// The scripts of one of two replicas, each of which is a world of its own but for the averages.
struct Replica<'a> {
    training: TrainingScript<'a>,
}

impl ScriptBuilder for Replica<'_> {
    fn build(&self, key: ScriptKey, state: &State) -> Result<Script, ScriptError> {
        match key {
            ScriptKey::Train => train_script(&self.training, state),
            ScriptKey::Average => Ok(average(&self.training.world.library, state)),
            other => panic!("nobody asks for {other:?}"),
        }
    }
}

/// The mean of each unit's weights. What a rank has is a summand of twice the mean.
fn average(library: &Library, state: &State) -> Script {
    let mut script = state.script();
    for (unit, buffers) in state.units.iter().zip(&state.buffers) {
        let HeldRange { buffer, dtype, .. } = buffers.weights;
        let n = unit.elements;
        let program = text::parse(&format!(
            "mesh dp=2
program average {{
  w: state {dtype}[*{n}]{{P:dp}}
  %1 = scale(w, by=0.5) : {dtype}[*{n}]{{P:dp}}
  %2 = all_reduce<dp>(%1) : {dtype}[*{n}]
  return mean: state %2
}}"
        ));
        let view = View { buffer, offset: 0 };
        let run = Run {
            program: script.program_of(library.placed(&program.unwrap()), [0, 1].into()),
            inputs: vec![view],
            outputs: vec![(view, Write::Overwrite)],
            contributes: vec![],
        };
        let label = format!("average {}", unit.name);
        script.actions.push(Action {
            label,
            lane: Lane::Compute,
            kind: Kind::Run(run),
            after: vec![],
        });
    }
    script
}

fn model() -> Model {
    mlp().model(BatchShape { batch: 4, seq: 1 }, DType::F64).unwrap()
}

fn batch(rank: usize, step: u64) -> RigBatch {
    let values = |n: usize, shift: f64| -> Vec<f64> {
        (0..n).map(|i| ((i as f64 + shift) * (0.7 + step as f64) + rank as f64).sin()).collect()
    };
    let tensor = |shape: [usize; 2], shift| {
        RefTensor::new(DType::F32, &shape, &values(shape[0] * shape[1], shift)).unwrap()
    };
    RigBatch {
        data: vec![("x".into(), tensor([4, 3], 0.0)), ("y".into(), tensor([4, 2], 0.5))],
        first: 0,
    }
}

/// One replica: its engine, its scripts, and how often each was run.
struct Worker<E: Engine> {
    rank: usize,
    executor: Executor<E>,
    plan: Plan,
    ids: BTreeMap<ScriptKey, ScriptId>,
    runs: BTreeMap<ScriptKey, u64>,
    records: Vec<Record>,
}

impl<E: Engine> Worker<E> {
    fn new(rank: usize, engine: E, model: &Model, compiled: &Compiled) -> Self {
        let (mesh, sharing) = (phalanx_ir::Mesh::single(), Sharing::none());
        let turns =
            merge_adjacent(&accumulate(model.instances().len(), 1), model.instances().len());
        let ranks = [rank];
        let stage_group =
            StageGroup { compiled, turns: &turns, mesh: &mesh, sharing: &sharing, ranks: &ranks };
        let library = Arc::new(Library::new(engine.requirements()));
        let world = World::new(model, vec![stage_group], library).unwrap();
        let wide = DType::F64;
        let training = TrainingScript {
            world: &world,
            at: RankPlace::default(),
            precision: Precision { weights: wide, grads: wide, state: wide, split: false },
            optimizer: Optimizer::sgd(0.9),
            clip: None,
            scaling: None,
        };
        let replica = Replica { training };
        let mut plan = Plan::new(training.state().unwrap()).unwrap();
        let mut executor = Executor::new(engine);
        let ids = [ScriptKey::Train, ScriptKey::Average].map(|key| {
            let planned = plan.script(key, &replica).unwrap();
            // Asked for again, it is the same one.
            assert!(Arc::ptr_eq(&planned, &plan.script(key, &replica).unwrap()));
            (key, executor.load(planned).unwrap())
        });
        executor.reserve().unwrap();
        assert_eq!(executor.arena(), plan.arena());
        let (runs, records) = (BTreeMap::new(), Vec::new());
        let mut worker = Self { rank, executor, plan, ids: ids.into(), runs, records };
        worker.initialise(model);
        worker
    }

    /// Weights from the seed, zeros elsewhere.
    fn initialise(&mut self, model: &Model) {
        let (id, state) = (self.ids[&ScriptKey::Train], self.plan.state().clone());
        for (unit, buffers) in state.units.iter().zip(&state.buffers) {
            for (kind, held) in buffers.all() {
                let mut values = vec![0.0; unit.elements];
                for member in
                    unit.members.iter().filter(|_| kind == phalanx_script::StateKind::Weights)
                {
                    let param = &model.params()[member.param];
                    let own = initial_values(param, 5, 0..param.elements());
                    values[member.offset..].iter_mut().zip(own).for_each(|(x, own)| *x = own);
                }
                let bytes: Vec<u8> = values.into_iter().flat_map(f64::to_ne_bytes).collect();
                self.executor.write(id, held.buffer, &bytes).unwrap();
            }
        }
    }

    fn step(&mut self, step: u64, controller: &dyn Controller) {
        for &key in controller.next(step, &self.records).0.iter() {
            let id = self.ids[&key];
            let inputs: Vec<_> =
                self.executor.host_inputs(id).map(|(buffer, key)| (buffer, key.clone())).collect();
            let batch = batch(self.rank, step);
            for (buffer, key) in inputs {
                let bytes = match &key {
                    BufferKey::Data { port, .. } => {
                        let (_, values) =
                            batch.data.iter().find(|(name, _)| **name == **port).unwrap();
                        values.to_bytes()
                    }
                    BufferKey::Scalar(Scalar::LearningRate) => LR.to_ne_bytes().to_vec(),
                    BufferKey::Scalar(Scalar::Step) => (step as f64).to_ne_bytes().to_vec(),
                    BufferKey::Scalar(Scalar::InverseCount) => (0.125f64).to_ne_bytes().to_vec(),
                    other => panic!("nobody gives {other:?}"),
                };
                self.executor.write(id, buffer, &bytes).unwrap();
            }
            self.executor.run(id).unwrap();
            *self.runs.entry(key).or_default() += 1;
        }
        self.records.push(Record { step, outcome: Outcome::Applied });
    }

    /// By unit: the weights, found through one script or the other.
    fn weights(&mut self, key: ScriptKey) -> Vec<Vec<u64>> {
        let (id, state) = (self.ids[&key], self.plan.state().clone());
        let weights = state.units.iter().zip(&state.buffers).map(|(unit, buffers)| {
            let mut bytes = vec![0; unit.elements * 8];
            self.executor.read(id, buffers.weights.buffer, &mut bytes).unwrap();
            bytes.as_chunks::<8>().0.iter().map(|b| u64::from_ne_bytes(*b)).collect()
        });
        weights.collect()
    }

    /// What its scripts said that it would move, over all their runs.
    fn predicted(&self) -> BTreeMap<Route, Moved> {
        let mut total = BTreeMap::new();
        for (key, runs) in &self.runs {
            for (route, once) in traffic(self.executor.script(self.ids[key])) {
                let moved = Moved { calls: runs * once.calls, bytes: runs * once.bytes };
                phalanx_call::traffic::add(&mut total, route, moved);
            }
        }
        total
    }
}

/// The same by two trainers that know nothing of each other, and a host that takes the mean.
fn by_hand() -> Vec<BTreeMap<String, Vec<f64>>> {
    let model = model();
    let setup = Setup { optimizer: Optimizer::sgd(0.9), clip: None, ..Setup::new(DType::F64) };
    let mut rigs = [0, 1].map(|_| Rig::new(ReferenceEngine::new(), &model, &setup));
    rigs.iter_mut().for_each(|rig| rig.initialise(5));
    let names: Vec<String> = model.params().iter().map(|p| p.name.clone()).collect();
    let params = |rig: &mut Rig<ReferenceEngine>| -> BTreeMap<String, Vec<f64>> {
        names.iter().map(|name| (name.clone(), rig.param(name))).collect()
    };
    for step in 1..=STEPS {
        for (rank, rig) in rigs.iter_mut().enumerate() {
            rig.step(&[batch(rank, step)], LR, 0.125);
        }
        if step % EVERY == 0 {
            let [a, b] = &mut rigs;
            let (a, b) = (params(a), params(b));
            let mean = |name: &String| -> Vec<f64> {
                a[name].iter().zip(&b[name]).map(|(a, b)| 0.5 * a + 0.5 * b).collect()
            };
            rigs.iter_mut().for_each(|rig| rig.set_params(|param| mean(&param.name)));
        }
    }
    rigs.iter_mut().map(params).collect()
}

#[test]
fn replicas_average_every_few_steps() {
    let model = model();
    let compiled = compile(&model, DType::F64, phalanx_autodiff::Recompute::None);
    let make = |endpoint: Box<dyn Communicator>| {
        let rank = endpoint.rank();
        let engine = CpuEngine::on_rank(1, endpoint).unwrap();
        Ok::<_, String>(Worker::new(rank, engine, &model, &compiled))
    };
    let mut crew = RankPool::new(&Threads::new(2), make).unwrap();
    for step in 1..=STEPS {
        let weights = crew.run(|_, worker| {
            worker.step(step, &AverageEvery(EVERY));
            let weights = worker.weights(ScriptKey::Train);
            assert_eq!(weights, worker.weights(ScriptKey::Average), "state lies at one place");
            Ok::<_, String>(weights)
        });
        let weights = weights.unwrap();
        assert_eq!(weights[0] == weights[1], step % EVERY == 0, "step {step}");
    }
    let moved = crew.run(|_, worker| {
        Ok::<_, String>((worker.predicted(), worker.executor.engine_mut().moved()))
    });
    for (predicted, measured) in moved.unwrap() {
        assert!(predicted.values().any(|moved| moved.bytes > 0));
        assert_eq!(predicted, measured);
    }
    let expected = by_hand();
    let found = crew.run(|_, worker| {
        let (weights, state) = (worker.weights(ScriptKey::Train), worker.plan.state().clone());
        let mut params = BTreeMap::new();
        for (unit, values) in state.units.iter().zip(weights) {
            for member in &unit.members {
                let own = &values[member.offset..][..member.elements];
                let own: Vec<f64> = own.iter().map(|bits| f64::from_bits(*bits)).collect();
                params.insert(model.params()[member.param].name.clone(), own);
            }
        }
        Ok::<_, String>(params)
    });
    for (found, expected) in found.unwrap().iter().zip(&expected) {
        for (name, expected) in expected {
            for (a, b) in found[name].iter().zip(expected) {
                assert!((a - b).abs() < 1e-12, "{name}: {a} and {b}");
            }
        }
    }
}

#[test]
fn rules_are_pure() {
    let train = Choice(vec![ScriptKey::Train].into());
    let both = Choice(vec![ScriptKey::Train, ScriptKey::Average].into());
    let chosen: Vec<Choice> = (1..=6).map(|step| AverageEvery(3).next(step, &[])).collect();
    assert_eq!(chosen, [&train, &train, &both, &train, &train, &both].map(Clone::clone));
    assert_eq!(EveryStep.next(3, &[]), train);
}
