//! Stages that several ranks hold: PipeDream's, which take micro-batches in turn, against their equations, worked out by hand; and
//! DAPPLE's, which split them.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_data::Batch;
use phalanx_models::hf::WeightTensor;
use phalanx_script::{Category, Kind, Script, Updates, plan};
use phalanx_session::corpus::with_step_data;
use phalanx_session::network::Network;
use phalanx_session::{Planner, Session, Settings, StepData};

use crate::asynchronous::{Oracle, Steps, Weights, batches};
use crate::bits::{Bits, params};
use crate::support::{agrees, laid, llama, models, settings, try_llama};

pub(crate) const LR: f64 = 0.01;

/// Holders of each stage, and micro-batches.
pub(crate) type Case = (&'static str, usize);

const CASES: [Case; 4] = [("2-1", 4), ("1-2", 4), ("2-1-1", 4), ("4-2-1", 4)];

pub(crate) fn loaded((holders, m): Case, more: &[&str]) -> Loaded {
    let stages = holders.split('-').count();
    let sizes = [
        format!("parallel.pp={stages}"),
        format!("parallel.holders={holders}"),
        format!("train.microbatches={m}"),
    ];
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    llama(&[&["model.layers=3", "parallel.schedule=pipedream"], &sizes[..], more].concat())
}

fn session(loaded: &Loaded, settings: Settings) -> Session {
    let network = Network::new(loaded).unwrap();
    Session::new(&models(loaded), settings, &*network.start()).unwrap()
}

pub(crate) fn of(loaded: &Loaded) -> Session {
    session(loaded, settings(loaded, None))
}

/// The same training on one rank, which updates by the same delayed equations.
fn alone(loaded: &Loaded) -> Session {
    let own = settings(loaded, None);
    let parallel = own.on_one_rank(&models(loaded).train).unwrap();
    session(loaded, Settings { parallel, ..own })
}

pub(crate) fn step(session: &mut Session, batch: &Batch, lr: f64) -> phalanx_session::StepResult {
    with_step_data(batch, |data: &StepData<'_>| session.step(data, lr)).unwrap()
}

fn weights(session: &mut Session) -> Weights {
    let all = session.params().unwrap().into_iter();
    all.map(|(name, tensor): (String, WeightTensor)| (name, tensor.to_f64())).collect()
}

pub(crate) fn bits(session: &mut Session) -> Bits {
    let all = weights(session).into_iter();
    all.map(|(name, own)| (name, own.into_iter().map(f64::to_bits).collect())).collect()
}

/// A parameter while its equations are worked out.
struct ByHand {
    /// Every version so far.
    history: Vec<Vec<f64>>,
    moments: [Vec<f64>; 2],
    /// Micro-batches of an update, and how many updates late the gradients are.
    each: usize,
    delay: usize,
    /// The sum of gradients since the last update.
    sum: Option<Vec<f64>>,
    /// The sum of squares of the gradient that the last update took.
    squares: f64,
}

impl ByHand {
    /// What a micro-batch reads; with vertical sync all stages go on to other versions after so many micro-batches.
    fn read(&self, microbatch: usize, together: usize) -> Vec<f64> {
        let together = together.max(self.each);
        let made = microbatch / together * together / self.each;
        self.history[made.saturating_sub(self.delay)].clone()
    }

    /// Adds the gradient of a micro-batch; the last one of an update makes a version, from the mean.
    fn add(&mut self, microbatch: usize, gradient: &[f64], adam: bool) {
        match &mut self.sum {
            Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g),
            None => self.sum = Some(gradient.to_vec()),
        }
        if !(microbatch + 1).is_multiple_of(self.each) {
            return;
        }
        let updates = self.history.len() as f64;
        let mut next = self.history[self.history.len() - 1].clone();
        let share = 1.0 / self.each as f64;
        let sum = self.sum.take().unwrap();
        self.squares = sum.iter().map(|g| (g * share).powi(2)).sum();
        let [m, v] = &mut self.moments;
        for (i, w) in next.iter_mut().enumerate() {
            let g = sum[i] * share;
            if !adam {
                *w -= LR * g;
                continue;
            }
            m[i] += (g - m[i]) * (1.0 - 0.9);
            v[i] = v[i] * 0.95 + g * g * (1.0 - 0.95);
            let size = LR / (1.0 - 0.9_f64.powf(updates));
            let root = (1.0 - 0.95_f64.powf(updates)).sqrt();
            *w -= size * (m[i] / (v[i].sqrt() / root + 1e-8));
        }
        self.history.push(next);
    }
}

fn rule(loaded: &Loaded) -> (Updates, usize) {
    let own = settings(loaded, None);
    let groups = own.parallel.stage_groups().unwrap().len();
    let pipeline = &own.parallel.pipeline;
    let updates = pipeline.updates(&models(loaded).train, groups, own.microbatches).unwrap();
    (updates.unwrap(), groups)
}

/// Stage s with r holders updates by the mean of r micro-batches, and reads weights that are as many of its own updates old as its
/// delay says. Beside the weights, the norm of the last updates' gradients.
fn by_hand(case: Case, own: &Loaded, adam: bool, steps: &[Batch]) -> (Weights, f64) {
    let (updates, _) = rule(own);
    let model = models(own).train;
    let mut oracle = Oracle::new(&loaded(case, &[]), case.1, 1);
    let begin = oracle.weights();
    let mut params: BTreeMap<String, ByHand> = BTreeMap::new();
    for (index, instance) in model.instances().iter().enumerate() {
        for param in instance.params.values() {
            let name = model.params()[*param].name.clone();
            let first = begin[&name].clone();
            let zeros = vec![0.0; first.len()];
            let (each, delay) = (updates.holders[index], updates.delays[index]);
            let moments = [zeros.clone(), zeros];
            let (sum, squares) = (None, 0.0);
            let hand = ByHand { history: vec![first], moments, each, delay, sum, squares };
            params.insert(name, hand);
        }
    }
    for (number, batch) in steps.iter().enumerate() {
        for part in 0..case.1 {
            let own = |hand: &ByHand| hand.read(number * case.1 + part, updates.together);
            let at = params.iter().map(|(name, hand)| (name.clone(), own(hand))).collect();
            let gradients = oracle.gradients(&at, batch, part);
            for (name, hand) in &mut params {
                hand.add(part, &gradients[name], adam);
            }
        }
    }
    let norm = params.values().map(|hand| hand.squares).sum::<f64>().sqrt();
    let last = params.into_iter().map(|(name, mut hand)| (name, hand.history.pop().unwrap()));
    (last.collect(), norm)
}

/// To the last bit, with SGD and with AdamW, whose steps are counted by stage.
#[test]
fn stages_follow_their_own_delayed_equations() {
    for case in CASES {
        for (kind, adam, sync) in [
            ("optim.kind=sgd", false, false),
            ("optim.kind=adamw", true, false),
            ("optim.kind=adamw", true, true),
        ] {
            let sync = format!("parallel.vertical_sync={sync}");
            let own = loaded(case, &[kind, "optim.weight_decay=0", &sync]);
            let steps = batches(&own, 3);
            let (expected, norm) = by_hand(case, &own, adam, &steps);
            let mut pipe = of(&own);
            let told = steps.iter().map(|batch| step(&mut pipe, batch, LR).grad_norm);
            let told = told.last().unwrap();
            assert!((told / norm - 1.0).abs() < 1e-12, "{case:?}, {kind}: {told}, not {norm}");
            for (name, found) in weights(&mut pipe) {
                let same =
                    found.iter().zip(&expected[&name]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{case:?}, {kind}, {name}");
            }
        }
    }
}

/// The run that `verify` compares with has the same bits, also where a mean is not exact and sums have three summands; and other
/// bits than with one holder each.
#[test]
fn one_rank_has_the_same_bits() {
    for case in [("2-1-1", 4), ("3-1", 3), ("1-3", 6), ("2-2", 2)] {
        let batch = format!("train.batch_size={}", 2 * case.1);
        let own = loaded(case, &[&batch]);
        let (mut pipe, mut one) = (of(&own), alone(&own));
        for batch in batches(&own, 3) {
            let (found, expected) = (step(&mut pipe, &batch, LR), step(&mut one, &batch, LR));
            assert!((found.loss - expected.loss).abs() < 1e-12, "{case:?}");
            assert!((found.grad_norm - expected.grad_norm).abs() < 1e-12, "{case:?}");
        }
        assert_eq!(bits(&mut pipe), bits(&mut one), "{case:?}");
        let stages = case.0.split('-').count();
        let ones = vec!["1"; stages].join("-");
        let ones = format!("parallel.holders={ones}");
        assert_ne!(bits(&mut pipe), params(&loaded(case, &[&batch, &ones]), None, 3), "{case:?}");
    }
}

/// Beside one rank, with bytes and memory as predicted.
#[test]
fn holders_compose() {
    for (case, layout) in [
        (("2-1", 4), &["parallel.dp=2", "parallel.zero=3"][..]),
        (("2-1", 4), &["parallel.dp=2", "parallel.zero=2"]),
        (("1-2", 4), &["parallel.dp=2", "parallel.zero=1"]),
        (("2-1-1", 4), &["parallel.tp=2"]),
        (("2-1-1", 2), &["train.recompute=stage"]),
        (("1-2", 4), &["train.recompute=full"]),
        (("1-2-1", 4), &["parallel.tp=2", "parallel.sp=true"]),
        (("2-1", 4), &["parallel.cp=2"]),
        (("2-1", 4), &["parallel.vertical_sync=true", "parallel.dp=2", "parallel.zero=3"]),
        (("1-2-1", 4), &["parallel.vertical_sync=true", "parallel.tp=2"]),
    ] {
        agrees(&format!("{case:?}, {layout:?}"), &loaded(case, layout), None);
    }
}

/// Steps that follow each other without a flush have the bits of single steps, losses and norms included.
#[test]
fn rows_of_holders_change_no_bit() {
    let zero: &[&str] = &["parallel.dp=2", "parallel.zero=3"];
    for (case, layout) in [
        (("2-1", 4), &[][..]),
        // A script has several steps.
        (("2-1-1", 2), &[]),
        (("1-2", 4), zero),
        (("4-2-1", 4), &["train.recompute=stage"]),
        (("2-1-1", 2), &["parallel.vertical_sync=true"]),
    ] {
        let own = loaded(case, layout);
        let all = batches(&own, 16);
        let (mut single, mut rows) = (of(&own), of(&own));
        let rate = Steps::rate;
        let expected: Vec<_> = (all.iter().zip(1..))
            .map(|(batch, number)| step(&mut single, batch, rate(number)))
            .collect();
        let steps = Steps::new(all);
        let mut found = rows.take(15, &steps).unwrap();
        found.extend(rows.take(1, &steps).unwrap());
        assert_eq!(found, expected, "{case:?}, {layout:?}");
        assert_eq!(bits(&mut rows), bits(&mut single), "{case:?}, {layout:?}");
    }
}

/// A holder keeps one version for each update that its readers are late, besides the newest: as planned, and as written. Scripts
/// of rows match over all ranks.
#[test]
fn holders_keep_exactly_the_versions_that_are_read() {
    for (case, sync) in CASES.iter().flat_map(|case| [(*case, false), (*case, true)]) {
        let own = loaded(case, &[&format!("parallel.vertical_sync={sync}")]);
        let (updates, _) = rule(&own);
        let lowered = laid(&own, None).lowered;
        let mut trained = of(&own);
        step(&mut trained, &batches(&own, 1)[0], LR);
        for (rank, observed) in trained.observe().unwrap().iter().enumerate() {
            let made = lowered.plan(rank).unwrap();
            let instance = *lowered.instances_of(rank).iter().next().unwrap();
            let each: usize = made.units.iter().map(|unit| unit.elements * 8).sum();
            let versions = (1 + updates.older(instance)) * each;
            let planned = plan(&made.script).unwrap().peak(Category::Weights);
            let found = observed.peaks.iter().find(|(c, _)| *c == Category::Weights).unwrap().1;
            assert_eq!((planned, found), (versions, versions), "{case:?}, {rank}");
        }
        Planner::new(&lowered).unwrap().check().unwrap();
    }
}

/// Holders of a stage sum their gradients once per update, and go on meanwhile: the sum is started right after the backward, and the
/// update waits until the next backward of the same layer.
#[test]
fn a_sum_over_holders_is_started_early_and_used_late() {
    let own = loaded(("2-1", 8), &["train.batch_size=16"]);
    let script: Script = laid(&own, None).lowered.plan(0).unwrap().script;
    let at = |label: &str| -> Vec<usize> {
        let all = script.actions.iter().enumerate();
        all.filter(|(_, action)| action.label == label).map(|(at, _)| at).collect()
    };
    let (sums, updates) = (at("reduce blocks.0"), at("update blocks.0"));
    assert_eq!([sums.len(), updates.len()], [4, 4]);
    // Other work comes in between, but after the last update of the step, which nothing needs in this script.
    let work = |from: usize, to: usize| {
        let turns = script.turns.iter().filter(|(at, _)| (from..to).contains(at));
        turns.count()
    };
    for (sum, update) in sums.iter().zip(&updates).take(3) {
        assert!(work(*sum, *update) > 0, "{sum} {update}");
    }
    // A planted bug: holders that do not sum.
    let mut lost = script.clone();
    let action = &mut lost.actions[sums[1]];
    let Kind::Reduce { run, .. } = action.kind.clone() else { panic!("it is a sum") };
    action.kind = Kind::Clear { run };
    let said = phalanx_script::check(&lost).unwrap_err().to_string();
    assert!(said.contains("holds contributions already"), "{said}");
    lost.actions.remove(sums[1]);
    lost.turns.iter_mut().filter(|(at, _)| *at > sums[1]).for_each(|(at, _)| *at -= 1);
    assert!(phalanx_script::check(&lost).is_err());
}

/// Holders of other schedules split each micro-batch: what one rank does, with bytes and memory as predicted.
#[test]
fn stages_of_different_widths_split_micro_batches() {
    for (holders, layout) in [
        ("2-1", &["parallel.schedule=1f1b"][..]),
        ("1-2", &["parallel.schedule=1f1b", "parallel.zero=1"]),
        ("2-1-1", &["parallel.schedule=1f1b", "parallel.zero=3"]),
        ("1-2-1", &["parallel.schedule=gpipe", "parallel.zero=2", "train.recompute=stage"]),
        ("2-1", &["parallel.schedule=zb-h1", "parallel.tp=2"]),
        ("1-2", &["parallel.schedule=zb-h2", "parallel.dp=2", "train.microbatches=2"]),
        ("2-1", &["parallel.schedule=pipedream-2bw"]),
    ] {
        let pp = format!("parallel.pp={}", holders.split('-').count());
        let held = format!("parallel.holders={holders}");
        let sets = ["model.layers=3", "train.microbatches=4", &pp, &held];
        agrees(&format!("{holders}, {layout:?}"), &llama(&[&sets[..], layout].concat()), None);
    }
}

/// Layers as they are written.
#[test]
fn stages_have_the_layers_that_are_given() {
    let sets = ["model.layers=3", "parallel.pp=2", "train.microbatches=2"];
    let of = |split: &str| llama(&[&sets[..], &[&format!("parallel.split={split}")]].concat());
    for (split, first) in [("1-4", 1), ("4-1", 4), ("3-2", 3)] {
        let lowered = laid(&of(split), None).lowered;
        assert_eq!(lowered.instances_of(0).len(), first, "{split}");
        assert_eq!(lowered.instances_of(1).len(), 5 - first, "{split}");
    }
    agrees("4-1", &of("4-1"), None);
    let wrong = of("3-3");
    let said = phalanx_session::Lowered::new(&models(&wrong), settings(&wrong, None));
    let said = said.err().unwrap().to_string();
    assert!(said.contains("3-3 is not a split of 5 pieces into 2 stages"), "{said}");
}

#[test]
fn holders_that_cannot_be_meant_are_refused() {
    let said = |sets: &[&str]| try_llama(sets).err().unwrap().to_string();
    let pipedream = |holders: &str, more: &[&str]| {
        let pp = format!("parallel.pp={}", holders.split('-').count());
        let held = format!("parallel.holders={holders}");
        let sets = ["parallel.schedule=pipedream", "model.layers=4", &pp, &held];
        said(&[&sets[..], more].concat())
    };
    let starved = pipedream("1-3-1", &["train.microbatches=6", "train.batch_size=6"]);
    assert!(starved.contains("cannot feed the holders 1-3-1"), "{starved}");
    assert!(starved.contains("holders 1-2-1"), "{starved}");
    let odd = pipedream("2-1", &["train.microbatches=1"]);
    assert!(odd.contains("2 holders cannot take 1 micro-batch in turn"), "{odd}");
    assert!(odd.contains("2 micro-batches, or holders 1-1"), "{odd}");
    let one_f = |more: &[&str]| said(&[&["parallel.pp=2", "train.microbatches=4"], more].concat());
    for (sets, words) in [
        (&["parallel.holders=2-1-1"][..], ["does not fit parallel.pp = 2", "parallel.pp = 3"]),
        (&["parallel.holders=3-1"], ["3 holders of stage 0 cannot split", "train.batch_size = 12"]),
        (
            &["parallel.holders=2-1", "parallel.schedule=interleaved", "model.layers=4"],
            ["does not work with parallel.schedule = \"interleaved\"", "1f1b"],
        ),
        (&["parallel.holders=2-1", "parallel.sync=average"], ["parallel.sync", "ddp"]),
        (
            &["parallel.holders=2-1", "parallel.order=tp-cp-pp-dp"],
            ["parallel.order", "tp-cp-dp-pp"],
        ),
        (&["parallel.plan=auto"], ["not built yet", "dapple"]),
        (
            &["parallel.plan=dapple", "parallel.split=count"],
            ["parallel.split has no effect", "leave"],
        ),
    ] {
        let found = one_f(sets);
        assert!(words.iter().all(|word| found.contains(word)), "{found}");
    }
}
