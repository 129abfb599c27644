//! Pipelines without a flush against their equations, worked out by hand on one rank; blocks of steps; versions.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_data::Batch;
use phalanx_error::Result;
use phalanx_models::hf::WeightTensor;
use phalanx_pipeline::NamedSchedule;
use phalanx_script::{Category, Kind, RollPart, Script, ScriptKey, plan};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{
    BatchSource, Lowered, Parallel, Pipeline, Planner, Session, SharedStrategy, StepData,
};
use phalanx_spmd::strategies::DataParallel;

use crate::bits::{Bits, params};
use crate::support::{laid, llama, models, on, settings, shared};

const LR: f64 = 0.01;

/// The schedule, and the stages and micro-batches that it runs with.
type Case = (&'static [&'static str], usize, usize);

const STASH: &[&str] = &["parallel.schedule=pipedream"];
const VERTICAL: &[&str] = &["parallel.schedule=pipedream", "parallel.vertical_sync=true"];
const TWO_BW: &[&str] = &["parallel.schedule=pipedream-2bw", "optim.clip=none"];
const CASES: [Case; 5] =
    [(STASH, 2, 4), (STASH, 3, 4), (VERTICAL, 3, 4), (TWO_BW, 2, 4), (TWO_BW, 3, 4)];

fn loaded(case: Case, more: &[&str]) -> Loaded {
    let (schedule, stages, m) = case;
    let sizes = [format!("parallel.pp={stages}"), format!("train.microbatches={m}")];
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    llama(&[&["model.layers=3"], schedule, &sizes[..], more].concat())
}

pub(crate) fn batches(loaded: &Loaded, count: usize) -> Vec<Batch> {
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    (0..count).map(|_| loader.next_batch().unwrap().clone()).collect()
}

fn session(loaded: &Loaded) -> Session {
    let network = Network::new(loaded).unwrap();
    Session::new(&models(loaded), settings(loaded, None), &*network.start()).unwrap()
}

pub(crate) type Weights = BTreeMap<String, Vec<f64>>;

fn values(tensors: BTreeMap<String, WeightTensor>) -> Weights {
    tensors.into_iter().map(|(name, tensor)| (name, tensor.to_f64())).collect()
}

/// Gradients of a synchronous step on one rank, at any weights.
pub(crate) struct Oracle {
    session: Session,
    /// Rows of one of its batches.
    rows: usize,
}

impl Oracle {
    /// For a run that takes so many parts of a batch, of as many micro-batches.
    pub(crate) fn new(run: &Loaded, parts: usize, microbatches: usize) -> Self {
        let rows = run.config.train.batch_size.get() / parts;
        let sets =
            [format!("train.batch_size={rows}"), format!("train.microbatches={microbatches}")];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let more = ["optim.clip=none", "optim.kind=sgd", "model.layers=3"];
        Self { session: session(&llama(&[&sets[..], &more].concat())), rows }
    }

    pub(crate) fn weights(&mut self) -> Weights {
        values(self.session.params().unwrap())
    }

    /// The gradients of part `part` of a batch.
    pub(crate) fn gradients(&mut self, at: &Weights, batch: &Batch, part: usize) -> Weights {
        for index in 0..self.session.parameters().len() {
            let param = self.session.parameters()[index].clone();
            let bytes: Vec<u8> = at[&param.name].iter().flat_map(|x| x.to_ne_bytes()).collect();
            let tensor = WeightTensor::from_bytes(param.shape, phalanx_ir::DType::F64, &bytes);
            self.session.set_param(index, &tensor).unwrap();
        }
        let len = self.rows * 8;
        let of = |all: &[i32]| all[part * len..(part + 1) * len].to_vec();
        let (ids, targets) = (of(&batch.ids), of(&batch.targets));
        let valid_tokens = targets.iter().filter(|target| **target >= 0).count() as u64;
        let first_sample = batch.first_sample + (part * self.rows) as u64;
        let own = Batch { first_sample, ids, targets, valid_tokens, ..Batch::default() };
        with_step_data(&own, |data| self.session.step(data, 0.0)).unwrap();
        values(self.session.gradients().unwrap())
    }
}

/// An update rule, with its operations in the order of the engine's.
#[derive(Default)]
struct ByHand {
    adam: bool,
    moments: BTreeMap<String, [Vec<f64>; 2]>,
    updates: f64,
}

impl ByHand {
    fn update(&mut self, weights: &mut Weights, gradients: &Weights) {
        self.updates += 1.0;
        for (name, values) in weights.iter_mut() {
            let zeros = || vec![0.0; values.len()];
            let [m, v] = self.moments.entry(name.clone()).or_insert_with(|| [zeros(), zeros()]);
            for (i, w) in values.iter_mut().enumerate() {
                let g = gradients[name][i];
                if !self.adam {
                    *w -= LR * g;
                    continue;
                }
                m[i] += (g - m[i]) * (1.0 - 0.9);
                v[i] = v[i] * 0.95 + g * g * (1.0 - 0.95);
                let size = LR / (1.0 - 0.9_f64.powf(self.updates));
                let root = (1.0 - 0.95_f64.powf(self.updates)).sqrt();
                *w -= size * (m[i] / (v[i].sqrt() / root + 1e-8));
            }
        }
    }
}

/// The weights after some steps of the delayed equations. Stage k reads the version of as many updates ago as its delay
/// says, and all versions begin equal.
fn by_hand(case: Case, adam: bool, steps: &[Batch]) -> Weights {
    let own = loaded(case, &[]);
    let model = models(&own).train;
    let pipeline = &settings(&own, None).parallel.pipeline;
    let updates = pipeline.updates(&model, case.1, case.2).unwrap().unwrap();
    let mut oracle = Oracle::new(&loaded(case, &[]), updates.per_step(), updates.round);
    let delay: BTreeMap<&str, usize> = (model.instances().iter().zip(&updates.delays))
        .flat_map(|(instance, delay)| instance.params.values().map(move |p| (*p, *delay)))
        .map(|(param, delay)| (model.params()[param].name.as_str(), delay))
        .collect();
    let mut history = vec![oracle.weights()];
    let mut rule = ByHand { adam, ..ByHand::default() };
    for batch in steps {
        for part in 0..updates.per_step() {
            let newest = history.len() - 1;
            let read =
                |name: &String| history[newest.saturating_sub(delay[name.as_str()])][name].clone();
            let at = history[newest].keys().map(|name| (name.clone(), read(name))).collect();
            let gradients = oracle.gradients(&at, batch, part);
            let mut next = history[newest].clone();
            rule.update(&mut next, &gradients);
            history.push(next);
        }
    }
    history.pop().unwrap()
}

/// To the last bit, with SGD and with AdamW.
#[test]
fn weights_follow_the_delayed_equations() {
    for case in CASES {
        for (kind, adam) in [("optim.kind=sgd", false), ("optim.kind=adamw", true)] {
            let own = loaded(case, &[kind, "optim.weight_decay=0"]);
            let steps = batches(&own, 4);
            let expected = by_hand(case, adam, &steps);
            let mut pipe = session(&own);
            for batch in &steps {
                with_step_data(batch, |data| pipe.step(data, LR)).unwrap();
            }
            for (name, found) in values(pipe.params().unwrap()) {
                let same =
                    found.iter().zip(&expected[&name]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{case:?}, {kind}, {name}");
            }
        }
    }
}

/// A run without delays is another one.
#[test]
fn delays_change_what_is_learnt() {
    let plain = |sets: &[&str]| {
        let all = [&["model.layers=3", "parallel.pp=3", "train.microbatches=4"], sets].concat();
        params(&llama(&[&all[..], &["optim.clip=none"]].concat()), None, 4)
    };
    let [flush, two_bw] = [&["parallel.schedule=1f1b"][..], TWO_BW].map(plain);
    let [stash, vertical] = [STASH, VERTICAL].map(|s| params(&loaded((s, 3, 4), &[]), None, 4));
    assert!(flush != two_bw && stash != vertical && stash != two_bw);
}

/// Batches and their rates, for ranks that feed themselves.
pub(crate) struct Steps(Vec<Batch>);

impl Steps {
    pub(crate) fn new(batches: Vec<Batch>) -> Self {
        Self(batches)
    }

    pub(crate) fn rate(step: u64) -> f64 {
        rate(step)
    }
}

impl BatchSource for Steps {
    fn with(&self, step: u64, run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>) -> Result<()> {
        with_step_data(&self.0[step as usize - 1], |data| run(data, rate(step)))
    }
}

fn rate(step: u64) -> f64 {
    LR / step as f64
}

fn bits(session: &mut Session) -> Bits {
    let all = values(session.params().unwrap()).into_iter();
    all.map(|(name, own)| (name, own.into_iter().map(f64::to_bits).collect())).collect()
}

const COUNT: usize = 16;

/// Steps that follow each other without a flush have the bits of single steps, losses and norms included: versions do not
/// depend on where a pipeline drains. Rows of nine and of two scripts, with single steps between them.
#[test]
fn blocks_of_steps_change_no_bit() {
    let [zero, tp]: [&[&str]; 2] = [&["parallel.dp=2", "parallel.zero=3"], &["parallel.tp=2"]];
    let rows: [(Case, &[&str]); 9] = [
        ((STASH, 2, 4), &[]),
        ((STASH, 3, 4), zero),
        // Fewer micro-batches than stages: a script has two steps.
        ((STASH, 3, 2), &[]),
        ((VERTICAL, 3, 4), tp),
        ((VERTICAL, 3, 4), &["train.recompute=stage"]),
        ((TWO_BW, 2, 4), &["optim.clip=0.1"]),
        ((TWO_BW, 3, 4), tp),
        ((TWO_BW, 3, 4), &["train.recompute=stage"]),
        ((STASH, 1, 2), &[]),
    ];
    for (case, layout) in rows {
        let own = loaded(case, layout);
        let steps = Steps(batches(&own, COUNT));
        let mut single = session(&own);
        let mut blocks = session(&own);
        let one = |session: &mut Session, step: usize| {
            with_step_data(&steps.0[step], |data| session.step(data, rate(step as u64 + 1)))
                .unwrap()
        };
        let expected: Vec<_> = (0..COUNT).map(|step| one(&mut single, step)).collect();
        let mut found = blocks.take(9, &steps).unwrap();
        found.push(one(&mut blocks, 9));
        for count in [1, 2, 3] {
            found.extend(blocks.take(count, &steps).unwrap());
        }
        assert_eq!(found, expected, "{case:?}, {layout:?}");
        assert_eq!(bits(&mut blocks), bits(&mut single), "{case:?}, {layout:?}");
    }
}

/// Stage i of p keeps p − i versions with stashing, p with vertical sync, and 2 in PipeDream-2BW: in bytes, on every rank, as
/// planned and as written; and the scripts of a block match over all ranks.
#[test]
fn stages_keep_exactly_the_versions_that_are_read() {
    for case @ (schedule, stages, _) in CASES {
        let own = loaded(case, &[]);
        let lowered = laid(&own, None).lowered;
        let mut trained = session(&own);
        with_step_data(&batches(&own, 1)[0], |data| trained.step(data, LR)).unwrap();
        let written = trained.observe().unwrap();
        for (rank, observed) in written.iter().enumerate() {
            let versions = match schedule {
                TWO_BW => 2,
                VERTICAL => stages,
                _ => stages - rank,
            };
            let made = lowered.plan(rank).unwrap();
            let each: usize = made.units.iter().map(|unit| unit.elements * 8).sum();
            let planned = plan(&made.script).unwrap().peak(Category::Weights);
            let found = observed.peaks.iter().find(|(c, _)| *c == Category::Weights).unwrap().1;
            assert_eq!((planned, found), (versions * each, versions * each), "{case:?}, {rank}");
        }
        Planner::new(&lowered).unwrap().check().unwrap();
    }
}

/// A script of an endless row.
fn of_row(case: Case, part: RollPart) -> Script {
    let own = loaded(case, &[]);
    let lowered: Lowered = laid(&own, None).lowered;
    let planner = Planner::new(&lowered).unwrap();
    let plan = planner.plan(0).unwrap();
    let key = ScriptKey::Roll(part);
    let found = plan.scripts().find(|(own, _)| *own == key).unwrap();
    found.1.script.clone()
}

/// Planted bugs: a run that reads another version, a version that is not carried on, an update that overwrites a
/// version too early, one that is left out.
#[test]
fn the_checker_finds_wrong_versions() {
    for case in [(STASH, 3, 4), (VERTICAL, 3, 4), (TWO_BW, 2, 4)] {
        let good = of_row(case, RollPart::Middle);
        phalanx_script::check(&good).unwrap();
        let said = |script: &Script| phalanx_script::check(script).unwrap_err().to_string();
        let weights: Vec<_> = good.versioned.iter().map(|own| own.buffer).collect();
        // Another version of the same unit is read.
        let mut wrong = good.clone();
        let (at, _) = wrong.turns[0];
        let views = &mut wrong.actions[at].run_mut().unwrap().inputs;
        let read = views.iter_mut().find(|view| weights.contains(&view.buffer)).unwrap();
        let unit = good.versioned.iter().find(|own| own.buffer == read.buffer).unwrap().unit;
        let other =
            |own: &&phalanx_script::VersionedBuffer| own.unit == unit && own.buffer != read.buffer;
        read.buffer = good.versioned.iter().find(other).unwrap().buffer;
        assert!(said(&wrong).contains("its micro-batch needs version"), "{}", said(&wrong));
        // The new version takes the place of one that is still read.
        let updates = |script: &Script| -> Vec<usize> {
            let all = script.actions.iter().enumerate();
            all.filter(|(_, a)| matches!(a.kind, Kind::Update { .. })).map(|(at, _)| at).collect()
        };
        let mut early = good.clone();
        let run = early.actions[updates(&good)[0]].run_mut().unwrap();
        // A single update of two versions is in place, and moves the older one on before (below).
        let in_place = run.outputs[0].0.buffer == run.inputs[0].buffer;
        assert_eq!(in_place, case.0 == TWO_BW);
        run.outputs[0].0.buffer = run.inputs[0].buffer;
        assert!(in_place || said(&early).contains("version"), "{}", said(&early));
        // The last update of a unit is lost.
        let mut lost = good.clone();
        let last = *updates(&good).last().unwrap();
        let mut kept = lost.actions[last].run().unwrap().clone();
        kept.contributes.clear();
        lost.actions[last].kind = Kind::Run(kept);
        assert!(phalanx_script::check(&lost).is_err(), "{case:?}");
    }
    // One update of two versions moves the older one on; without that it would be carried too short.
    let own = loaded((TWO_BW, 2, 4), &[]);
    let mut script = laid(&own, None).lowered.plan(0).unwrap().script;
    phalanx_script::check(&script).unwrap();
    let moves = |script: &Script| script.actions.iter().position(|a| a.label.starts_with("keep "));
    let at = moves(&script).unwrap();
    let run = script.actions[at].run_mut().unwrap();
    run.inputs[0].buffer = run.outputs[0].0.buffer;
    let said = phalanx_script::check(&script).unwrap_err().to_string();
    assert!(said.contains("the next script needs version 0 there"), "{said}");
}

/// Weights that are written are read by the next step, on every stage: a run goes on as one that began with them.
#[test]
fn written_weights_replace_all_versions() {
    for case in [(STASH, 3, 4), (VERTICAL, 3, 4), (TWO_BW, 2, 4)] {
        let own = loaded(case, &["optim.kind=sgd"]);
        let steps = batches(&own, 2);
        let mut fresh = session(&own);
        let mut used = session(&own);
        let started = values(fresh.params().unwrap());
        with_step_data(&steps[0], |data| used.step(data, LR)).unwrap();
        assert_ne!(bits(&mut used), bits(&mut fresh), "{case:?}");
        for index in 0..used.parameters().len() {
            let param = used.parameters()[index].clone();
            let bytes: Vec<u8> =
                started[&param.name].iter().flat_map(|x| x.to_ne_bytes()).collect();
            let tensor = WeightTensor::from_bytes(param.shape, phalanx_ir::DType::F64, &bytes);
            used.set_param(index, &tensor).unwrap();
        }
        for trained in [&mut fresh, &mut used] {
            with_step_data(&steps[1], |data| trained.step(data, LR)).unwrap();
        }
        assert_eq!(bits(&mut used), bits(&mut fresh), "{case:?}");
    }
}

/// What pipelines without a flush cannot mean is refused by keys, and where settings do not come from keys.
#[test]
fn what_cannot_be_meant_is_refused() {
    for schedule in ["pipedream", "pipedream-2bw"] {
        let order = format!("parallel.schedule={schedule}");
        let sets = ["parallel.pp=2", "train.microbatches=4", &order];
        let refused = |more: &[&str]| {
            crate::support::try_llama(&[&sets[..], more].concat()).unwrap_err().to_string()
        };
        let half = refused(&["precision.compute=f16"]);
        assert!(half.contains("f16") && half.contains(schedule) && half.contains("bf16"), "{half}");
        for sync in ["dataparallel", "local-sgd", "average"] {
            let said = refused(&["parallel.dp=2", &format!("parallel.sync={sync}")]);
            assert!(said.contains(sync) && said.contains("\"ddp\""), "{said}");
        }
        let plain = llama(&["train.microbatches=4", "model.layers=3"]);
        let named: NamedSchedule = schedule.parse().unwrap();
        let pipeline = Pipeline { order: named.into(), ..Pipeline::default() };
        let said = |mesh: &str, strategies: Vec<SharedStrategy>, replicas: bool| {
            let replicas =
                replicas.then(|| settings(&replicated(), None).parallel.replicas).flatten();
            let parallel =
                Parallel { pipeline: pipeline.clone(), replicas, ..on(mesh, strategies) };
            let lowered = Lowered::new(&models(&plain), settings(&plain, Some(parallel)));
            lowered.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(said("pp=2", vec![], false), "");
        let owner = said("pp=2 dp=2", vec![shared(DataParallel::default())], false);
        assert!(owner.contains(schedule) && owner.contains("DDP or ZeRO"), "{owner}");
        let alone = said("pp=2 dp=2", vec![], true);
        assert!(alone.contains("replicas that train by themselves"), "{alone}");
    }
}

/// Replicas that are averaged every second step.
fn replicated() -> Loaded {
    llama(&["parallel.dp=2", "parallel.sync=local-sgd", "parallel.sync_every=2"])
}

/// Clipping is for pipelines that have a norm, and shared weights for those that update them at one time.
#[test]
fn clipping_needs_a_norm() {
    let sets = ["parallel.pp=2", "train.microbatches=4", "parallel.schedule=pipedream"];
    let refused = crate::support::try_llama(&[&sets[..], &["optim.clip=0.5"]].concat());
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("optim.clip = 0.5") && said.contains("pipedream-2bw"), "{said}");
    let tied = crate::support::try_gpt(&sets).unwrap_err().to_string();
    assert!(tied.contains("model.tied = false"), "{tied}");
}
