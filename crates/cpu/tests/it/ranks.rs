//! Every op in random legal layouts, and every collective, on ranks that are threads.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;

use phalanx_comm::{
    CommError, Communicator, Launcher, LocalRank, Options, RankPool, SharedWorld, Streams, Threads,
};
use phalanx_cpu::{CpuEngine, CpuRequirements};
use phalanx_engine::Counters;
use phalanx_ir::ops::{Collective, CollectiveKind};
use phalanx_ir::{
    Axis, DType, Exchange, Form, Layout, Mesh, Op, OpDef, Phase, Program, Role, TensorType, text,
};
use phalanx_reference::RefTensor;
use phalanx_testing::asked_seeds;
use phalanx_testing::cases::Dice;
use phalanx_testing::instances::{self as cases, OpInstance, tolerance};
use phalanx_testing::layouts::random_mesh;
use phalanx_testing::threads::{Ranks, furthest, random_inputs};

fn engine(threads: usize) -> impl Fn(Box<dyn Communicator>) -> CpuEngine + Sync {
    move |endpoint| CpuEngine::on_rank(threads, endpoint).unwrap()
}

/// Random layouts of one op; says how many were legal and ran.
fn check(case: &OpInstance, seeds: std::ops::Range<u64>, threads: usize) -> usize {
    let mut ranks = Ranks::new(engine(threads));
    let ran = case.in_random_layouts(seeds, &mut ranks);
    ran.unwrap_or_else(|why| panic!("{threads} threads: {why}"))
}

/// The seeds that each op is tried with; others are asked for by the environment.
fn seeds(usual: std::ops::Range<u64>) -> std::ops::Range<u64> {
    asked_seeds("PHALANX_LAYOUT_SEEDS").unwrap_or(usual)
}

#[test]
fn every_op_in_random_layouts() {
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    for case in cases::every() {
        let found = check(&case, seeds(0..40), 1);
        *ran.entry(case.op.name()).or_default() += found;
    }
    for (name, count) in &ran {
        assert!(*count >= 5, "only {count} legal layouts of {name} were found: {ran:?}");
    }
}

#[test]
fn every_op_on_two_threads_per_rank() {
    for case in cases::every() {
        check(&case, seeds(1000..1008), 2);
    }
}

/// A random collective and an operand that it can act on.
fn random_collective(dice: &mut Dice) -> Option<(Mesh, TensorType, Collective)> {
    let mesh = random_mesh(dice);
    let form = if dice.percent(25) { Form::Unit } else { Form::Tensor };
    let rank = if form == Form::Unit { 1 } else { 1 + dice.below(4) };
    let mut axes: Vec<Axis> = mesh.axes().map(|(axis, _)| axis).collect();
    axes.sort_by_key(|_| dice.below(1000));
    let mut dims = vec![Vec::new(); rank];
    let mut partial = std::collections::BTreeSet::new();
    for &axis in &axes {
        match dice.below(4) {
            0 => {}
            1 => drop(partial.insert(axis)),
            _ => dims[dice.below(rank)].push(axis),
        }
    }
    // Extents that every placement of every axis divides.
    let all: usize = mesh.ranks();
    let shape: Vec<usize> = (0..rank).map(|_| 1 + dice.below(2 * all + 3)).collect();
    let padded: Vec<usize> = shape.iter().map(|&n| n.next_multiple_of(all)).collect();
    let dtype = dice.pick(&[DType::F64, DType::F64, DType::F32, DType::Bf16]);
    let mut ty = TensorType::new(dtype, shape).with_padded(padded).ok()?;
    let shardings = (dims.into_iter())
        .map(|axes| phalanx_ir::layout::Sharding { axes, ..Default::default() })
        .collect();
    (ty.form, ty.layout) = (form, Layout::new(shardings, partial).ok()?);
    let (dim, to) = (dice.below(rank), dice.below(rank));
    let suffix = |ty: &TensorType, dice: &mut Dice| {
        let axes = ty.layout.axes(dim);
        axes[dice.below(axes.len().max(1))..].to_vec()
    };
    let some = axes[dice.below(axes.len())..].to_vec();
    let (kind, axes) = match dice.below(7) {
        0 => (CollectiveKind::AllGather { dim }, suffix(&ty, dice)),
        1 => (CollectiveKind::ReduceScatter { dim }, ty.layout.partial().iter().copied().collect()),
        2 => (CollectiveKind::AllReduce, ty.layout.partial().iter().copied().collect()),
        3 if dim != to => (CollectiveKind::AllToAll { from: dim, to }, suffix(&ty, dice)),
        4 => (CollectiveKind::Shard { dim }, some),
        5 => (CollectiveKind::ToPartial, some),
        _ => (CollectiveKind::Permute { dim }, some),
    };
    let start = dice.percent(40);
    let cut = ty.shape.len() == 1
        && matches!(
            kind,
            CollectiveKind::AllGather { .. }
                | CollectiveKind::ReduceScatter { .. }
                | CollectiveKind::AllReduce
        );
    let pieces = if cut { 1 + dice.below(4) } else { 1 };
    let collective = Collective { start, pieces, ..Collective::new(kind, axes) };
    (!collective.axes.is_empty() && collective.result(&ty, &mesh).is_ok())
        .then_some((mesh, ty, collective))
}

/// A collective changes how a value lies, and not the value.
#[test]
fn every_collective_keeps_the_value() {
    let mut ran: BTreeMap<String, usize> = BTreeMap::new();
    let mut crews = [1, 2].map(|threads| Ranks::new(engine(threads)));
    for seed in seeds(0..1500) {
        let mut dice = Dice::new(seed);
        let Some((mesh, ty, collective)) = random_collective(&mut dice) else { continue };
        let name = collective.name().to_owned();
        let mut program = Program::new(format!("{name} on {mesh}"), mesh.clone());
        let (dtype, start) = (ty.dtype, collective.start);
        let x = program.input("x", Role::Data, ty);
        // The operand is made by the program, so that its memory could be used again too soon.
        let twice: Op = phalanx_ir::ops::Scale { by: 2.0 }.into();
        let made = program.push(twice.clone(), &[x], Phase::F).unwrap()[0];
        let mut y = program.push(collective.into(), &[made], Phase::F).unwrap()[0];
        if start {
            // Something to do meanwhile.
            let other = program.push(twice, &[x], Phase::F).unwrap()[0];
            program.output("other", Role::Probe, other);
            let done = Collective::new(CollectiveKind::Done, vec![]);
            y = program.push(done.into(), &[y], Phase::F).unwrap()[0];
        }
        program.output("y", if dice.percent(50) { Role::Gradient } else { Role::Probe }, y);
        phalanx_ir::verify(&program).unwrap();
        let inputs = random_inputs(&program, 0, seed);
        let found = (crews[dice.below(2)].run(&program, &inputs, None))
            .unwrap_or_else(|why| panic!("seed {seed}: {why}\n{program}"));
        let values: Vec<f64> = inputs[0].values().iter().map(|x| 2.0 * x).collect();
        let expected = RefTensor::new(dtype, inputs[0].shape(), &values).unwrap();
        for found in &found {
            let off = furthest(found, &expected);
            assert!(off <= 8.0 * tolerance(dtype), "seed {seed}: off by {off:e}\n{program}");
        }
        *ran.entry(name).or_default() += 1;
    }
    let enough = ran.len() == 14 && ran.values().all(|&n| n >= 5);
    assert!(enough, "some collectives were hardly tried: {ran:?}");
}

/// The bytes of the exchange inside an op are those that its types predict.
#[test]
fn an_op_exchanges_what_its_types_say() {
    let program = text::parse(
        "mesh a=2 b=2
program t {
  x: data f64[6,12]{0:a 1:b}
  targets: data i32[6]{0:a}
  %2, %3 = cross_entropy(x, targets) : f64[6]{0:a}, f64[6]{0:a}
  %4 = softmax(x) : f64[6,12]{0:a 1:b}
  return nll: probe %2
  return y: probe %4
}
",
    )
    .unwrap();
    phalanx_ir::verify(&program).unwrap();
    let predicted: usize = (program.instrs().iter())
        .filter_map(|i| Exchange::of(&program, i))
        .map(|e| e.elements() * e.dtype.size() * (program.mesh().count(&e.axes) - 1))
        .sum();
    let slots = phalanx_script::Slots::assign_for(&program, &CpuRequirements::default());
    let inputs = random_inputs(&program, 12, 1);
    let make = |endpoint| Ok::<_, String>(engine(1)(endpoint));
    let launchers: [&dyn Launcher; 3] = [&Threads::new(4), &Streams::new(4), &Attached(4)];
    for launcher in launchers {
        let mut crew = RankPool::new(launcher, make).unwrap();
        let counted = crew.run(|rank, engine: &mut CpuEngine| {
            run_once(engine, rank, &program, &slots, &inputs);
            let moved = engine.moved();
            let gathers = moved.iter().filter(|(route, _)| route.op == "all_gather");
            Ok::<_, String>(gathers.map(|(_, moved)| moved.bytes as usize).sum::<usize>())
        });
        assert_eq!(counted.unwrap(), vec![predicted; 4]);
    }
}

/// Ranks that see only shared memory of each other, as processes do.
struct Attached(usize);

impl Launcher for Attached {
    fn ranks(&self) -> usize {
        self.0
    }

    fn launch(&self) -> Result<Vec<LocalRank>, CommError> {
        let world = SharedWorld::create(self.0, &Options::default())?;
        let fd = world.fd().as_raw_fd();
        (0..self.0).map(|rank| SharedWorld::attach(fd, rank, Options::default())).collect()
    }
}

fn run_once(
    engine: &mut CpuEngine,
    rank: usize,
    program: &Program,
    slots: &phalanx_script::Slots,
    inputs: &[RefTensor],
) {
    use phalanx_engine::{Args, Engine, Span, Target};
    let kernel = engine.compile(program, slots, &[0, 1, 2, 3]).unwrap();
    engine.reserve(phalanx_script::Tier::Device, 1 << 16).unwrap();
    let span = |i: usize| Span::device(i * 4096, 4096);
    let ins: Vec<Span> = (0..inputs.len()).map(span).collect();
    for ((port, tensor), span) in program.inputs().iter().zip(inputs).zip(&ins) {
        let ty = program.ty(port.value);
        let bytes = phalanx_testing::threads::shard(tensor, ty, program.mesh(), rank);
        engine.upload(Span { bytes: bytes.len(), ..*span }, &bytes).unwrap();
    }
    let outs: Vec<Target> = (0..program.outputs().len())
        .map(|i| Target { span: span(inputs.len() + i), add: false })
        .collect();
    let workspace = Span::device(8 * 4096, slots.extent);
    let args = Args { inputs: &ins, outputs: &outs, workspace };
    engine.launch(&kernel, &args, phalanx_script::Lane::Compute, &[]).unwrap();
}
