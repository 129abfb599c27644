//! Bounded room for the rows of experts: a step that lacks room changes nothing and is taken again, so it leaves the bits of
//! one that had room from the start.

use phalanx_config::Loaded;
use phalanx_ir::DType;
use phalanx_models::hf::WeightTensor;
use phalanx_script::{ScriptKey, traffic};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::network::Network;
use phalanx_session::{Models, Planner, Session, StepResult, StepRoom};

use crate::support::{agrees, laid, llama, models, settings, try_llama};

/// Four experts of which a token takes two, in the second of two layers, on two of the ranks; nobody is dropped.
fn dropless(sets: &[&str]) -> Loaded {
    let own = ["model.experts=4", "model.expert_ffn=6", "model.moe_every=2", "model.capacity=0"];
    llama(&[&own, sets].concat())
}

const EP2: [&str; 3] = ["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=all-to-all"];

fn started(loaded: &Loaded, models: &Models) -> Session {
    let network = Network::new(loaded).unwrap();
    Session::new(models, settings(loaded, None), &*network.start()).unwrap()
}

fn bits(session: &mut Session) -> Vec<u64> {
    let params = session.params().unwrap();
    params.values().flat_map(WeightTensor::to_f64).map(f64::to_bits).collect()
}

/// The results of some steps, and the parameters after them.
fn trained(loaded: &Loaded, steps: usize) -> (Vec<StepResult>, Vec<u64>) {
    let mut session = started(loaded, &models(loaded));
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let mut results = Vec::new();
    for _ in 0..steps {
        let batch = loader.next_batch().unwrap();
        results.push(with_step_data(batch, |data| session.step(data, 0.01)).unwrap());
    }
    (results, bits(&mut session))
}

/// A layout with room for the even share first and with room for all; both must leave the same bits. Gives the rooms.
fn same(sets: &[&str]) -> Vec<StepRoom> {
    let with = |slack: &str| trained(&dropless(&[sets, &[slack]].concat()), 3);
    let (roomy, before) = with("parallel.expert_slack=0");
    let (bounded, after) = with("parallel.expert_slack=1");
    assert!(roomy.iter().all(|own| own.room == StepRoom::default()), "{sets:?}");
    let numbers = |results: &[StepResult]| -> Vec<_> {
        let one = |own: &StepResult| {
            (own.loss.to_bits(), own.grad_norm.to_bits(), own.scaling.map(|own| own.loss_scale))
        };
        results.iter().map(one).collect()
    };
    assert_eq!(numbers(&bounded), numbers(&roomy), "{sets:?}");
    assert!(before == after, "{sets:?}: parameters differ");
    bounded.iter().map(|own| own.room).collect()
}

#[test]
fn steps_that_lack_room_leave_the_bits_of_those_that_do_not() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    let ep4 = ["parallel.dp=4", "parallel.ep=4", "parallel.expert_exchange=all-to-all"];
    let vectorised = ["parallel.pp=2", "parallel.schedule=vectorised", "train.microbatches=2"];
    let dense = [&vectorised[..], &["model.layers=4", "model.moe_every=2"]].concat();
    let cases: [(&[&str], &[&str]); 11] = [
        (&EP2, &dense),
        (&EP2, &["parallel.tp=2", "train.recompute=full"]),
        (&EP2, &["parallel.pp=2", "train.microbatches=2", "parallel.schedule=zb-h1"]),
        (&["parallel.dp=4"], &["parallel.ep=2", "parallel.zero=3", EP2[2], "optim.kind=lamb"]),
        (&ep4, &["parallel.zero=1", "optim.kind=adafactor", "model.router=gshard"]),
        (&ep4, &["parallel.zero=2", "optim.kind=sgd", "optim.momentum=0.9"]),
        (&ep4[..2], &["parallel.expert_exchange=all-gather", "optim.kind=lion"]),
        (&ep4[..2], &["parallel.expert_exchange=hierarchical", "parallel.fsdp=true"]),
        (&EP2, &["parallel.sync=dataparallel", "train.microbatches=2"]),
        (&EP2, &["parallel.cp=2", "model.group=4"]),
        (&EP2, &["optim.clip=none", "parallel.comm_priority=lina"]),
    ];
    for (ranks, sets) in cases {
        let rooms = same(&[&f32[..], ranks, sets].concat());
        // Routers of random weights are never quite even.
        assert!(rooms.iter().any(|own| own.repeats > 0 && own.lacking > 0), "{sets:?}: {rooms:?}");
    }
}

/// Places of experts that are as many as a step needs (Tutel's dynamic capacity) leave the bits of a place for every token,
/// on one rank as on many, however experts and tokens meet.
#[test]
fn places_that_fit_leave_the_bits_of_a_place_for_every_token() {
    let ep4 = ["parallel.dp=4", "parallel.ep=4"];
    let cases: [(&[&str], &[&str]); 6] = [
        (&[], &["model.router=gshard", "model.group=4"]),
        (&EP2[..2], &["parallel.expert_exchange=weights", "parallel.zero=1"]),
        (&EP2[..2], &["parallel.expert_exchange=all-gather", "parallel.tp=2", "parallel.sp=true"]),
        (&ep4, &["parallel.expert_exchange=hierarchical", "parallel.zero=3"]),
        (&EP2, &["parallel.pp=2", "train.microbatches=2", "train.recompute=full"]),
        (&["parallel.cp=2"], &["model.group=4", "model.router=switch"]),
    ];
    for (ranks, sets) in cases {
        let rooms = same(&[&["model.capacity=auto"][..], ranks, sets].concat());
        assert!(rooms.iter().any(|own| own.repeats > 0 && own.lacking > 0), "{sets:?}: {rooms:?}");
    }
}

/// Nobody is dropped, so the numbers are those of packed rows, up to the order of sums; and those of one rank.
#[test]
fn places_that_fit_agree_with_packed_rows_and_with_one_rank() {
    let with = |capacity: &str| trained(&dropless(&[&EP2[..], &[capacity]].concat()), 3).0;
    for (fitted, packed) in with("model.capacity=auto").iter().zip(&with("model.capacity=0")) {
        for (a, b) in [(fitted.loss, packed.loss), (fitted.grad_norm, packed.grad_norm)] {
            assert!((a - b).abs() <= 1e-12 * b.abs(), "{a} {b}");
        }
    }
    let one = ["model.capacity=auto", "parallel.expert_slack=1"];
    for sets in [
        &["parallel.dp=2", "train.microbatches=2"][..],
        &["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=weights"],
        &["parallel.dp=4", "parallel.ep=2", "parallel.zero=3", "model.router=noisy"],
        &["parallel.tp=2", "parallel.sp=true", "model.jitter=0.1"],
    ] {
        let sets = [&one, sets].concat();
        let found = agrees(&format!("{sets:?}"), &dropless(&sets), None);
        assert_eq!(found.routing_flips, Some(0), "{sets:?}");
    }
}

/// What else changes in a step that changes nothing, the scale of the loss, stays too: an overflow halves it, want of room
/// does not.
#[test]
fn want_of_room_is_no_overflow() {
    let sets =
        ["precision.compute=f16", "precision.weights=f16", "precision.initial_scale_power=24"];
    let more = ["precision.hysteresis=1", "precision.loss_scale_window=2"];
    let rooms = same(&[&EP2[..], &sets, &more].concat());
    assert!(rooms.iter().any(|own| own.repeats > 0), "{rooms:?}");
}

/// The numbers of one rank, which has room for all; bytes and memory are those of the bounds that steps had.
#[test]
fn bounded_rooms_agree_with_one_rank() {
    let ep4 = ["parallel.dp=4", "parallel.ep=4", "parallel.expert_exchange=all-to-all"];
    for (ranks, sets) in [
        (&EP2[..], &["parallel.expert_slack=1"][..]),
        (&EP2, &["parallel.expert_slack=1.25", "parallel.tp=2", "parallel.sp=true"]),
        (&ep4, &["parallel.expert_slack=1", "parallel.zero=3", "train.recompute=full"]),
        (
            &EP2,
            &[
                "parallel.expert_slack=1",
                "parallel.pp=2",
                "parallel.schedule=1f1b",
                "train.microbatches=4",
            ],
        ),
    ] {
        let sets = [ranks, sets].concat();
        let found = agrees(&format!("{sets:?}"), &dropless(&sets), None);
        assert_eq!(found.routing_flips, Some(0), "{sets:?}");
    }
}

/// Of eight experts on four ranks, a token takes one. The router's columns are v, −v and zeros, so every token takes one of the
/// first two, whatever it is: all rows go to the first rank.
fn skewed(sets: &[&str], roomier: bool) -> (Session, Loaded) {
    let ranks = ["parallel.dp=4", "parallel.ep=4", "parallel.expert_exchange=all-to-all"];
    let own = ["model.experts=8", "model.router=switch"];
    let loaded = dropless(&[&ranks, &own[..], sets].concat());
    let mut models = models(&loaded);
    if !roomier {
        models.roomier.clear();
    }
    let mut session = started(&loaded, &models);
    let names = session.parameters().iter().map(|param| param.name.clone());
    let router = names.enumerate().find(|(_, name)| name.ends_with("experts.router")).unwrap().0;
    let (width, experts) = (16, 8);
    let mut values = vec![0.0; width * experts];
    for row in 0..width {
        let v = 1.0 + row as f64;
        (values[row * experts], values[row * experts + 1]) = (v, -v);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|x: &f64| x.to_ne_bytes()).collect();
    let values = WeightTensor::from_bytes(vec![width, experts], DType::F64, &bytes);
    session.set_param(router, &values).unwrap();
    (session, loaded)
}

fn one_step(session: &mut Session, loaded: &Loaded) -> phalanx_error::Result<StepResult> {
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    let batch = loader.next_batch().unwrap();
    with_step_data(batch, |data| session.step(data, 0.01))
}

/// A step climbs all bounds: a rank has 16 rows, an even share for each other rank is 4 of them, and there is room for 5, 10
/// and at last 16. So the first time, 11 rows of each of 4 ranks find no room.
#[test]
fn the_worst_choices_find_room_in_the_end() {
    let (mut session, loaded) = skewed(&[], true);
    let rooms = session.rooms().unwrap().clone();
    let slacks: Vec<f64> = (0..rooms.bounds.len()).map(|bound| rooms.slack(bound)).collect();
    assert_eq!((rooms.even, slacks), (4 * 4, vec![1.25, 2.5, 4.0]));
    assert!(rooms.bounds.windows(2).all(|both| both[0].arena < both[1].arena), "{rooms:?}");
    let found = one_step(&mut session, &loaded).unwrap();
    assert_eq!(found.room, StepRoom { bound: 2, repeats: 2, lacking: 4 * 11 });
    let (mut roomy, loaded) = skewed(&["parallel.expert_slack=0"], true);
    let expected = one_step(&mut roomy, &loaded).unwrap();
    assert_eq!((found.loss, found.grad_norm), (expected.loss, expected.grad_norm));
    assert!(bits(&mut session) == bits(&mut roomy));
}

/// Without a larger bound the step fails, and has changed nothing.
#[test]
fn a_step_without_room_changes_nothing() {
    let (mut session, loaded) = skewed(&[], false);
    let before = bits(&mut session);
    let error = one_step(&mut session, &loaded).unwrap_err().to_string();
    assert!(error.contains("step 1: 44 rows of experts found no room"), "{error}");
    assert!(bits(&mut session) == before);
}

/// The bound is what ranks keep, and exchange at most: of 32 tokens with two choices each, 40 rows for a rank instead of 64.
#[test]
fn bytes_and_memory_follow_the_bound() {
    let of = |slack: &str| {
        let own = laid(&dropless(&[&EP2[..], &[slack, "model.moe_every=1"]].concat()), None);
        let planner = Planner::new(&own.lowered).unwrap();
        let exchanged = |key| -> Option<u64> {
            let scripts = planner.scripts_of(key).unwrap();
            let moved = traffic(&scripts.first()?.planned.script);
            let exchanges = moved.iter().filter(|(route, _)| route.op == "all_to_all");
            Some(exchanges.map(|(_, moved)| moved.bytes).sum())
        };
        let keys = [ScriptKey::Train, ScriptKey::Roomier(1)];
        let bounds: Vec<u64> = keys.into_iter().filter_map(exchanged).collect();
        (bounds, own.memory.arena)
    };
    let ((bounded, small), (worst, large)) =
        (of("parallel.expert_slack=1.25"), of("parallel.expert_slack=0"));
    // At most, in f64; counts of two experts for each part are exchanged too, 4 bytes each, once in a layer.
    let bytes = |room: u64| 2 * (4 * (2 * room * 16 * 8) + 2 * 2 * 4) / 2;
    assert_eq!((bounded, worst), (vec![bytes(40), bytes(64)], vec![bytes(64)]));
    assert!(small < large, "{small} {large}");
}

/// Places of experts are told beside an even share, too: two choices for each token that a rank has.
#[test]
fn places_are_told_beside_the_even_share() {
    for (ranks, sets) in [(1, &[][..]), (2, &EP2[..]), (2, &["parallel.dp=2"])] {
        let loaded = dropless(&[&["model.capacity=auto"], sets].concat());
        let own = laid(&loaded, None);
        let rooms = Planner::new(&own.lowered).unwrap().rooms().unwrap().unwrap();
        let train = &loaded.config.train;
        let tokens = train.batch_size.get() * train.seq_len.get() / ranks;
        assert_eq!((rooms.even, rooms.bounds.len()), (2 * tokens, 2), "{sets:?}");
        assert_eq!([0, 1].map(|bound| rooms.slack(bound)), [1.25, 2.0], "{sets:?}");
    }
}

#[test]
fn what_room_cannot_mean_is_refused() {
    let own = ["model.experts=4", "model.capacity=0"];
    for (sets, why) in [
        (
            &["parallel.dp=2", "parallel.ep=2", "parallel.expert_slack=0.5"][..],
            "less than the even share",
        ),
        (&["parallel.expert_slack=2"], "no effect with parallel.ep = 1"),
        (
            &["parallel.dp=2", "parallel.ep=2", "model.capacity=1", "parallel.expert_slack=2"],
            "no effect with a model.capacity",
        ),
        (
            &[
                "parallel.dp=2",
                "parallel.ep=2",
                "parallel.pp=2",
                "train.microbatches=2",
                "parallel.schedule=pipedream-2bw",
                "parallel.expert_slack=2",
            ],
            "needs updates that wait",
        ),
        (
            &[
                "model.capacity=auto",
                "parallel.pp=2",
                "train.microbatches=2",
                "parallel.schedule=pipedream-2bw",
            ],
            "model.capacity = \"auto\" needs updates that wait",
        ),
        (&["model.capacity=auto", "model.expert_dropout=0.1"], "places change from step to step"),
    ] {
        let error = try_llama(&[&own, sets].concat()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Schedules that park micro-batches, hold several chunks, or train in both directions.
#[test]
fn rooms_fit_into_other_schedules() {
    let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
    for sets in [
        &[
            "parallel.pp=4",
            "parallel.schedule=bpipe",
            "train.microbatches=8",
            "train.batch_size=16",
        ][..],
        &["parallel.pp=2", "parallel.schedule=interleaved", "train.microbatches=2"],
        &["parallel.pp=2", "parallel.schedule=chimera", "train.microbatches=2"],
    ] {
        let rooms = same(&[&f32[..], &EP2, &["model.layers=4"], sets].concat());
        assert!(rooms.iter().any(|own| own.repeats > 0), "{sets:?}: {rooms:?}");
    }
}
