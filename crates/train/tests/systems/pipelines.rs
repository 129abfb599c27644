//! Pipelines beside one rank: every schedule, with every other way of dividing the work.
//!
//! `PHALANX_PIPELINES=all` runs the whole grid. Otherwise a sample of it is run, whose seed is the
//! variable's number or 0, and in which every schedule and every value of every other factor occurs.

use std::collections::BTreeSet;

use phalanx_config::Loaded;
use phalanx_inspect::verify::Verified;
use phalanx_ir::random::Stream;
use phalanx_pipeline::NamedSchedule;
use phalanx_script::Part;

use crate::bits::params;
use crate::support::{agrees, gpt, laid, llama};

/// What ranks of a stage do with its weights and its sequences.
const LAYOUTS: [(&str, &[&str]); 8] = [
    ("alone", &[]),
    ("dp", &["parallel.dp=2"]),
    ("tp", &["parallel.tp=2"]),
    ("sp", &["parallel.tp=2", "parallel.sp=true"]),
    ("cp", &["parallel.cp=2"]),
    ("zero 1", &["parallel.dp=2", "parallel.zero=1"]),
    ("zero 2", &["parallel.dp=2", "parallel.zero=2"]),
    ("zero 3", &["parallel.dp=2", "parallel.zero=3"]),
];

/// There is nothing to make again selectively where nothing quadratic is kept.
const RECOMPUTE: [(&str, &[&str]); 4] = [
    ("none", &["train.recompute=none"]),
    ("selective", &["train.recompute=selective", "model.attention=materialised"]),
    ("full", &["train.recompute=full"]),
    ("stage", &["train.recompute=stage"]),
];

/// Stages, micro-batches, chunks (0: the usual number), and whether stages are the fastest axis.
type Shape = (usize, usize, usize, bool);

/// Shapes that a schedule takes: few and many micro-batches, and numbers that stages don't divide.
fn shapes(schedule: NamedSchedule) -> &'static [Shape] {
    match schedule {
        NamedSchedule::Interleaved => &[
            (2, 4, 0, false),
            (3, 3, 0, false),
            (2, 4, 3, true),
            (4, 4, 0, false),
            (2, 2, 1, false),
        ],
        NamedSchedule::BreadthFirst => &[
            (2, 4, 0, false),
            (3, 4, 0, true),
            (2, 1, 3, false),
            (4, 2, 0, false),
            (2, 3, 1, false),
        ],
        // Around several times only with as many micro-batches as stages.
        NamedSchedule::Vectorised => &[
            (2, 4, 0, false),
            (3, 5, 2, true),
            (2, 1, 0, false),
            (4, 6, 0, false),
            (2, 2, 3, false),
        ],
        NamedSchedule::Chimera | NamedSchedule::DualPipe => &[
            (2, 4, 0, false),
            (4, 4, 0, true),
            (2, 2, 0, false),
            (4, 6, 0, false),
            (4, 2, 0, false),
        ],
        // From four stages on there is something to move.
        NamedSchedule::BPipe => &[
            (4, 6, 0, false),
            (5, 6, 0, true),
            (4, 4, 0, false),
            (4, 8, 0, false),
            (3, 4, 0, false),
        ],
        // As many micro-batches as stages.
        NamedSchedule::PipeDream2bw => &[
            (2, 4, 0, false),
            (3, 5, 0, true),
            (2, 2, 0, false),
            (4, 6, 0, false),
            (3, 3, 0, false),
        ],
        _ => &[
            (2, 4, 0, false),
            (3, 5, 0, true),
            (2, 1, 0, false),
            (4, 6, 0, false),
            (3, 2, 0, false),
        ],
    }
}

/// Whether stages may share weights: not if each updates them at its own time.
fn can_tie(schedule: NamedSchedule) -> bool {
    schedule != NamedSchedule::PipeDream
}

/// A point of the grid, as the numbers of its factors' values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    schedule: NamedSchedule,
    layout: usize,
    tied: bool,
    recompute: usize,
    shape: usize,
}

/// Every schedule with every layout, tied and untied, with every kind of recomputation; shapes take
/// turns, so that each occurs with each layout. Where a shape leaves a kind without effect (one
/// micro-batch has no forward to run again), the next shape that has one is taken. The naive schedule
/// has none with any shape, as each backward follows its forward at once: so it is never run again.
fn grid() -> Vec<Case> {
    let mut cases = Vec::new();
    for schedule in NamedSchedule::ALL {
        for layout in 0..LAYOUTS.len() {
            for tied in [false, true].into_iter().filter(|tied| !tied || can_tie(schedule)) {
                for recompute in 0..RECOMPUTE.len() {
                    let (count, first) = (shapes(schedule).len(), cases.len());
                    let turns = (first..first + count).map(|turn| turn % count);
                    let of = |shape| Case { schedule, layout, tied, recompute, shape };
                    cases.extend(turns.map(of).find(Case::has_effect));
                }
            }
        }
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let Case { schedule, layout, tied, recompute, shape } = *self;
        let (pp, m, chunks, fastest) = shapes(schedule)[shape];
        format!(
            "{schedule}, pp {pp}, m {m}, chunks {chunks}, {}, {}, {}, recompute {}, stages {}",
            if self.late() { "warm-up pb" } else { "warm-up pa" },
            LAYOUTS[layout].0,
            if tied { "tied" } else { "untied" },
            RECOMPUTE[recompute].0,
            if fastest { "fastest" } else { "slowest" },
        )
    }

    /// Stages run again only where something comes between their forward and their backward.
    fn has_effect(&self) -> bool {
        let (pp, m, chunks, _) = shapes(self.schedule)[self.shape];
        let held = if chunks == 0 { self.schedule.usual_chunks() } else { chunks };
        let shape = phalanx_pipeline::ScheduleShape::new(pp, m).chunks(held);
        RECOMPUTE[self.recompute].0 != "stage"
            || self.schedule.build(shape).unwrap().rematerialises()
    }

    /// Whether it has the longer warm-up, of which one schedule has a choice.
    fn late(&self) -> bool {
        self.schedule == NamedSchedule::OneFOneB && self.shape % 2 == 1
    }

    fn loaded(&self) -> Loaded {
        let Case { schedule, layout, tied, recompute, shape } = *self;
        let (pp, m, chunks, fastest) = shapes(schedule)[shape];
        let held = if chunks == 0 { schedule.usual_chunks() } else { chunks };
        let mut sets = vec![
            // One layer more than stages, so that not all of them are alike.
            format!("model.layers={}", pp * held + 1),
            format!("parallel.pp={pp}"),
            format!("parallel.schedule={schedule}"),
            format!("train.microbatches={m}"),
            // Two sequences in each micro-batch: one for each rank along dp.
            format!("train.batch_size={}", 2 * m),
            format!("parallel.order={}", if fastest { "pp-tp-cp-dp" } else { "tp-cp-dp-pp" }),
        ];
        sets.extend((chunks > 0).then(|| format!("parallel.chunks={chunks}")));
        sets.extend(self.late().then(|| "parallel.warmup=pb".to_owned()));
        let more = LAYOUTS[layout].1.iter().chain(RECOMPUTE[recompute].1);
        sets.extend(more.map(|set| (*set).to_owned()));
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        match tied {
            true => gpt(&sets),
            false => llama(&sets),
        }
    }

    /// What a sample must have: every other factor's values with each schedule, and recomputation and
    /// tied weights with each layout.
    fn marks(&self) -> [(usize, usize, usize); 6] {
        let schedule = self.schedule as usize;
        let Case { layout, tied, recompute, shape, .. } = *self;
        let tied = usize::from(tied);
        [
            (0, schedule, layout),
            (1, schedule, tied),
            (2, schedule, recompute),
            (3, schedule, shape),
            (4, layout, tied),
            (5, layout, recompute),
        ]
    }
}

/// A few cases in which every mark of the grid occurs: always the next one, in a random order, that
/// has most of the marks still missing.
fn sample(seed: u64) -> Vec<Case> {
    let mut all = grid();
    let stream = Stream::named(seed, "pipelines");
    for last in (1..all.len()).rev() {
        all.swap(last, stream.below(last as u64, last as u64 + 1) as usize);
    }
    let mut missing: BTreeSet<_> = all.iter().flat_map(Case::marks).collect();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let new = |case: &&Case| case.marks().iter().filter(|m| missing.contains(m)).count();
        let Some(best) = all.iter().rev().max_by_key(new).copied() else { break };
        for mark in best.marks() {
            missing.remove(&mark);
        }
        chosen.push(best);
    }
    chosen
}

#[test]
fn pipelines_do_what_one_rank_does() {
    let asked = std::env::var("PHALANX_PIPELINES").unwrap_or_else(|_| "0".to_owned());
    let cases = match asked.as_str() {
        "all" => grid(),
        seed => sample(seed.parse().expect("PHALANX_PIPELINES is `all` or a seed")),
    };
    for (number, case) in cases.iter().enumerate() {
        let what = format!("PHALANX_PIPELINES={asked}: {}", case.name());
        println!("{} of {}: {what}", number + 1, cases.len());
        let found = agrees(&what, &case.loaded(), None);
        // Bytes went from stage to stage, and as many as the types say.
        let sent = found.comm.iter().find(|row| row.op == "send").unwrap();
        assert!(sent.bytes_measured > 0 && sent.bytes_measured == sent.bytes_predicted, "{what}");
    }
}

/// One stage is a pipeline too. Its schedule says when micro-batches go back, and so how many of them
/// are kept: all four where all go forward first, else one.
#[test]
fn one_stage_follows_its_schedule() {
    let kept = |found: &Verified| {
        found.memory.iter().find(|row| row.category == "residuals").unwrap().measured
    };
    let one = kept(&agrees("no schedule", &llama(&["train.microbatches=4"]), None));
    // Two directions need two stages.
    for schedule in NamedSchedule::ALL.into_iter().filter(|s| !s.goes_both_ways()) {
        let set = format!("parallel.schedule={schedule}");
        let sets = ["train.microbatches=4", &set, "parallel.dp=2", "parallel.zero=3"];
        agrees(&set, &llama(&sets), None);
        let alone = llama(&sets[..2]);
        let kept = kept(&agrees(&set, &alone, None));
        match schedule {
            NamedSchedule::GPipe | NamedSchedule::Vectorised | NamedSchedule::BreadthFirst => {
                assert!(kept > 3 * one, "{set}: {kept}, {one}")
            }
            NamedSchedule::Naive
            | NamedSchedule::OneFOneB
            | NamedSchedule::PipeDream
            | NamedSchedule::PipeDream2bw => assert_eq!(kept, one, "{set}"),
            _ => assert!(kept < 2 * one, "{set}: {kept}, {one}"),
        }
        // What is not usual is told.
        let told = laid(&alone, None).lowered.describe();
        assert_eq!(told.contains(schedule.name()), schedule != NamedSchedule::OneFOneB, "{told}");
    }
}

/// Pairs whose layers take turns: the gradients of a stage are added in the same order, so the bits are the same.
#[test]
fn braided_pairs_change_no_bit() {
    for (pp, m, layout) in
        [("2", "8", &["parallel.tp=2"][..]), ("4", "8", &["parallel.dp=2", "parallel.zero=3"])]
    {
        let sets = [format!("parallel.pp={pp}"), format!("train.microbatches={m}")];
        let sets = sets.iter().map(String::as_str).chain(layout.iter().copied());
        let sets =
            sets.chain(["parallel.schedule=dualpipe", "train.batch_size=16", "model.layers=4"]);
        let plain: Vec<&str> = sets.collect();
        let braided: Vec<&str> = plain.iter().copied().chain(["parallel.braid=true"]).collect();
        agrees("braided", &llama(&braided), None);
        let [plain, braided] = [plain, braided].map(|sets| params(&llama(&sets), None, 2));
        assert!(plain == braided, "pp {pp}");
    }
}

/// The head's backward is split as any other's: the stage before gets its gradient first, and the gradients of weights
/// come as late as the schedule says. They keep their order, so the bits are those of GPipe, whose logits exist, too.
#[test]
fn the_head_is_split_and_changes_no_bit() {
    let loaded = |schedule: NamedSchedule| {
        let schedule = format!("parallel.schedule={schedule}");
        let f32 = ["precision.compute=f32", "precision.weights=f32", "precision.grads=f32"];
        let own = ["parallel.pp=2", "train.microbatches=4", "train.batch_size=8", &schedule];
        llama(&[&f32[..], &own].concat())
    };
    let plain = params(&loaded(NamedSchedule::GPipe), None, 3);
    for schedule in [NamedSchedule::ZbH1, NamedSchedule::ZbH2, NamedSchedule::ZbAuto] {
        let (loaded, mut heads) = (loaded(schedule), Vec::new());
        let laid = laid(&loaded, None);
        let head = laid.lowered.model.instances().len() - 1;
        for turn in laid.lowered.stage_groups().iter().flat_map(|group| group.turns) {
            heads.extend((turn.instance == head).then_some(turn.part));
        }
        for part in [Part::F, Part::B, Part::W] {
            assert_eq!(heads.iter().filter(|own| **own == part).count(), 4, "{schedule}");
        }
        assert_eq!(heads.len(), 12, "{schedule}: {heads:?}");
        assert!(params(&loaded, None, 3) == plain, "{schedule}");
    }
}

/// Nothing is left out of the grid but what has no effect whatever the shape.
#[test]
fn the_grid_has_every_schedule_with_every_layout_and_recomputation() {
    let grid = grid();
    for (layout, (name, _)) in LAYOUTS.iter().enumerate() {
        let own: Vec<&Case> = grid.iter().filter(|case| case.layout == layout).collect();
        for schedule in NamedSchedule::ALL {
            for (recompute, (kind, _)) in RECOMPUTE.iter().enumerate() {
                let here = |c: &&&Case| c.schedule == schedule && c.recompute == recompute;
                let tied: Vec<bool> = own.iter().filter(here).map(|case| case.tied).collect();
                let none = schedule == NamedSchedule::Naive && *kind == "stage";
                let expected: &[bool] = match (none, can_tie(schedule)) {
                    (true, _) => &[],
                    (_, true) => &[false, true],
                    (_, false) => &[false],
                };
                assert_eq!(tied, expected, "{schedule}, {name}, {kind}");
            }
        }
        let shapes: BTreeSet<usize> = own.iter().map(|case| case.shape).collect();
        assert_eq!(shapes.len(), 5, "{name}");
    }
}

#[test]
fn a_sample_has_every_value_of_every_factor() {
    for seed in 0..3 {
        let found = sample(seed);
        let marks = |cases: &[Case]| cases.iter().flat_map(Case::marks).collect::<BTreeSet<_>>();
        assert_eq!(marks(&found), marks(&grid()));
        // A case has one schedule and one layout, so there are at least as many as pairs of these.
        let least = NamedSchedule::ALL.len() * LAYOUTS.len();
        assert!(found.len() < least + 2, "{} cases", found.len());
    }
    assert_ne!(sample(0), sample(1));
}
