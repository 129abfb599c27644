//! Post-validation: steps that go on before the norm of the step before is known, against steps that wait for it.

use std::collections::BTreeSet;

use phalanx_config::Loaded;
use phalanx_data::Batch;
use phalanx_error::Result;
use phalanx_pipeline::{HeldStage, Times, TurnCosts, simulate};
use phalanx_script::{AheadPart, Buffer, BufferKey, Class, Kind, Number, Part, ScriptKey, Source};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{
    BLOCK, BatchSource, Planner, RankScript, Session, StepData, StepResult, Timetable,
};
use phalanx_sim::{Durations, IssueRule, play};

use crate::bits::Bits;
use crate::support::{gpt, laid, llama, models, settings, try_llama};

const STEPS: usize = 2 * BLOCK;
const ON: &str = "parallel.post_validation=true";
const F32: [&str; 3] = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];

/// What a run leaves: the results of its steps, and its parameters.
type Left = (Vec<StepResult>, Bits);

struct Given(Vec<Batch>);

impl BatchSource for Given {
    fn with(&self, step: u64, run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>) -> Result<()> {
        with_step_data(&self.0[step as usize - 1], |data| run(data, rate(step)))
    }
}

/// Another one for every step, so that none is taken for another.
fn rate(step: u64) -> f64 {
    0.01 / (1.0 + step as f64)
}

fn session(loaded: &Loaded) -> Session {
    let network = Network::new(loaded).unwrap();
    Session::new(&models(loaded), settings(loaded, None), &*network.start()).unwrap()
}

/// Two blocks of steps, and one more step.
fn trained(loaded: &Loaded) -> Left {
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let batches = (0..=STEPS).map(|_| loader.next_batch().unwrap().clone()).collect();
    let (mut session, given) = (session(loaded), Given(batches));
    let mut results = Vec::new();
    for count in [BLOCK, BLOCK, 1] {
        results.extend(session.take(count as u64, &given).unwrap());
    }
    let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect();
    let params = session.params().unwrap();
    (results, params.into_iter().map(|(name, own)| (name, bits(own.to_f64()))).collect())
}

/// The layout with and without; they must leave the same bits. Gives the norms, and the steps that were done again.
fn same(what: &str, load: impl Fn(&[&str]) -> Loaded, sets: &[&str]) -> (Vec<f64>, Vec<bool>) {
    let (plain, before) = trained(&load(sets));
    let (found, after) = trained(&load(&[sets, &[ON]].concat()));
    let numbers = |results: &[StepResult]| -> Vec<[u64; 2]> {
        results.iter().map(|own| [own.loss, own.grad_norm].map(f64::to_bits)).collect()
    };
    assert_eq!(numbers(&found), numbers(&plain), "{what}");
    assert!(before == after, "{what}: parameters differ");
    assert!(plain.iter().all(|own| !own.repeated), "{what}");
    let norms = plain.iter().map(|own| own.grad_norm).collect();
    (norms, found.iter().map(|own| own.repeated).collect())
}

const PIPELINE: [&str; 4] =
    ["parallel.pp=2", "train.microbatches=4", "train.batch_size=8", "optim.clip=1e6"];

#[test]
fn steps_that_go_ahead_have_the_bits_of_those_that_wait() {
    let cases: [&[&str]; 10] = [
        &["parallel.schedule=zb-h2"],
        &["parallel.schedule=zb-v", "model.layers=4", "parallel.tp=2"],
        &["parallel.schedule=zb-h1", "parallel.dp=2", "parallel.zero=1"],
        &["parallel.schedule=1f1b", "parallel.dp=2", "parallel.zero=2"],
        &["parallel.schedule=zb-auto", "parallel.dp=2", "parallel.zero=3"],
        &["parallel.schedule=gpipe", "optim.kind=sgd", "optim.clip=none"],
        &["parallel.schedule=zb-h2", "optim.kind=lamb", "train.recompute=stage"],
        &["parallel.schedule=interleaved", "model.layers=4", "optim.kind=lion"],
        &["parallel.schedule=chimera"],
        &["parallel.schedule=zb-h2", "optim.kind=adafactor"],
    ];
    for case in cases {
        let (_, repeated) =
            same(&format!("{case:?}"), llama, &[&F32, &PIPELINE[..], case].concat());
        assert!(repeated.iter().all(|again| !again), "{case:?}");
    }
    same("tied", gpt, &[&F32, &PIPELINE[..], &["parallel.schedule=zb-h2"]].concat());
    // Stages that share a table and have other meshes.
    for zero in ["parallel.zero=0", "parallel.zero=2"] {
        let own = ["parallel.schedule=zb-h2", "parallel.holders=1-2", zero];
        same("tied, held apart", gpt, &[&F32, &PIPELINE[..], &own].concat());
    }
    let narrow = ["precision.compute=bf16", "precision.weights=bf16", "precision.grads=bf16"];
    for masters in ["whole", "split"] {
        let masters = format!("precision.masters={masters}");
        let own = ["parallel.schedule=zb-h2", &masters];
        same(&masters, llama, &[&narrow[..], &PIPELINE, &own].concat());
    }
}

/// A step after one that was clipped is done again, unless it waited for that one's norm; which it does after a clipped
/// one. So each series of clipped steps costs one step, and whatever is clipped, the bits are those of waiting.
#[test]
fn a_clipped_step_costs_one_more_and_changes_no_bit() {
    let sets = [&PIPELINE[..3], &["parallel.schedule=zb-h2"]].concat();
    let (norms, _) = same("never", llama, &[&sets[..], &["optim.clip=1e6"]].concat());
    let mut sorted = norms;
    sorted.sort_by(f64::total_cmp);
    for quantile in [0, STEPS / 4, STEPS / 2, 3 * STEPS / 4] {
        let clip = format!("optim.clip={}", sorted[quantile]);
        let (norms, repeated) = same(&clip, llama, &[&sets[..], &[&clip]].concat());
        let clipped = |step: usize| norms[step] + 1e-6 > sorted[quantile];
        let again = |step: usize| {
            // The first of a block finds everything committed; after a clipped step the next one waited.
            let alone = step.is_multiple_of(BLOCK);
            let waited = step >= 2 && clipped(step - 2);
            !alone && clipped(step - 1) && !waited
        };
        let expected: Vec<bool> = (0..norms.len()).map(again).collect();
        assert_eq!(repeated, expected, "{clip}: {norms:?}");
        assert!(quantile == 0 || repeated.contains(&true), "{clip}");
    }
}

/// What it cannot mean is refused, with what would work.
#[test]
fn what_has_no_certain_end_of_a_step_is_refused() {
    let pipeline = ["parallel.pp=2", "train.microbatches=4", ON];
    for (more, why, remedy) in [
        (&["parallel.pp=1"][..], "one stage waits for no other", "parallel.pp = 2 or more"),
        (&["parallel.schedule=pipedream-2bw"], "older weights", "parallel.schedule = \"zb-h2\""),
        (&["precision.compute=f16"], "overflowed", "precision.compute = \"bf16\""),
        (
            &["parallel.dp=2", "parallel.sync=dataparallel"],
            "do not all update",
            "parallel.sync = \"ddp\"",
        ),
    ] {
        let said = try_llama(&[&pipeline[..], more].concat()).unwrap_err().to_string();
        assert!(said.contains(why) && said.contains(remedy), "{more:?}: {said}");
    }
}

/// The scripts of a step that goes ahead, of all classes of ranks.
fn scripts(loaded: &Loaded, part: AheadPart) -> Vec<RankScript> {
    let laid = laid(loaded, None);
    Planner::new(&laid.lowered).unwrap().scripts_of(ScriptKey::Ahead(part)).unwrap()
}

/// Planted bug: the commit takes the coefficient of the preview, as if nothing were ever clipped.
#[test]
fn a_commit_with_the_previewed_coefficient_is_found() {
    let loaded = llama(&[&F32, &PIPELINE[..], &["parallel.schedule=zb-h2", ON]].concat());
    let key = |number, index| BufferKey::NumberOf { number, index };
    for part in [AheadPart::Middle, AheadPart::Last] {
        for own in scripts(&loaded, part) {
            let good = &own.planned.script;
            phalanx_script::check(good).unwrap();
            let mut planted = good.clone();
            let found = good.find(&key(Number::Clip, 1)).unwrap();
            let previewed = planted.buffer(Buffer {
                key: BufferKey::Own("previewed coefficient".into()),
                source: Source::State,
                ..good.buffers[found.0].clone()
            });
            let commit = planted.actions.iter_mut().find(|action| {
                matches!(&action.kind, Kind::Update { run, .. } if run.inputs.iter().any(|v| v.buffer == found))
            });
            let inputs = &mut commit.unwrap().run_mut().unwrap().inputs;
            inputs.iter_mut().find(|view| view.buffer == found).unwrap().buffer = previewed;
            let said = phalanx_script::check(&planted).unwrap_err().to_string();
            assert!(said.contains("does not follow from the sums of its step"), "{said}");
        }
    }
}

/// How long a step takes once several follow each other: the longest time of a stage group from its own start to its own end,
/// where a step that waits takes from the first start of any to the last end. Played as executors issue, with all parts of a
/// stage group taking 1: ZB-H2 has no bubble then, and its makespan is p − 1 longer.
#[test]
fn a_step_that_goes_ahead_takes_the_span() {
    for (pp, m) in [(2, 4), (2, 8), (3, 6)] {
        let [makespan, span] = taken("zb-h2", pp, m, &[]);
        assert!((makespan - (3 * m + pp - 1) as f64).abs() < 1e-9, "{pp}, {m}: {makespan}");
        assert!((span - (3 * m) as f64).abs() < 1e-9, "{pp}, {m}: {span}");
    }
    let twice = ["parallel.schedule_memory=2"];
    for (schedule, pp, m, more) in [
        ("zb-v", 2, 4, &[][..]),
        ("zb-v", 2, 8, &[]),
        ("zb-v", 3, 6, &[]),
        ("zb-auto", 2, 4, &twice),
        ("zb-auto", 2, 8, &twice),
        ("zb-auto", 4, 8, &twice),
    ] {
        let [makespan, span] = taken(schedule, pp, m, more);
        assert!(span < makespan - 0.2, "{schedule}, {pp}, {m}: {span} of {makespan}");
    }
}

/// The time of a step that waits, and of one that goes ahead. The simulator of schedules gives the same.
fn taken(schedule: &str, pp: usize, m: usize, more: &[&str]) -> [f64; 2] {
    let sets = [
        format!("parallel.schedule={schedule}"),
        format!("train.microbatches={m}"),
        format!("parallel.pp={pp}"),
        format!("train.batch_size={m}"),
    ];
    let sets = sets.iter().map(String::as_str).chain(more.iter().copied());
    let sets: Vec<&str> = sets.chain(["model.layers=6", "optim.clip=1e6", ON]).collect();
    let loaded = llama(&[&F32[..], &sets].concat());
    let laid = laid(&loaded, None);
    let timetable = Timetable::new(&laid.lowered).unwrap();
    let group = |stage: usize| {
        let held = HeldStage { stage, replica: 0 };
        timetable.schedule.placement().find(held).unwrap().0
    };
    let held = |stage: usize| -> f64 {
        let own = (0..timetable.stages.len()).filter(|&other| group(other) == group(stage));
        own.map(|other| timetable.stages[other].len() as f64).sum()
    };
    let times = (timetable.stages.iter().enumerate()).map(|(stage, own)| {
        let one = own.len() as f64 / held(stage);
        Times { f: one, b: one, w: one }
    });
    let costs = TurnCosts::uneven(times.collect(), 0.0).unwrap();
    let expected = simulate(&timetable.schedule, &costs).unwrap();
    let what = format!("{schedule}, {pp} stage groups, {m} micro-batches");

    let waiting = Planner::new(&laid.lowered).unwrap();
    let alone = ends(&waiting.scripts_of(ScriptKey::Train).unwrap(), vec![0.0; pp]);
    let makespan = alone.iter().copied().fold(0.0, f64::max);
    assert!((makespan - expected.makespan).abs() < 1e-9, "{what}: {makespan}");
    // Of the same plan: where a schedule is searched for measured times, another one has another order.
    let part = |part| waiting.scripts_of(ScriptKey::Ahead(part)).unwrap();
    let [first, middle, last] = AheadPart::ALL.map(part);
    let mut all = vec![ends(&first, vec![0.0; pp])];
    for number in 1..6 {
        let script = if number == 5 { &last } else { &middle };
        all.push(ends(script, all[number - 1].clone()));
    }
    let steady = all[4][0] - all[3][0];
    assert!((steady - expected.span).abs() < 1e-9, "{what}: {steady}, not {}", expected.span);
    [makespan, steady]
}

/// When each stage group ends a script, by when it begins.
fn ends(scripts: &[RankScript], begins: Vec<f64>) -> Vec<f64> {
    let classes: Vec<Class<'_>> = scripts.iter().map(RankScript::class).collect();
    let mut given = Durations::given(&classes, |_, _| 0.0);
    for (class, own) in classes.iter().zip(&mut given.actions) {
        let turns = &class.script.turns;
        let held: BTreeSet<usize> = turns.iter().map(|(_, turn)| turn.instance).collect();
        for (action, turn) in turns {
            let work = match turn.part {
                Part::F | Part::B | Part::W => 1.0,
                Part::BW => 2.0,
                other => panic!("{other} is not a part of this schedule"),
            };
            own[*action].work = work / held.len() as f64;
        }
    }
    given.begins = begins.clone();
    let played = play(&classes, &given, IssueRule::OneThread).unwrap();
    let end = |(begin, times): (f64, &Vec<phalanx_sim::ActionTimes>)| {
        times.iter().map(|times| times.ended).fold(begin, f64::max)
    };
    begins.into_iter().zip(&played.classes).map(end).collect()
}
