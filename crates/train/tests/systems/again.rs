//! Stages that keep their input alone and run their forward again: the same training, in less memory.

use phalanx_config::{Config, Sources};
use phalanx_ir::{Port, Program, Role};
use phalanx_pipeline::{NamedSchedule, ScheduleShape, Times, TurnCosts, simulate};
use phalanx_script::{Category, Part, plan};
use phalanx_session::{Lowered, Settings};

use crate::bits::{params, trained};
use crate::support::{agrees, gpt, llama, models, settings};

/// Eight layers on two devices, so that every stage of every schedule has at least two.
const SETS: [&str; 5] = [
    "model.layers=8",
    "parallel.pp=2",
    "train.microbatches=4",
    "parallel.split=count",
    "train.recompute=stage",
];

#[test]
fn stages_that_run_again_do_what_one_rank_does() {
    let inside: [&[&str]; 6] = [
        &[],
        &["parallel.tp=2"],
        &["parallel.tp=2", "parallel.sp=true"],
        &["parallel.cp=2"],
        &["parallel.dp=2", "parallel.zero=2"],
        &["parallel.dp=2", "parallel.zero=3"],
    ];
    let all = NamedSchedule::ALL.into_iter().filter(|named| *named != NamedSchedule::Naive);
    for (index, named) in all.enumerate() {
        let schedule = format!("parallel.schedule={named}");
        // Each schedule on some of the meshes, each mesh under some of the schedules.
        for inside in inside.iter().skip(index % 2).step_by(2) {
            let sets = [&SETS[..], &[&schedule], inside].concat();
            agrees(&format!("{named}, {inside:?}"), &llama(&sets), None);
        }
        // Stages that update at different times share no weights.
        let tied = if named == NamedSchedule::PipeDream { "false" } else { "true" };
        let tied = format!("model.tied={tied}");
        let sets = [&SETS[..], &[&schedule, &tied]].concat();
        agrees(&format!("{named}, {tied}"), &gpt(&sets), None);
    }
}

/// What is computed twice has the same bits both times. (With ZeRO-3 a head goes forward and back in two
/// runs, whatever is kept; where it can do both in one, that one rounds in its own way.)
#[test]
fn the_bits_are_those_of_keeping_everything() {
    for named in [
        NamedSchedule::GPipe,
        NamedSchedule::OneFOneB,
        NamedSchedule::ZbV,
        NamedSchedule::VMin,
        NamedSchedule::BreadthFirst,
    ] {
        let schedule = format!("parallel.schedule={named}");
        let run = |recompute: &str| {
            let more = ["parallel.dp=2", "parallel.zero=3", "precision.compute=f32", recompute];
            let sets = [&SETS[..4], &[&schedule], &more].concat();
            params(&llama(&sets), None, 3)
        };
        assert!(run("train.recompute=stage") == run("train.recompute=none"), "{named}");
    }
}

/// A device keeps as many inputs as the simulator counts micro-batches in flight, and the rest of one
/// micro-batch: m inputs and a share in GPipe. That is what is planned and what is written.
#[test]
fn inputs_of_those_in_flight_and_the_rest_of_one() {
    let (stage_groups, microbatches) = (4, 8);
    for named in [NamedSchedule::GPipe, NamedSchedule::OneFOneB] {
        let schedule = format!("parallel.schedule={named}");
        let loaded = llama(&[
            "model.layers=8",
            "parallel.pp=4",
            "train.microbatches=8",
            "parallel.split=count",
            "train.recompute=stage",
            &schedule,
        ]);
        let lowered = Lowered::new(&models(&loaded), settings(&loaded, None)).unwrap();
        let layer = models(&loaded).train.instances()[1].segment;
        let program = |part| lowered.compiled().program(layer, part);
        let bytes = |p: &Program, port: &Port| p.ty(port.value).local_bytes(p.mesh());
        let f = program(Part::F);
        let input: usize = f.inputs_with(Role::Boundary).map(|p| bytes(f, p)).sum();
        let residuals: usize = f.outputs_with(Role::Residual).map(|p| bytes(f, p)).sum();
        let rest = 2 * residuals + input;
        let timeline = named.build(ScheduleShape::new(stage_groups, microbatches)).unwrap();
        let times = Times { f: 1.0, b: 1.0, w: 1.0 };
        let counted = simulate(&timeline, &TurnCosts::even(times, 0.0).unwrap()).unwrap();
        let written = trained(&loaded, None, 1).observe().unwrap();
        for (stage_group, observed) in written.iter().enumerate().take(stage_groups - 1).skip(1) {
            let script = lowered.plan(stage_group).unwrap().script;
            let peak = plan(&script).unwrap().peak(Category::Residuals);
            let in_flight = counted.peak_in_flight[stage_group];
            let of = |(category, _): &&(Category, usize)| *category == Category::Residuals;
            let found = observed.peaks.iter().find(of).unwrap().1;
            assert_eq!(found, peak, "{named}, {stage_group}");
            assert_eq!(peak, in_flight * input + rest, "{named}, device {stage_group}");
        }
    }
}

/// Nothing waits in a layer-wise model, nor with a single micro-batch, nor on one device that goes there
/// and back. What is proposed instead has an effect.
#[test]
fn what_has_no_effect_is_refused() {
    let load = |sets: &[&str]| {
        let preset = Sources::default().preset("tiny").set("train.recompute=stage");
        Config::load(&sets.iter().fold(preset, |s, set| s.set(*set)))
    };
    for (sets, better) in [
        (
            ["parallel.pp=2", "parallel.schedule=naive", "train.microbatches=4"],
            "parallel.schedule=1f1b",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=zb-h1", "train.microbatches=1"],
            "train.microbatches=2",
        ),
        (["parallel.pp=1", "parallel.schedule=1f1b", "train.microbatches=4"], "parallel.pp=2"),
        (
            ["parallel.pp=1", "parallel.schedule=gpipe", "train.microbatches=1"],
            "train.microbatches=2",
        ),
    ] {
        let told = load(&sets).unwrap_err().to_string();
        assert!(told.contains("train.recompute = \"stage\" has no effect with"), "{told}");
        assert!(told.contains("so at most one micro-batch is kept"), "{told}");
        let (key, value) = better.split_once('=').unwrap();
        let value =
            if key.ends_with("schedule") { format!("\"{value}\"") } else { value.to_owned() };
        assert!(told.contains(&format!("{key} = {value}")), "{better} is not in: {told}");
        load(&[&sets[..], &[better]].concat()).unwrap();
    }
}

/// What is known of a table when it is read is held against the rest as it is for a name.
#[test]
fn tables_keep_the_rules_of_named_schedules() {
    let dir = tempfile::tempdir().unwrap();
    for (named, sets, words) in [
        (
            NamedSchedule::Naive,
            ["train.recompute=stage", "model.layers=4"],
            "\"stage\" has no effect",
        ),
        (
            NamedSchedule::Interleaved,
            ["train.recompute=none", "model.layers=3"],
            "3 layers can't be cut into 2·2",
        ),
    ] {
        let table = dir.path().join(format!("{named}.csv"));
        let schedule = named.build(ScheduleShape::new(2, 4)).unwrap();
        std::fs::write(&table, phalanx_pipeline::csv::write(&schedule)).unwrap();
        let file = format!("parallel.schedule=csv:{}", table.display());
        let all = ["parallel.pp=2", "train.microbatches=4", &file];
        let loaded = llama(&[&all[..], &sets].concat());
        let told = Settings::new(&loaded.config).unwrap_err().to_string();
        assert!(told.contains(words), "{told}");
    }
}
