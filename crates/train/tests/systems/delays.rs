//! Ranks that are late: nothing deadlocks, nothing changes, and everything is done in the script's order.
//!
//! Two crews take the same steps, one of them on engines that hesitate before their calls. Each step has
//! other delays, and its numbers must be the same to the last bit. `PHALANX_DELAYS` is how many steps
//! each pipeline takes. The same is asked of engines that run calls as late as they may.

use std::time::Duration;

use phalanx_comm::{Communicator, Options, PoolFailure, RankPool, Threads};
use phalanx_config::Loaded;
use phalanx_cpu::CpuEngine;
use phalanx_engine::{Engine, Late};
use phalanx_error::Error;
use phalanx_pipeline::NamedSchedule;
use phalanx_script::{Lane, Script, StateKind, plan};
use phalanx_session::corpus::{self, with_step_data};
use phalanx_session::host::rank_engine;
use phalanx_session::network::Network;
use phalanx_session::{Lowered, Planner, RankWorker, StatePiece, StepData};
use phalanx_testing::{Remote, Wrapped};

use crate::support::{gpt, llama, models, settings, t5};
use crate::unsteady::{Habit, Issued, Unsteady};

/// Steps of each pipeline; a longer run is asked for by the environment.
fn steps(plain: usize) -> usize {
    let asked = std::env::var("PHALANX_DELAYS").ok().and_then(|n| n.parse().ok());
    asked.unwrap_or(plain)
}

type LateEngine = Late<Wrapped<CpuEngine, Unsteady>>;

/// The ranks of a pipeline, on engines that wrap those of this machine.
struct Ranks<E: Engine> {
    crew: RankPool<RankWorker<E>>,
}

impl<E: Engine + Send> Ranks<E> {
    fn on(loaded: &Loaded, timeout: Duration, wrap: impl Fn(CpuEngine, usize) -> E + Sync) -> Self {
        let network = Network::new(loaded).unwrap();
        let read = network.start();
        let lowered = Lowered::new(&models(loaded), settings(loaded, None)).unwrap();
        let planner = Planner::new(&lowered).unwrap();
        let options = Options { timeout, depth: 1024, ..Options::default() };
        let load = |endpoint: Box<dyn Communicator>| {
            let rank = endpoint.rank();
            let engine = wrap(rank_engine(1, endpoint)?, rank);
            let mut session = RankWorker::load(engine, &planner, rank)?;
            session.start(&*read)?;
            Ok::<_, Error>(session)
        };
        let crew = RankPool::new(&Threads { ranks: lowered.ranks(), options }, load);
        Self { crew: crew.unwrap_or_else(|lost| panic!("{}", lost.failure.message)) }
    }

    /// By rank, the bits of loss and norm; or what went wrong.
    fn step(&mut self, data: &StepData<'_>) -> Result<Vec<[u64; 2]>, String> {
        let step = |_: usize, rank: &mut RankWorker<E>| {
            let result = rank.step(data, 0.01)?;
            Ok::<_, Error>([result.loss, result.grad_norm].map(f64::to_bits))
        };
        self.crew.run(step).map_err(|lost| lost.failure.message.to_string())
    }

    fn params(&mut self) -> Vec<Vec<(usize, StatePiece)>> {
        let pieces = |_: usize, rank: &mut RankWorker<E>| rank.pieces(StateKind::Weights);
        let pieces = self.crew.run(pieces);
        pieces.unwrap_or_else(|lost: PoolFailure<Error>| panic!("{}", lost.failure.message))
    }
}

impl Ranks<Wrapped<CpuEngine, Unsteady>> {
    fn new(loaded: &Loaded, habit: Habit, timeout: Duration) -> Self {
        Self::on(loaded, timeout, |engine, rank| Unsteady::around(engine, habit, rank))
    }

    /// By rank: what was issued so far, and the script.
    fn issued(&mut self) -> Vec<(Vec<Issued>, Script)> {
        let read = |_: usize, rank: &mut RankWorker<Wrapped<CpuEngine, Unsteady>>| {
            Ok::<_, Error>((rank.engine().hook.issued.clone(), rank.script().clone()))
        };
        self.crew.run(read).unwrap_or_else(|lost| panic!("{}", lost.failure.message))
    }
}

/// What ranks of a stage do with its weights and its sequences.
const LAYOUTS: [&[&str]; 8] = [
    &["parallel.dp=2"],
    &["parallel.tp=2", "parallel.order=pp-tp-cp-dp"],
    &["parallel.tp=2", "parallel.sp=true"],
    &["parallel.cp=2"],
    &["parallel.dp=2", "parallel.zero=2"],
    &["parallel.dp=2", "parallel.zero=3"],
    &["parallel.dp=2", "parallel.tp=2", "parallel.zero=3"],
    &["parallel.dp=2", "parallel.cp=2", "parallel.zero=2"],
];

/// The layouts of stages that run their forwards again: split along tp, with divided weights, and both.
const AGAIN: [&[&str]; 3] = [LAYOUTS[1], LAYOUTS[5], LAYOUTS[6]];

/// A tiny model on a pipeline.
#[derive(Clone, Copy, Debug)]
struct Pipe {
    schedule: NamedSchedule,
    pp: usize,
    m: usize,
    layout: &'static [&'static str],
    /// Whether stages keep their inputs alone, and run their forwards again.
    again: bool,
    /// Whether the first and the last stage share a weight.
    tied: bool,
    /// Whether it has a decoder, all of whose blocks read what its encoder found.
    decodes: bool,
}

impl Pipe {
    fn new(schedule: NamedSchedule, pp: usize, m: usize) -> Self {
        Self { schedule, pp, m, layout: &[], again: false, tied: false, decodes: false }
    }

    fn loaded(&self) -> Loaded {
        let Pipe { schedule, pp, m, layout, again, tied, decodes } = *self;
        let sets = [
            format!("model.layers={}", pp * schedule.usual_chunks()),
            format!("parallel.pp={pp}"),
            format!("parallel.schedule={schedule}"),
            format!("train.microbatches={m}"),
            format!("train.batch_size={}", 2 * m),
            "train.seq_len=4".to_owned(),
            "model.width=8".to_owned(),
            "model.ffn=12".to_owned(),
            format!("train.recompute={}", if again { "stage" } else { "none" }),
        ];
        let sets: Vec<&str> = sets.iter().map(String::as_str).chain(layout.to_vec()).collect();
        match (decodes, tied) {
            (true, _) => t5(&sets),
            (_, true) => gpt(&sets),
            _ => llama(&sets),
        }
    }
}

/// Stages of one rank, of several shapes, with every schedule; and stages of several ranks, where each
/// layout has half of the schedules, tied and untied in turns. Then the same with forwards that are run
/// again, where there are any: every schedule on stages of one rank, and in turns with tp and ZeRO-3.
fn pipes() -> Vec<Pipe> {
    let mut all = Vec::new();
    for (number, schedule) in NamedSchedule::ALL.into_iter().enumerate() {
        // Interleaving needs as many micro-batches as stages, or a multiple; two directions need even numbers; and
        // bpipe moves something from four stages on.
        let odd = match schedule {
            NamedSchedule::Interleaved => (3, 6),
            NamedSchedule::BPipe => (4, 6),
            _ if schedule.goes_both_ways() => (4, 6),
            _ => (3, 5),
        };
        all.extend([(2, 8), odd, (4, 4)].map(|(pp, m)| Pipe::new(schedule, pp, m)));
        for turn in (number % 2..LAYOUTS.len()).step_by(2) {
            let tied = (number + turn) / 2 % 2 == 1 && schedule != NamedSchedule::PipeDream;
            let m = if turn < 4 { 4 } else { 2 };
            all.push(Pipe { layout: LAYOUTS[turn], tied, ..Pipe::new(schedule, 2, m) });
        }
        if schedule != NamedSchedule::Naive {
            let tied = number % 2 == 1 && schedule != NamedSchedule::PipeDream;
            let decodes = number % 3 == 0 && schedule != NamedSchedule::PipeDream;
            all.extend(decodes.then(|| Pipe { decodes, ..Pipe::new(schedule, odd.0, odd.1) }));
            let layout = AGAIN[number % 3];
            all.push(Pipe { again: true, ..Pipe::new(schedule, odd.0, odd.1) });
            all.push(Pipe { again: true, layout, tied, ..Pipe::new(schedule, 2, 4) });
        }
    }
    all
}

/// Takes steps on both, and hands each step's results to `each`.
fn beside(loaded: &Loaded, steps: usize, mut each: impl FnMut(&StepData<'_>)) {
    let mut loader = corpus::training(loaded, &corpus::open(loaded).unwrap()).unwrap();
    for _ in 0..steps {
        with_step_data(loader.next_batch().unwrap(), |data| each(data));
    }
}

/// Steps of each pipeline whose ranks are late, unless the environment asks for another number.
const PLAIN: usize = 30;

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn late_ranks_change_nothing() {
    let steps = steps(PLAIN);
    let mut cases = 0;
    for (seed, pipe) in pipes().into_iter().enumerate() {
        let (loaded, what) = (pipe.loaded(), format!("{pipe:?}, seed {seed}"));
        let mut steady = Ranks::new(&loaded, Habit::Steady, PATIENCE);
        let mut late = Ranks::new(&loaded, Habit::Hesitates(seed as u64), PATIENCE);
        beside(&loaded, steps, |data| {
            let expected = steady.step(data).unwrap_or_else(|why| panic!("{what}: {why}"));
            let found = late.step(data);
            assert_eq!(found.as_ref(), Ok(&expected), "{what}, case {cases}");
            cases += 1;
        });
        assert_eq!(steady.params(), late.params(), "{what}");
    }
    println!("{cases} cases");
    assert!(cases >= 2000 || steps < PLAIN, "only {cases} cases");
}

/// An engine that runs calls as late and as out of order as their events allow, on every rank.
#[test]
fn late_engines_change_nothing() {
    let steps = steps(2);
    let mut cases = 0;
    for (number, pipe) in pipes().into_iter().enumerate() {
        let loaded = pipe.loaded();
        let mut steady = Ranks::new(&loaded, Habit::Steady, PATIENCE);
        let mut late =
            Ranks::on(&loaded, PATIENCE, |engine, rank| as_late_as_can_be(engine, rank, number));
        beside(&loaded, steps, |data| {
            let expected = steady.step(data).unwrap_or_else(|why| panic!("{pipe:?}: {why}"));
            assert_eq!(late.step(data).as_ref(), Ok(&expected), "{pipe:?}, case {cases}");
            cases += 1;
        });
        assert_eq!(steady.params(), late.params(), "{pipe:?}");
        let poisoned = late.crew.run(|_, rank| Ok::<_, Error>(rank.engine().poisoned_reads()));
        assert!(poisoned.is_ok_and(|ranks| ranks.iter().all(|n| *n == 0)), "{pipe:?}");
    }
    println!("{cases} cases");
}

/// Engines on threads of their own, to which steps are handed over and which take them in their own time.
#[test]
fn remote_engines_change_nothing() {
    for pipe in pipes() {
        let loaded = pipe.loaded();
        let mut steady = Ranks::new(&loaded, Habit::Steady, PATIENCE);
        let mut remote = Ranks::on(&loaded, PATIENCE, |engine, _| Remote::bare(move || engine));
        beside(&loaded, steps(2), |data| {
            let expected = steady.step(data).unwrap_or_else(|why| panic!("{pipe:?}: {why}"));
            assert_eq!(remote.step(data).as_ref(), Ok(&expected), "{pipe:?}");
        });
        assert_eq!(steady.params(), remote.params(), "{pipe:?}");
    }
}

fn as_late_as_can_be(engine: CpuEngine, rank: usize, seed: usize) -> LateEngine {
    Late::new(Unsteady::around(engine, Habit::Steady, rank), (100 * seed + rank) as u64)
}

/// On every lane, what a rank issues is what its script says, in that order, on the buffers that
/// the plan gave places to.
#[test]
fn actions_are_issued_in_the_order_of_the_script() {
    for schedule in NamedSchedule::ALL {
        let alone: &[&str] = &[];
        for (layout, again) in [(alone, false), (LAYOUTS[5], false), (LAYOUTS[5], true)] {
            let again = again && schedule != NamedSchedule::Naive;
            let loaded = Pipe { layout, again, ..Pipe::new(schedule, 2, 4) }.loaded();
            let mut ranks = Ranks::new(&loaded, Habit::Hesitates(7), PATIENCE);
            beside(&loaded, 1, |data| drop(ranks.step(data).unwrap()));
            for (rank, (issued, script)) in ranks.issued().into_iter().enumerate() {
                let expected = in_order(&script);
                for lane in [Lane::Compute, Lane::Gather, Lane::Reduce, Lane::Send, Lane::Receive] {
                    let on = |all: &[Issued]| -> Vec<Issued> {
                        all.iter().filter(|(l, ..)| *l == lane).cloned().collect()
                    };
                    let what = format!("{schedule}, rank {rank}, {lane:?}");
                    assert_eq!(on(&issued), on(&expected), "{what}");
                    // Copies of a stage are summed.
                    let copies = schedule.goes_both_ways() && lane == Lane::Reduce;
                    let shared = !matches!(lane, Lane::Gather | Lane::Reduce)
                        || !layout.is_empty()
                        || copies;
                    assert_eq!(on(&issued).is_empty(), !shared, "{what}");
                }
            }
        }
    }
}

/// The calls that a script stands for. Ends of lives are no calls.
fn in_order(script: &Script) -> Vec<Issued> {
    let places = plan(script).unwrap();
    let call = |action: &phalanx_script::Action| {
        let first = |run: &phalanx_script::Run| {
            let outputs = run.outputs.iter().map(|(view, _)| view);
            run.inputs.iter().chain(outputs).map(|v| places.offsets[v.buffer.0] + v.offset).next()
        };
        let whole = || {
            let used = action.reads().into_iter().chain(action.writes());
            used.map(|buffer| places.offsets[buffer.0]).next()
        };
        match (action.run(), action.ends()) {
            (Some(run), _) => {
                let name = script.programs[run.program.0].program().name.clone();
                Some((action.lane, name, first(run)))
            }
            (None, None) => Some((action.lane, action.label.clone(), whole())),
            _ => None,
        }
    };
    script.actions.iter().filter_map(call).collect()
}

/// A rank that waits for a gradient before it has sent what the gradient is of waits for ever.
#[test]
fn a_planted_deadlock_is_found() {
    let loaded = Pipe::new(NamedSchedule::OneFOneB, 2, 1).loaded();
    let mut ranks = Ranks::new(&loaded, Habit::Hasty, Duration::from_millis(300));
    beside(&loaded, 1, |data| {
        let why = ranks.step(data).unwrap_err();
        assert!(why.contains("receive"), "{why}");
    });
}

/// And one that does not wait computes something else.
#[test]
fn a_planted_missing_wait_is_found() {
    let loaded = Pipe::new(NamedSchedule::OneFOneB, 2, 4).loaded();
    let mut steady = Ranks::new(&loaded, Habit::Steady, PATIENCE);
    let mut forgetful = Ranks::new(&loaded, Habit::Forgetful, PATIENCE);
    let mut same = 0;
    beside(&loaded, 3, |data| {
        let expected = steady.step(data).unwrap();
        same += usize::from(forgetful.step(data) == Ok(expected));
    });
    assert_eq!(same, 0, "nobody noticed");
}

/// The same where ranks of a stage meet, by the engine that is late.
#[test]
fn a_planted_missing_wait_is_found_in_every_layout() {
    for (seed, layout) in LAYOUTS.into_iter().enumerate() {
        let loaded = Pipe { layout, ..Pipe::new(NamedSchedule::OneFOneB, 2, 4) }.loaded();
        let mut ranks = Ranks::on(&loaded, PATIENCE, |engine, rank| {
            Unsteady::around(as_late_as_can_be(engine, rank, seed), Habit::Forgetful, rank)
        });
        // What it computes is anything, or nothing.
        beside(&loaded, 1, |data| drop(ranks.step(data)));
        let poisoned =
            ranks.crew.run(|_, rank| Ok::<_, Error>(rank.engine().inner.poisoned_reads()));
        assert!(poisoned.is_ok_and(|ranks| ranks.iter().all(|n| *n > 0)), "{layout:?}");
    }
}
