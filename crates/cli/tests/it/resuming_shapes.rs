//! Checkpoints of squares, cubes and rings of ranks, of replicas and of optimizers with sums over rows.

use crate::resuming::{go_on, goes_on_with_the_same_bits, run, steps};

const LAYOUTS: [&[&str]; 10] = [
    // Replicas that differ in their weights, and in their momenta after every mean too.
    &["parallel.dp=2", "parallel.sync=average", "parallel.sync_every=2"],
    &[
        "parallel.dp=2",
        "parallel.sync=local-sgd",
        "parallel.sync_every=2",
        "parallel.sync_momentum=keep",
        "parallel.pp=2",
    ],
    // Blocks of operands.
    &["parallel.tp=4", "parallel.tp_kind=2d", "parallel.stream=true", "model.kv_heads=2"],
    &[
        "parallel.tp=8",
        "parallel.tp_kind=2.5d",
        "parallel.tp_depth=2",
        "parallel.stream=true",
        "model.kv_heads=2",
    ],
    &["parallel.tp=8", "parallel.tp_kind=3d", "parallel.stream=true", "model.kv_heads=2"],
    &["parallel.tp=4", "parallel.tp_kind=gspmd", "parallel.stream=true", "model.kv_heads=2"],
    // Rings.
    &["parallel.cp=2", "parallel.cp_kind=ring", "parallel.dp=2", "parallel.zero=3"],
    &["parallel.cp=2", "parallel.cp_kind=rsa"],
    // Sums over the rows and columns of matrices.
    &[
        "optim.kind=adafactor",
        "parallel.tp=2",
        "parallel.dp=2",
        "parallel.zero=2",
        "model.kv_heads=2",
    ],
    &["optim.kind=lion", "parallel.dp=2", "parallel.zero=3"],
];

#[test]
fn shapes_of_ranks_go_on_with_the_same_bits() {
    LAYOUTS.into_iter().for_each(goes_on_with_the_same_bits);
}

/// Steps are taken again, because rows of experts find no room; what is saved beside such steps is saved before them.
#[test]
fn steps_that_lacked_room_go_on_with_the_same_bits() {
    let ranks = ["parallel.dp=2", "parallel.ep=2", "parallel.expert_exchange=all-to-all"];
    let experts = ["model.experts=4", "model.capacity=0", "parallel.expert_slack=1"];
    let sets = [&ranks[..], &experts].concat();
    goes_on_with_the_same_bits(&sets);
    let dir = tempfile::tempdir().unwrap();
    let lines = run(dir.path(), "again", 2, &sets).json();
    let lacked = lines.iter().find(|line| line["event"] == "lacked_room").unwrap();
    assert!(lacked["lacking"].as_u64() > Some(0) && lacked["repeats"] == 1, "{lacked}");
    assert_eq!(lacked["room"], 2.0);
}

/// Experts come to the tokens from the second step on, as the step before has logged; so a run that goes on needs the log.
#[test]
fn choices_of_experts_go_on_with_the_same_bits() {
    let ranks = ["parallel.dp=2", "parallel.ep=2", "parallel.expert_policy=tutel"];
    let experts = ["model.experts=4", "model.expert_ffn=4", "model.capacity=0"];
    let sets = [&ranks[..], &experts].concat();
    goes_on_with_the_same_bits(&sets);
    let dir = tempfile::tempdir().unwrap();
    let lines = run(dir.path(), "choosing", 3, &sets).json();
    let steps = lines.iter().filter(|line| line["step"].is_number());
    let gathered: Vec<bool> = steps.map(|line| line["moe"]["gathered"] == true).collect();
    assert_eq!(gathered, [false, true, true]);
}

/// What they save any other layout reads: each goes on as the next one, in f64, beside a run that was never stopped.
#[test]
fn shapes_of_ranks_go_on_as_each_other() {
    const LAYOUTS: [&str; 9] = [
        "",
        "parallel.tp=4 parallel.tp_kind=2d parallel.stream=true",
        "parallel.cp=2 parallel.cp_kind=ring parallel.cp_order=striped",
        "parallel.tp=8 parallel.tp_kind=3d",
        "parallel.dp=2 parallel.sync=dataparallel",
        "parallel.tp=8 parallel.tp_kind=2.5d parallel.tp_depth=2",
        "parallel.cp=2 parallel.cp_kind=ring parallel.cp_order=zigzag parallel.dp=2 parallel.zero=3",
        "parallel.tp=4 parallel.tp_kind=gspmd parallel.tp_rows=2 parallel.stream=true",
        "parallel.tp=2 parallel.sp=true parallel.stream=true",
    ];
    const NONE: &str = "parallel.dp=1 parallel.tp=1 parallel.cp=1 parallel.zero=0 parallel.sp=false \
        parallel.tp_kind=1d parallel.tp_depth=1 parallel.tp_rows=1 parallel.stream=false \
        parallel.cp_kind=ulysses parallel.cp_order=block parallel.sync=ddp";
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = ["precision.compute=f64", "model.kv_heads=2", "run.checkpoint_every=3"];
    let whole = steps(&run(dir, "whole", 6, &base[..2]));
    for (number, from) in LAYOUTS.iter().enumerate() {
        let into = LAYOUTS[(number + 1) % LAYOUTS.len()];
        let name = format!("run{number}");
        let sets = base.into_iter().chain(from.split_whitespace());
        run(dir, &name, 3, &sets.collect::<Vec<_>>());
        // Of a setting that is given twice, the last one holds.
        let sets = NONE.split_whitespace().chain(into.split_whitespace());
        let sets: Vec<&str> = sets.chain(["train.steps=6", "run.name=other"]).collect();
        let rest = steps(&go_on(dir, &format!("runs/{name}"), &sets).ok());
        assert_eq!(rest.len(), 3);
        for (step, (loss, norm)) in rest {
            let (a, b) = whole[&step];
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-10 * a.abs();
            assert!(near(a, loss) && near(b, norm), "{from} to {into}: {step} {a} {loss}");
        }
    }
}

/// Replicas that train by themselves go on as so many replicas, or not at all; one state may become that of all.
#[test]
fn replicas_go_on_as_replicas() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for sync in ["local-sgd", "average"] {
        let kind = format!("parallel.sync={sync}");
        let sets = ["parallel.dp=2", &kind, "parallel.sync_every=2", "run.checkpoint_every=3"];
        run(dir, sync, 3, &sets);
        let from = format!("runs/{sync}");
        let more = ["train.steps=5", "run.name=other"];
        let words = ["holds 2 replicas", "--set parallel.dp=2", "usual fix"];
        let four = [&["parallel.dp=4"][..], &more].concat();
        go_on(dir, &from, &four).refused(&[&words[..], &["this run has 4"]].concat());
        for dp in ["parallel.dp=1", "parallel.dp=2"] {
            let one = [&[dp, "parallel.sync=ddp", "parallel.sync_every=1"][..], &more].concat();
            go_on(dir, &from, &one).refused(&[&words[..], &["this run has none"]].concat());
        }
        go_on(dir, &from, &more).ok();
    }
    run(dir, "together", 3, &["parallel.dp=2", "run.checkpoint_every=3"]);
    let apart = ["parallel.sync=local-sgd", "parallel.dp=4", "train.steps=5", "run.name=apart"];
    assert_eq!(steps(&go_on(dir, "runs/together", &apart).ok()).len(), 2);
}
