//! The composition matrix: every system, pair and triple of systems on one mesh, beside one rank.
//!
//! `PHALANX_COMPOSITION=all` runs all of them and writes docs/composition.md, `new` those that the page
//! does not have or shows as red; a cell is green only if it ran and matched. Otherwise a sample is run, whose seed is the variable's number or 0, and
//! compared with what the page says.

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_cuda::GpuLink;
use phalanx_inspect::verify::verify_as;
use phalanx_ir::random::Stream;
use phalanx_pipeline::{NamedSchedule, Warmup};
use phalanx_session::host;
use phalanx_session::{Backend, Parallel, Pipeline};

use crate::support::settings;
use crate::{foreign, gpu};
use layouts::{configuration, layout};
use page::{read, written};

mod layouts;
mod page;

/// Declares the systems, with their names in tables.
macro_rules! systems {
    ($($system:ident $name:literal,)+) => {
        /// A system, by its place in [`ALL`].
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        enum System {
            $($system,)+
        }

        const ALL: [(System, &str); [$($name),+].len()] = [$((System::$system, $name)),+];
    };
}

systems! {
    Ddp "ddp", Owner "dataparallel", Zero1 "zero-1", Zero2 "zero-2", Zero3 "zero-3",
    Fsdp "fsdp", Hybrid "hybrid", Update "wus", Local "local-sgd", Average "average", Experts "ep",
    Tensor "tp", Sequence "tp+sp", Plan "tp-plan", Square "2d",
    Squares "2.5d", Cube "3d", Grid "gspmd", Blocks "blocks", Ulysses "ulysses",
    AllGatherKv "ag-kv", Ring "ring", Rsa "rsa", Selective "selective", Full "full",
    Microbatches "mb", Bf16 "bf16", Half "f16", Lamb "lamb", Adafactor "adafactor",
    Gpt2 "gpt2", T5 "t5", Images "cnn",
    Naive "naive", GPipe "gpipe", Vectorised "vectorised", OneFOneB "1f1b", LongWarmup "1f1b-pb", BPipe "bpipe",
    Interleaved "interleaved", BreadthFirst "breadth-first", ZbH1 "zb-h1", ZbH2 "zb-h2",
    ZbV "zb-v", ZbAuto "zb-auto", VHalf "v-half", VMin "v-min",
    Chimera "chimera", DualPipe "dualpipe", PipeDream "pipedream", PipeDream2bw "pipedream-2bw",
}

use System as S;

/// The ways to split weights.
const TENSOR: [System; 3] = [S::Tensor, S::Sequence, S::Plan];

/// The shapes in which ranks divide weights and samples, with their ranks.
const SHAPES: [(System, &str); 4] =
    [(S::Square, "tp=4"), (S::Squares, "tp=8"), (S::Cube, "tp=8"), (S::Grid, "tp=4")];

/// The ways in which replicas train by themselves.
const APART: [System; 2] = [S::Local, S::Average];

impl System {
    fn name(self) -> &'static str {
        ALL.iter().find(|(s, _)| *s == self).map_or("", |(_, name)| name)
    }

    /// Whether the page has it with two others. The network of images takes seconds each time; with two others a few are tried.
    fn in_triples(self) -> bool {
        self != S::Images
    }

    /// Whether it says how data-parallel ranks share a model.
    fn shares(self) -> bool {
        self <= S::Update
    }

    /// The pipeline that it is.
    fn pipeline(self) -> Option<Pipeline> {
        let (order, warmup) = match self {
            // 1F1B is the only schedule that has a choice of warm-up.
            S::LongWarmup => (NamedSchedule::OneFOneB, Warmup::Pb),
            _ => (
                NamedSchedule::ALL.into_iter().find(|named| named.name() == self.name())?,
                Warmup::Pa,
            ),
        };
        Some(Pipeline { order: order.into(), warmup, ..Pipeline::default() })
    }
}

/// The pipeline among some systems.
fn pipeline(systems: &[System]) -> Option<Pipeline> {
    systems.iter().find_map(|system| system.pipeline())
}

/// What became of a combination.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Cell {
    /// It ran, and matched one rank in numbers, bytes and memory.
    Green,
    /// Two values of one setting, of which a run has one.
    Same,
    /// It was refused before anything started, for this reason.
    Refused(String),
    /// It ran and did not match, or failed.
    Red(String),
}

/// One to three systems, each once, in order.
type Combination = Vec<System>;

fn combinations() -> Vec<Combination> {
    let mut all = Vec::new();
    for (i, &(a, _)) in ALL.iter().enumerate() {
        all.push(vec![a]);
        for (j, &(b, _)) in ALL.iter().enumerate().skip(i + 1) {
            all.push(vec![a, b]);
            all.extend(ALL[j + 1..].iter().map(|&(c, _)| vec![a, b, c]));
        }
    }
    all.retain(|systems| systems.len() < 3 || systems.iter().all(|system| system.in_triples()));
    all
}

fn run(systems: &[System]) -> Cell {
    run_on(systems, &*host::threads())
}

fn run_on(systems: &[System], backend: &dyn Backend) -> Cell {
    let count = |is: &dyn Fn(&System) -> bool| systems.iter().filter(|s| is(s)).count();
    let twice = [
        count(&|s| s.pipeline().is_some()),
        count(&|s| [S::Selective, S::Full].contains(s)),
        count(&|s| [S::Bf16, S::Half].contains(s)),
        // At its start, T5's gradients of queries are small differences, which 16 bits do not hold.
        count(&|s| [S::Bf16, S::Half, S::T5].contains(s)),
        // Kinds of models: experts are in language models.
        count(&|s| [S::Gpt2, S::T5, S::Images].contains(s)),
        count(&|s| [S::Experts, S::Images].contains(s)),
        count(&|s| [S::Lamb, S::Adafactor].contains(s)),
        // Replicas share nothing, or train by themselves in one way.
        count(&|s| APART.contains(s)),
        if systems.iter().any(|s| APART.contains(s)) { 1 + count(&|s| s.shares()) } else { 1 },
        // A plan by name stands in for the roles that Megatron infers.
        count(&|s| [S::Tensor, S::Plan].contains(s)),
        count(&|s| [S::Sequence, S::Plan].contains(s)),
        // A ring deals positions otherwise than the other kinds of context parallelism.
        count(&|s| [S::Ulysses, S::Ring, S::Rsa].contains(s)),
        count(&|s| [S::AllGatherKv, S::Ring, S::Rsa].contains(s)),
        // A line, a square, squares, a cube and a grid are shapes of one thing.
        count(&|s| SHAPES.iter().any(|(shape, _)| shape == s))
            + usize::from(TENSOR.iter().any(|line| systems.contains(line))),
    ];
    if twice.into_iter().any(|values| values > 1) {
        return Cell::Same;
    }
    let verified = configuration(systems).and_then(|loaded| {
        let replicas = settings(&loaded, None).parallel.replicas;
        let parallel = Parallel { replicas, ..layout(systems) };
        verify_as(&loaded, settings(&loaded, Some(parallel)), 2, backend)
    });
    match verified {
        Ok(found) if found.ok => Cell::Green,
        Ok(found) => Cell::Red(format!("{found:?}")),
        Err(error) if error.exit_code() == 2 => {
            let text = error.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            Cell::Refused(lines.join("; ").trim_start_matches("error: ").to_owned())
        }
        Err(error) => Cell::Red(error.to_string()),
    }
}

fn named(systems: &[System]) -> String {
    let names: Vec<&str> = systems.iter().map(|s| s.name()).collect();
    names.join(" × ")
}

fn page() -> PathBuf {
    // Where the test runs, which may be another machine than the one that it was built on.
    let own = std::env::var_os("CARGO_MANIFEST_DIR");
    let own = own.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    PathBuf::from(own).join("../../docs/composition.md")
}

#[test]
fn systems_compose() {
    let asked = std::env::var("PHALANX_COMPOSITION").unwrap_or_else(|_| "0".to_owned());
    match asked.as_str() {
        "all" => everything(BTreeMap::new()),
        "new" => everything(page::cells(&std::fs::read_to_string(page()).unwrap())),
        seed => sample(seed.parse().expect("PHALANX_COMPOSITION is `all`, `new` or a seed")),
    }
}

/// Combinations that are tried on another engine and another transport.
const FOREIGN: u64 = 40;

/// An engine whose memory the host cannot address, and ranks that share none, give what the page says:
/// nothing above them knows.
#[test]
fn systems_compose_on_another_engine_and_another_transport() {
    let all = combinations();
    let stream = Stream::named(0, "another engine");
    let drawn = (0..FOREIGN).map(|draw| &all[stream.below(draw, all.len() as u64) as usize]);
    compose_on(&*foreign::backend(), drawn.collect());
}

/// The network of images with two of all others: none does what one rank does not.
#[test]
fn images_compose_with_two_others() {
    let stream = Stream::named(0, "images with two others");
    let mut draws = 0;
    let mut draw = || {
        draws += 1;
        ALL[stream.below(draws, ALL.len() as u64) as usize].0
    };
    let mut green = 0;
    for _ in 0..IMAGES {
        let mut systems = vec![S::Images, draw(), draw()];
        systems.sort();
        systems.dedup();
        let cell = run(&systems);
        println!("{}: {cell:?}", named(&systems));
        assert!(!matches!(cell, Cell::Red(_)), "{}: {cell:?}", named(&systems));
        green += usize::from(cell == Cell::Green);
    }
    assert!(green > IMAGES / 4, "{green} of {IMAGES} ran");
}

/// How many of them are tried.
const IMAGES: usize = 6;

/// Every layout runs on one GPU: all systems alone, and a sample of their combinations.
/// `PHALANX_COMPOSITION=all` runs all of them.
#[test]
fn systems_compose_on_a_gpu() {
    if !gpu::is_here("systems_compose_on_a_gpu") {
        return;
    }
    let all = combinations();
    let drawn = match std::env::var("PHALANX_COMPOSITION").as_deref() {
        Ok("all") => all.iter().collect(),
        _ => drawn(&all, 1),
    };
    let alone = all.iter().filter(|systems| systems.len() == 1);
    compose_on(&*gpu::backend(GpuLink::Device), alone.chain(drawn).collect());
}

/// Combinations do on a backend what the page says.
fn compose_on(backend: &dyn Backend, drawn: Vec<&Combination>) {
    let text = std::fs::read_to_string(page()).unwrap();
    let (said, mut green, count) = (read(&text), 0, drawn.len());
    for systems in drawn {
        match run_on(systems, backend) {
            Cell::Green => green += usize::from(said[systems] == "green"),
            Cell::Same | Cell::Refused(_) => {
                assert_ne!(said[systems], "green", "{}", named(systems))
            }
            Cell::Red(why) => panic!("{}: {why}", named(systems)),
        }
    }
    assert!(green > count / 3, "{green} of {count} ran");
}

/// A schedule that users can name has a row.
#[test]
fn every_schedule_is_a_system() {
    let named = |schedule: NamedSchedule| ALL.iter().any(|(_, name)| *name == schedule.name());
    let missing: Vec<NamedSchedule> =
        NamedSchedule::ALL.into_iter().filter(|schedule| !named(*schedule)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Runs every combination that is not known, and writes the page.
fn everything(known: BTreeMap<Combination, Cell>) {
    let mut all = combinations();
    let mut cells = known;
    cells.retain(|_, cell| !matches!(cell, Cell::Red(_)));
    all.retain(|systems| !cells.contains_key(systems));
    for (number, systems) in all.iter().enumerate() {
        let cell = run(systems);
        println!("{} of {}: {}: {cell:?}", number + 1, all.len(), named(systems));
        cells.insert(systems.clone(), cell);
    }
    std::fs::write(page(), written(&cells)).unwrap();
    let red: Vec<String> = (cells.iter())
        .filter(|(_, cell)| matches!(cell, Cell::Red(_)))
        .map(|(systems, cell)| format!("{}: {cell:?}", named(systems)))
        .collect();
    assert!(red.is_empty(), "{} are red:\n{}", red.len(), red.join("\n"));
}

/// Combinations that a run in CI tries. A new system adds columns to the page, not to this.
const SAMPLE: usize = 120;

/// So many combinations, each once, that every system is in one of them at least.
fn drawn(all: &[Combination], seed: u64) -> Vec<&Combination> {
    let stream = Stream::named(seed, "composition");
    let mut draws = 0;
    let mut draw = |of: &[&Combination]| {
        draws += 1;
        stream.below(draws, of.len() as u64) as usize
    };
    let mut drawn: Vec<&Combination> = Vec::new();
    for (system, _) in ALL {
        let with: Vec<&Combination> = all.iter().filter(|c| c.contains(&system)).collect();
        if !drawn.iter().any(|c| c.contains(&system)) {
            drawn.push(with[draw(&with)]);
        }
    }
    let mut left: Vec<&Combination> = all.iter().filter(|c| !drawn.contains(c)).collect();
    while drawn.len() < SAMPLE {
        drawn.push(left.swap_remove(draw(&left)));
    }
    drawn
}

/// Runs a few combinations and compares them with the page, which must have every cell.
fn sample(seed: u64) {
    let all = combinations();
    let text = std::fs::read_to_string(page()).unwrap();
    let said = read(&text);
    for systems in &all {
        let cell = said.get(systems);
        assert!(cell.is_some_and(|c| *c != "red"), "{}: {cell:?}", named(systems));
    }
    for systems in drawn(&all, seed) {
        let found = run(systems);
        let expected = match &found {
            Cell::Green => "green",
            Cell::Same => "same",
            Cell::Refused(_) => "refused",
            Cell::Red(why) => panic!("seed {seed}, {}: {why}", named(systems)),
        };
        assert_eq!(said[systems], expected, "seed {seed}, {}: {found:?}", named(systems));
        if let Cell::Refused(why) = &found {
            assert!(text.contains(why.as_str()), "the page does not say: {why}");
        }
    }
}
