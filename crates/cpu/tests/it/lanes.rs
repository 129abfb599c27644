//! Collectives that are launched and waited for later, and what is said when ranks do not meet.

use std::sync::mpsc::channel;
use std::time::Duration;

use phalanx_comm::{Communicator, Launcher, Options, Threads};
use phalanx_cpu::{CpuEngine, Kernel};
use phalanx_engine::{Args, Engine, Event, Span, Target};
use phalanx_ir::{Program, text};
use phalanx_script::{Lane, Slots, Tier};

const REDUCE: &str = "mesh dp=2
program reduce {
  g: gradient f64[*64]{P:dp}
  %1 = reduce_scatter<dp>(g, dim=0) : f64[*64]{*:dp}
  return shard: gradient %1
}
";

const ADD: &str = "mesh dp=2
program add {
  x: data f64[*64]{*:dp}
  %1 = shift(x, by=1) : f64[*64]{*:dp}
  return y: probe %1
}
";

fn program(source: &str) -> Program {
    let program = text::parse(source).unwrap();
    phalanx_ir::verify(&program).unwrap();
    program
}

/// A rank with both programs compiled: gradients at 0, the reduced shard at 512, y at 1024.
struct Rank {
    engine: CpuEngine,
    reduce: Kernel,
    add: Kernel,
}

impl Rank {
    fn new(endpoint: Box<dyn Communicator>, value: f64) -> Self {
        let mut engine = CpuEngine::on_rank(1, endpoint).unwrap();
        let mut compile = |source: &str| {
            let program = program(source);
            let slots = Slots::assign_for(&program, &*engine.requirements());
            engine.compile(&program, &slots, &[0, 1]).unwrap()
        };
        let (reduce, add) = (compile(REDUCE), compile(ADD));
        engine.reserve(Tier::Device, 4096).unwrap();
        let bytes: Vec<u8> = (0..64).flat_map(|i| (value * f64::from(i)).to_le_bytes()).collect();
        engine.upload(Span::device(0, 512), &bytes).unwrap();
        Self { engine, reduce, add }
    }

    fn launch(&mut self, reduce: bool, lane: Lane, after: &[Event], add: bool) -> Event {
        let (kernel, from, to) =
            if reduce { (&self.reduce, 0, 512) } else { (&self.add, 512, 1024) };
        let span = Span::device(to, 256);
        let inputs = [Span::device(from, 512)];
        let args = Args {
            inputs: &inputs,
            outputs: &[Target { span, add }],
            workspace: Span::device(2048, 0),
        };
        self.engine.launch(kernel, &args, lane, after).unwrap()
    }

    fn read(&mut self, offset: usize) -> Vec<f64> {
        let mut bytes = vec![0; 256];
        self.engine.download(Span::device(offset, 256), &mut bytes).unwrap();
        bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// The endpoints of two ranks.
fn two_ranks(options: Options) -> [Box<dyn Communicator>; 2] {
    let locals = Threads { ranks: 2, options }.launch().unwrap();
    locals.into_iter().map(|local| local.endpoint).collect::<Vec<_>>().try_into().ok().unwrap()
}

/// The launch of a collective on a lane of its own returns before the other rank has come; it ends
/// when it is waited for, or when a later launch asks for it.
#[test]
fn a_collective_on_its_own_lane_is_only_started() {
    let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
    let [first, second] = two_ranks(options);
    let (started, go) = channel();
    let run = |endpoint: Box<dyn Communicator>,
               value: f64,
               before: Box<dyn FnOnce() + Send>,
               after: Box<dyn FnOnce() + Send>| {
        let mut rank = Rank::new(endpoint, value);
        before();
        let event = rank.launch(true, Lane::Reduce, &[], false);
        after();
        let second = rank.launch(false, Lane::Compute, &[event], false);
        let sum = rank.read(1024);
        // Once more, added to what is there, and waited for by hand.
        let event = rank.launch(true, Lane::Reduce, &[second], true);
        rank.engine.wait(event).unwrap();
        (sum, rank.read(512))
    };
    std::thread::scope(|scope| {
        let one = scope.spawn(|| {
            run(first, 1.0, Box::new(|| ()), Box::new(move || started.send(()).unwrap()))
        });
        // The other rank does not come before the first has launched its own.
        let other =
            scope.spawn(|| run(second, 2.0, Box::new(move || go.recv().unwrap()), Box::new(|| ())));
        for (rank, thread) in [one, other].into_iter().enumerate() {
            let (plus_one, twice) = thread.join().unwrap();
            for i in 0..32 {
                let sum = 3.0 * (32 * rank + i) as f64;
                assert_eq!(plus_one[i], sum + 1.0);
                assert_eq!(twice[i], 2.0 * sum);
            }
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let options = Options { timeout: Duration::from_millis(200), ..Options::default() };
    let [first, _absent] = two_ranks(options);
    let mut rank = Rank::new(first, 1.0);
    let event = rank.launch(true, Lane::Reduce, &[], false);
    let error = rank.engine.wait(event).unwrap_err().to_string();
    for part in ["program `reduce`", "rank 1 never arrived", "reduce_scatter"] {
        assert!(error.contains(part), "{error}");
    }
    let inputs = [Span::device(0, 512)];
    let outputs = [Target { span: Span::device(512, 256), add: false }];
    let args = Args { inputs: &inputs, outputs: &outputs, workspace: Span::default() };
    let again = rank.engine.launch(&rank.reduce, &args, Lane::Compute, &[]).unwrap_err();
    assert!(again.to_string().contains("stopped because"), "{again}");
}

#[test]
fn an_engine_without_other_ranks_says_so() {
    let program = program(REDUCE);
    let mut engine = CpuEngine::new(1).unwrap();
    let slots = Slots::assign_for(&program, &*engine.requirements());
    let error = engine.compile(&program, &slots, &[0, 1]).err().unwrap().to_string();
    for part in ["mesh (dp=2) has 2 ranks", "rank 0 of 1", "CpuEngine::on_rank"] {
        assert!(error.contains(part), "{error}");
    }
}
