//! Steps that choose where tokens and experts meet: numbers are the same, and choices follow from what was logged.

use std::sync::Arc;

use phalanx_config::Loaded;
use phalanx_models::hf::WeightTensor;
use phalanx_script::{AnyLayout, ExpertPolicy, ExpertRecord, ReadLayout, ScriptKey, Tutel};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{Planner, Session};

use crate::support::{agrees, laid, llama, models, settings, try_llama};

const TUTEL: &str = "parallel.expert_policy=tutel";

fn choosing(sets: &[&str]) -> Loaded {
    let own = ["model.experts=4", "model.expert_ffn=6", "model.moe_every=2", "model.capacity=0"];
    llama(&[&own[..], &[TUTEL], sets].concat())
}

/// `verify` replaces the rule by one that takes any layout, so steps of both kinds follow each other.
#[test]
fn steps_of_any_layout_agree_with_one_rank() {
    for sets in [
        &["parallel.dp=2", "parallel.ep=2"][..],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=3", "train.recompute=full"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.tp=2", "parallel.sp=true"],
        &["parallel.dp=4", "parallel.ep=4", "parallel.expert_slack=1", "parallel.zero=1"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.pp=2", "train.microbatches=2"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_placement=round-robin"],
        &["parallel.dp=2", "parallel.ep=2", "parallel.cp=2", "model.group=4"],
    ] {
        let found = agrees(&format!("{sets:?}"), &choosing(sets), None);
        assert_eq!(found.routing_flips, Some(0), "{sets:?}");
    }
}

/// Trains with a rule: what each step has logged, and the parameters.
fn trained(
    loaded: &Loaded,
    policy: Arc<dyn ExpertPolicy>,
    steps: usize,
) -> (Vec<ExpertRecord>, Vec<f64>, Session) {
    let mut settings = settings(loaded, None);
    settings.parallel.experts.as_mut().unwrap().policy = policy;
    let network = Network::new(loaded).unwrap();
    let mut session = Session::new(&models(loaded), settings, &*network.start()).unwrap();
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let mut logged = Vec::new();
    for _ in 0..steps {
        let batch = loader.next_batch().unwrap();
        with_step_data(batch, |data| session.step(data, 0.01)).unwrap();
        logged.push(session.logged().unwrap().clone());
    }
    let params = session.params().unwrap();
    (logged, params.values().flat_map(WeightTensor::to_f64).collect(), session)
}

/// The same steps whatever the rule takes; and it takes both.
#[test]
fn the_numbers_do_not_depend_on_the_rule() {
    let loaded = choosing(&["parallel.dp=2", "parallel.ep=2"]);
    let layouts = |logged: &[ExpertRecord]| logged.iter().map(|own| own.layout).collect::<Vec<_>>();
    let always = |ffn| Arc::new(Tutel { ffn, ..rule() });
    let (own, before, _) = trained(&loaded, always(1 << 20), 6);
    assert_eq!(layouts(&own), [ReadLayout::Own; 6]);
    let (any, after, mut session) = trained(&loaded, Arc::new(AnyLayout { seed: 3 }), 6);
    let taken = layouts(&any);
    assert!(taken.contains(&ReadLayout::Own) && taken.contains(&ReadLayout::All), "{taken:?}");
    let chosen =
        |logged: &[ExpertRecord]| logged.iter().map(|own| own.chosen.clone()).collect::<Vec<_>>();
    assert_eq!(chosen(&any), chosen(&own));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-11 * b.abs().max(1.0);
    assert!(before.iter().zip(&after).all(near));
    // Each rank has moved what the scripts that it ran say; of rows, no more than there was room for.
    for rank in session.measure().unwrap() {
        assert!(rank.moved.keys().eq(rank.predicted.keys()));
        for (route, moved) in &rank.moved {
            let predicted = rank.predicted[route];
            assert_eq!(moved.calls, predicted.calls, "{route}");
            match route.op {
                "all_to_all" => assert!(moved.bytes <= predicted.bytes, "{route}"),
                _ => assert_eq!(moved.bytes, predicted.bytes, "{route}"),
            }
        }
    }
}

fn rule() -> Tutel {
    Tutel { ranks: 2, dealt: false, copies: 1, slices: 1, microbatches: 1, ffn: 6 }
}

/// A rule whose limit lies between the loads of some steps changes its mind where the step before has crossed it, and a
/// replay over the log takes the same choices.
#[test]
fn the_rule_changes_its_mind_with_the_load() {
    let loaded = choosing(&["parallel.dp=2", "parallel.ep=2"]);
    let (own, ..) = trained(&loaded, Arc::new(Tutel { ffn: 1 << 20, ..rule() }), 12);
    let rows: Vec<u64> = own.iter().map(|own| rule().moved(ReadLayout::Own, &own.chosen)).collect();
    let (least, most) = (*rows.iter().min().unwrap(), *rows.iter().max().unwrap());
    // Of many slices, so that limits lie close together.
    let of = |ffn| Tutel { ffn, slices: 9, ..rule() };
    let limit = |ffn| of(ffn).moved(ReadLayout::All, &own[0].chosen);
    let between = (1..1000).find(|&ffn| limit(ffn) >= least && limit(ffn) < most);
    let rule = of(between.expect("loads differ"));
    let (logged, ..) = trained(&loaded, Arc::new(rule), 12);
    let taken: Vec<ReadLayout> = logged.iter().map(|own| own.layout).collect();
    assert!(taken[1..].contains(&ReadLayout::Own) && taken.contains(&ReadLayout::All), "{taken:?}");
    let replayed: Vec<ReadLayout> = (0..12_usize)
        .map(|step| rule.next(step as u64 + 1, step.checked_sub(1).map(|last| &logged[last])))
        .collect();
    assert_eq!(taken, replayed);
}

/// Both scripts have the state at the same place: nothing is moved to change.
#[test]
fn both_scripts_keep_the_same_state() {
    let own = laid(&choosing(&["parallel.dp=4", "parallel.ep=2", "parallel.zero=2"]), None);
    let planner = Planner::new(&own.lowered).unwrap();
    let held = planner.state(0).unwrap();
    let state = |key| -> Vec<(String, usize)> {
        let scripts = planner.scripts_of(key).unwrap();
        let planned = &scripts[0].planned;
        let buffers =
            held.buffers.iter().flat_map(|unit| unit.all().map(|(_, held)| held.buffer.0));
        let at = |buffer: usize| {
            (format!("{:?}", planned.script.buffers[buffer].key), planned.memory.offsets[buffer])
        };
        buffers.map(at).collect()
    };
    let before = state(ScriptKey::Train);
    assert!(!before.is_empty());
    assert_eq!(before, state(ScriptKey::Gathered));
}

#[test]
fn a_rule_that_decides_nothing_is_refused() {
    let base = ["model.experts=4", "parallel.dp=2", TUTEL];
    for (sets, reason) in [
        (&["model.capacity=0"][..], "parallel.ep = 2"),
        (&["parallel.ep=2"], "model.capacity = 0"),
        (
            &["parallel.ep=2", "model.capacity=0", "parallel.expert_exchange=weights"],
            "leave parallel.expert_exchange out",
        ),
        (
            &["parallel.ep=2", "model.capacity=0", "parallel.layout=auto"],
            "parallel.layout = \"given\"",
        ),
        (
            &[
                "parallel.ep=2",
                "model.capacity=0",
                "parallel.pp=2",
                "parallel.schedule=pipedream",
                "optim.clip=none",
            ],
            "1f1b",
        ),
        (&["parallel.ep=2", "parallel.expert_policy=flexmoe"], "tutel"),
        (&["parallel.ep=2", "model.capacity=0", "parallel.cp=2"], "a model.group that divides"),
    ] {
        let text = match try_llama(&[&base[..], sets].concat()) {
            Ok(_) => panic!("{sets:?} was accepted"),
            Err(error) => error.to_string(),
        };
        assert!(text.contains(reason), "{sets:?}: {text}");
    }
}
