//! The executor on an engine that is really asynchronous, whose memory the host cannot address.

use std::sync::Arc;

use phalanx_call::NoScratch;
use phalanx_comm::{Communicator, RankPool, Threads};
use phalanx_cpu::{CpuEngine, CpuRequirements};
use phalanx_engine::{Args, Counters, Engine, KernelCall, Late, Span, Target};
use phalanx_ir::{Builder, DType, Program, text};
use phalanx_models::BatchShape;
use phalanx_reference::{RefTensor, ReferenceEngine};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{
    Action, Buffer, BufferId, BufferKey, Category, Kind, Lane, Placed, PlannedScript, Run, Script,
    Slots, Source, Tier, View, Write, plan,
};
use phalanx_testing::cases::{Chooser, try_seeds};
use phalanx_testing::checks::on_threads;
use phalanx_testing::threads::Ranks;
use phalanx_testing::{Remote, suite, tiny};

fn cpu() -> Remote<CpuEngine> {
    Remote::new(|| CpuEngine::new(1).unwrap())
}

fn on_rank(endpoint: Box<dyn Communicator>) -> Remote<CpuEngine> {
    Remote::new(move || CpuEngine::on_rank(1, endpoint).unwrap())
}

#[test]
fn a_device_writes_what_is_planned() {
    suite::memory_is_written_as_planned(cpu, true);
}

#[test]
fn a_device_gives_the_interpreters_numbers() {
    suite::numbers_are_the_interpreters(cpu);
}

#[test]
fn a_device_keeps_the_bits() {
    suite::a_run_can_be_repeated(cpu);
    suite::a_split_backward_keeps_the_bits(cpu);
    suite::recomputation_keeps_the_bits(cpu);
}

#[test]
fn a_late_device_keeps_the_bits() {
    let shape = BatchShape { batch: 2, seq: 6 };
    suite::late_calls_keep_the_bits(cpu, &tiny(2), shape);
}

/// Its communicator lives on the device: every rank has one.
#[test]
fn ranks_have_a_device_each() {
    let mut ranks = Ranks::new(on_rank);
    let checked = try_seeds(0..12, Chooser::Random, |trial| {
        on_threads(&trial.whole, &trial.parts, trial.seed, &mut ranks)
    });
    checked.unwrap_or_else(|found| panic!("{found}"));
}

/// What is counted on the device is what the program says.
#[test]
fn a_device_counts() {
    let source = "mesh dp=2
program sum {
  g: gradient f64[64]{P:dp}
  %1 = all_reduce<dp>(g) : f64[64]
  return s: gradient %1
}";
    let program = text::parse(source).unwrap();
    let make = |endpoint| Ok::<_, String>(on_rank(endpoint));
    let mut crew = RankPool::new(&Threads::new(2), make).unwrap();
    let counted = crew.run(|rank, stage_group| {
        let slots = Slots::assign_for(&program, &*stage_group.requirements());
        let kernel = stage_group.compile(&program, &slots, &[0, 1]).unwrap();
        stage_group.reserve(Tier::Device, 1024).unwrap();
        let span = Span::device(512, 512);
        let args = Args {
            inputs: &[Span::device(0, 512)],
            outputs: &[Target { span, add: false }],
            workspace: Span::default(),
        };
        let event = stage_group.launch(&kernel, &args, Lane::Reduce, &[]).unwrap();
        stage_group.wait(event).unwrap();
        let predicted = phalanx_call::traffic::of_program(&program, rank);
        Ok::<_, String>((stage_group.moved(), predicted))
    });
    for (moved, predicted) in counted.unwrap() {
        assert_eq!(moved, predicted);
    }
}

/// Slots that were placed for another engine are refused before anything runs.
#[test]
fn scratch_that_was_not_planned_is_refused() {
    let b = Builder::new("product", DType::F32);
    b.output("y", b.data("x", DType::F32, [2, 2]).matmul(b.param("w", [2, 2])));
    let program = b.finish().unwrap();
    let mut stage_group = cpu();
    let error = stage_group
        .compile(&program, &Slots::assign_for(&program, &CpuRequirements::default()), &[0])
        .err()
        .unwrap();
    assert!(error.to_string().contains("scratch memory was not planned"), "{error}");
    let slots = Slots::assign_for(&program, &*stage_group.requirements());
    assert!(stage_group.compile(&program, &slots, &[0]).is_ok());
}

/// Scratch memory that somebody else uses at the same time is noticed when it is used first.
#[test]
fn scratch_that_is_not_the_devices_alone_is_found() {
    let b = Builder::new("products", DType::F32);
    let x = b.data("x", DType::F32, [8, 8]);
    b.output("y", x.matmul(x).matmul(x));
    let program = b.finish().unwrap();
    let run = |shared: bool| {
        let mut stage_group = cpu();
        let mut slots = Slots::assign_for(&program, &*stage_group.requirements());
        let first = slots.scratch[0].unwrap();
        let scratch =
            slots.live_ranges.iter().position(|l| (l.offset, l.death) == (first, 0)).unwrap();
        let product = slots.live_ranges.iter().position(|l| (l.birth, l.death) == (0, 1)).unwrap();
        if shared {
            slots.scratch[0] = Some(slots.live_ranges[product].offset);
            slots.live_ranges[scratch].offset = slots.live_ranges[product].offset;
        }
        let kernel = stage_group.compile(&program, &slots, &[0]).unwrap();
        stage_group.reserve(Tier::Device, 4096).unwrap();
        let place = |index: usize| Span::device(256 * index, 256);
        let ones: Vec<u8> = 1f32.to_le_bytes().repeat(64);
        stage_group.upload(place(0), &ones).unwrap();
        let outputs = [Target { span: place(1), add: false }];
        let workspace = Span::device(1024, slots.extent);
        let args = Args { inputs: &[place(0)], outputs: &outputs, workspace };
        let event = stage_group.launch(&kernel, &args, Lane::Compute, &[]).unwrap();
        stage_group.wait(event).map_err(|e| e.to_string())
    };
    assert_eq!(run(false), Ok(()));
    assert!(run(true).unwrap_err().contains("scratch memory"));
}

const N: usize = 64;

fn doubling() -> Program {
    let source = format!(
        "mesh\nprogram double {{\n  x: state f64[{N}]\n  %1 = scale(x, by=2) : f64[{N}]\n  return o: state %1\n}}"
    );
    text::parse(&source).unwrap()
}

/// Two places for batches, each with its copy on the host, and the result of a step.
struct Buffers {
    host: [BufferId; 2],
    stage_group: [BufferId; 2],
    y: BufferId,
    down: BufferId,
}

fn buffers(script: &mut Script) -> Buffers {
    let mut buffer = |name: &str, source, tier| {
        let key = BufferKey::Own(name.into());
        let (category, bytes) = (Category::Inputs, 8 * N);
        script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] })
    };
    Buffers {
        host: ["h0", "h1"].map(|name| buffer(name, Source::Host, Tier::Host)),
        stage_group: ["x0", "x1"].map(|name| buffer(name, Source::State, Tier::Device)),
        y: buffer("y", Source::State, Tier::Device),
        down: buffer("y down", Source::Result, Tier::Host),
    }
}

fn push(script: &mut Script, lane: Lane, kind: Kind) {
    let label = format!("action {}", script.actions.len());
    script.actions.push(Action { label, lane, kind, after: vec![] });
}

/// The upload of a batch to one of the places.
fn upload(place: usize) -> Script {
    let mut script = Script::default();
    let Buffers { host, stage_group, .. } = buffers(&mut script);
    push(&mut script, Lane::Up, Kind::Copy { from: host[place], into: stage_group[place] });
    script
}

/// A step on the batch at one of the places: twice the batch, several times over, and the result down.
fn step(place: usize) -> Script {
    let mut script = Script::default();
    let Buffers { stage_group, y, down, .. } = buffers(&mut script);
    let view = |buffer| View { buffer, offset: 0 };
    let doubling = doubling();
    let slots = Slots::assign_for(&doubling, &NoScratch);
    let placed = Placed::new(doubling, slots);
    for _ in 0..4 {
        let run = Run {
            program: script.program(placed.clone()),
            inputs: vec![view(stage_group[place])],
            outputs: vec![(view(y), Write::Overwrite)],
            contributes: vec![],
        };
        push(&mut script, Lane::Compute, Kind::Run(run));
    }
    push(&mut script, Lane::Down, Kind::Copy { from: y, into: down });
    script
}

struct Pipe<E: Engine> {
    executor: Executor<E>,
    uploads: [ScriptId; 2],
    steps: [ScriptId; 2],
    buffers: Buffers,
}

impl<E: Engine> Pipe<E> {
    fn new(engine: E) -> Self {
        let mut executor = Executor::new(engine);
        // Every script has the same buffers, at the same places.
        let base = plan(&step(0)).unwrap();
        let mut load = |script| {
            let planned = PlannedScript::new(script, Some(&base)).unwrap();
            assert_eq!(planned.memory.offsets, base.offsets);
            executor.load(Arc::new(planned)).unwrap()
        };
        let steps = [0, 1].map(|place| load(step(place)));
        let uploads = [0, 1].map(|place| load(upload(place)));
        assert_eq!(executor.arenas()[Tier::Host.index()], 3 * 8 * N);
        executor.reserve().unwrap();
        let buffers = buffers(&mut Script::default());
        Self { executor, uploads, steps, buffers }
    }

    fn feed(&mut self, place: usize, value: f64) {
        let bytes = value.to_le_bytes().repeat(N);
        let (script, buffer) = (self.uploads[place], self.buffers.host[place]);
        self.executor.write(script, buffer, &bytes).unwrap();
    }

    fn result(&mut self) -> f64 {
        let mut bytes = vec![0; 8 * N];
        self.executor.read(self.steps[0], self.buffers.down, &mut bytes).unwrap();
        let values = RefTensor::from_bytes(DType::F64, &[N], &bytes).unwrap().values();
        assert!(values.iter().all(|value| *value == values[0]));
        values[0]
    }
}

/// While a step is under way, the next batch goes up on a lane of its own and arrives.
#[test]
fn the_next_batch_is_uploaded_while_a_step_runs() {
    let mut pipe = Pipe::new(cpu());
    pipe.feed(0, 1.0);
    pipe.executor.run(pipe.uploads[0]).unwrap();
    for number in 0..6 {
        let (now, next) = (number % 2, (number + 1) % 2);
        pipe.executor.engine().hold();
        pipe.executor.begin(pipe.steps[now]).unwrap();
        pipe.feed(next, number as f64 + 2.0);
        pipe.executor.begin(pipe.uploads[next]).unwrap();
        // The step cannot have ended: none of its programs has started.
        pipe.executor.end(pipe.uploads[next]).unwrap();
        pipe.executor.engine().release();
        pipe.executor.end(pipe.steps[now]).unwrap();
        assert_eq!(pipe.result(), 2.0 * (number as f64 + 1.0));
    }
}

/// The same script on engines that do everything when they are told to, or late.
#[test]
fn copies_between_tiers_run_on_every_engine() {
    fn twice<E: Engine>(engine: E) -> f64 {
        let mut pipe = Pipe::new(engine);
        pipe.feed(1, 3.0);
        pipe.executor.run(pipe.uploads[1]).unwrap();
        pipe.executor.run(pipe.steps[1]).unwrap();
        pipe.result()
    }
    assert_eq!(twice(CpuEngine::new(1).unwrap()), 6.0);
    assert_eq!(twice(CpuEngine::new(2).unwrap()), 6.0);
    assert_eq!(twice(ReferenceEngine::new()), 6.0);
    assert_eq!(twice(cpu()), 6.0);
    for seed in 0..4 {
        assert_eq!(twice(Late::new(ReferenceEngine::new(), seed)), 6.0);
        assert_eq!(twice(Late::new(cpu(), seed)), 6.0);
    }
}

/// What is written in other tiers is measured as on the device.
#[test]
fn copies_are_observed() {
    fn observed<E: Engine>(engine: E) {
        let mut pipe = Pipe::new(engine);
        let id = pipe.steps[0];
        pipe.executor.run(id).unwrap();
        let written = pipe.executor.observe(id).unwrap();
        let plan = pipe.executor.plan(id);
        assert_eq!((&written.peaks, &written.peaks_by_tier), (&plan.peaks, &plan.peaks_by_tier));
        assert_eq!(plan.peak_in(Tier::Host, Category::Inputs), 3 * 8 * N);
    }
    observed(cpu());
    observed(CpuEngine::new(2).unwrap());
    observed(ReferenceEngine::new());
}

/// Nobody may begin a step again that is under way.
#[test]
fn a_step_is_begun_once() {
    fn again<E: Engine>(engine: E) {
        let mut pipe = Pipe::new(engine);
        pipe.executor.begin(pipe.uploads[0]).unwrap();
        let error = pipe.executor.begin(pipe.uploads[0]).unwrap_err().to_string();
        assert!(error.contains("before it has ended"), "{error}");
        pipe.executor.end(pipe.uploads[0]).unwrap();
        pipe.executor.run(pipe.uploads[0]).unwrap();
    }
    again(cpu());
    again(CpuEngine::new(1).unwrap());
}

/// Times of copies and programs are the device's, and fit their order.
#[test]
fn a_device_notes_when_calls_happened() {
    let mut pipe = Pipe::new(cpu());
    pipe.feed(0, 1.0);
    pipe.executor.run(pipe.uploads[0]).unwrap();
    let timed = pipe.executor.run_traced(pipe.steps[0], std::time::Instant::now()).unwrap();
    assert_eq!(timed.iter().map(|t| t.action).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(timed[4].lane, Lane::Down);
    for pair in timed.windows(2) {
        assert!(pair[0].issued <= pair[0].started && pair[0].started <= pair[0].ended);
        assert!(pair[0].ended <= pair[1].started, "{pair:?}");
    }
}

/// A step whose calls wait for later ones is refused when it is prepared.
#[test]
fn a_step_that_waits_for_itself_is_refused() {
    fn refused<E: Engine>(mut engine: E) -> String {
        let program = doubling();
        let slots = Slots::assign_for(&program, &*engine.requirements());
        let kernel = std::sync::Arc::new(engine.compile(&program, &slots, &[0]).unwrap());
        engine.reserve(Tier::Device, 16 * N).unwrap();
        let call = KernelCall {
            kernel,
            inputs: vec![Span::device(0, 8 * N)],
            outputs: vec![Target { span: Span::device(8 * N, 8 * N), add: false }],
            workspace: Span::default(),
            lane: Lane::Compute,
            after: vec![0],
        };
        engine.prepare([call].into()).err().unwrap().to_string()
    }
    for error in [refused(cpu()), refused(CpuEngine::new(1).unwrap())] {
        assert!(error.contains("call 0 waits"), "{error}");
    }
}
