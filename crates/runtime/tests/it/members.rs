//! Norms of single parameters inside units: a trust-ratio update, as LARS and LAMB make it, in several
//! instructions. Units lie in shards over data-parallel ranks, and tensor parallelism cuts their
//! parameters; each parameter must still move as if it were alone on one rank.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use phalanx_autodiff::LossSeed;
use phalanx_comm::Communicator;
use phalanx_cpu::{CpuEngine, CpuRequirements};
use phalanx_ir::ops::{
    AttentionKind, Collective, CollectiveKind, MemberScale, MemberSquares, UnaryKind,
};
use phalanx_ir::{Axis, Builder, DType, Mesh, Model, Program, Role, TensorType, verify};
use phalanx_models::{Architecture, BatchShape};
use phalanx_reference::RefTensor;
use phalanx_script::{
    Compiled, Library, Lowering, Optimizer, Precision, RankPlace, StageGroup, TrainingScript, Unit,
    World, accumulate,
};
use phalanx_spmd::strategies::{Megatron, Zero};
use phalanx_spmd::{Costs, Partition};
use phalanx_testing::threads::{Ranks, furthest, shard};
use phalanx_testing::{llama, normal};

const WIDE: DType = DType::F64;
const LR: f64 = 0.05;
const EPS: f64 = 1e-6;

/// A model on four ranks: its units, and how its parameters lie.
struct Laid {
    model: Model,
    mesh: Mesh,
    units: Vec<Unit>,
    /// By parameter.
    types: BTreeMap<usize, TensorType>,
}

impl Laid {
    fn new(stage: u8) -> Self {
        let small = llama(AttentionKind::Flash, false);
        let model = small.model(BatchShape { batch: 4, seq: 4 }, WIDE).unwrap();
        let mesh: Mesh = "dp=2 tp=2".parse().unwrap();
        let (zero, megatron) = (Zero::stage(stage), Megatron::default());
        let partition =
            Partition::new(&model, &mesh, &[&zero, &megatron], Costs::default()).unwrap();
        let lowering = Lowering {
            weights: None,
            grads: WIDE,
            seed: LossSeed::One,
            recompute: phalanx_autodiff::Recompute::None,
            loss_chunk: NonZeroUsize::new(5).unwrap(),
        };
        let compiled = lowering.compile(&model, Some(&partition)).unwrap();
        let units = units(&model, &compiled, &partition);
        let of_instances = model.instances().iter().flat_map(|instance| {
            let ty = |local: &str| compiled.param_type(instance.segment, local).unwrap().clone();
            instance.params.iter().map(move |(local, &param)| (param, ty(local)))
        });
        let types = of_instances.collect();
        Self { mesh: partition.mesh().clone(), units, types, model }
    }

    /// A whole unit of these parameters, with zeros where it holds none of their elements.
    fn pack(&self, unit: &Unit, params: &BTreeMap<usize, RefTensor>) -> RefTensor {
        let mut all = vec![0.0; unit.elements * self.mesh.count(&unit.blocks)];
        for rank in 0..self.mesh.ranks() {
            let block = self.mesh.shard(rank, &unit.blocks) * unit.elements;
            for member in &unit.members {
                let (param, ty) = (&params[&member.param], &self.types[&member.param]);
                let bytes = shard(param, ty, &self.mesh, rank);
                let own = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_ne_bytes(*b));
                assert_eq!(own.len(), member.elements);
                let target = &mut all[block + member.offset..][..member.elements];
                // A parameter's padding is given as NaN.
                (target.iter_mut().zip(own)).for_each(|(x, own)| {
                    *x = if own.is_nan() { 0.0 } else { own };
                });
            }
        }
        RefTensor::new(WIDE, &[all.len()], &all).unwrap()
    }

    /// Numbers for the parameters of a unit, of very different sizes.
    fn values(&self, unit: &Unit, what: &str) -> BTreeMap<usize, RefTensor> {
        let value = |param: usize| {
            let of = &self.model.params()[param];
            let drawn = normal(&format!("{what} {}", of.name), &of.shape);
            let size = 1.0 + 10.0 * param as f64;
            let values: Vec<f64> = drawn.values().iter().map(|x| size * x).collect();
            RefTensor::new(WIDE, &of.shape, &values).unwrap()
        };
        unit.members.iter().map(|m| (m.param, value(m.param))).collect()
    }
}

fn units(model: &Model, compiled: &Compiled, partition: &Partition) -> Vec<Unit> {
    let turns = accumulate(model.instances().len(), 1);
    let (mesh, sharing) = (partition.mesh(), partition.sharing());
    let stage_group = StageGroup { compiled, turns: &turns, mesh, sharing, ranks: &[0, 1, 2, 3] };
    let library = Arc::new(Library::new(Arc::new(CpuRequirements::default())));
    let world = World::new(model, vec![stage_group], library).unwrap();
    let training = TrainingScript {
        world: &world,
        at: RankPlace::default(),
        precision: Precision { weights: WIDE, grads: WIDE, state: WIDE, split: false },
        optimizer: Optimizer::sgd(0.0),
        clip: None,
        scaling: None,
    };
    training.state().unwrap().units
}

/// w' = w − lr · |w| / (|g| + eps) · g, for each member by itself.
fn update(unit: &Unit, mesh: &Mesh) -> Program {
    let b = Builder::on("trust ratio", WIDE, mesh.clone());
    let own = |name: &str, role| b.input(name, role, unit.updated(WIDE, mesh));
    let (w, g) = (own("w", Role::State), own("g", Role::Gradient));
    let [of_w, of_g] = [w, g].map(|x| {
        let squares = b.apply(MemberSquares { bounds: unit.bounds() }, &[x]);
        let partial = squares.ty().layout.partial().clone();
        assert_eq!(partial, unit.blocks.iter().chain(&unit.facts.axes).copied().collect());
        all_reduce(squares, partial.into_iter().collect()).sqrt()
    });
    let ratio = of_w * of_g.shift(EPS).unary(UnaryKind::Recip);
    // The scaled gradient is read by nothing else, so its members are scaled where it lies.
    let step = b.apply(MemberScale { bounds: unit.bounds() }, &[g.scale(-LR), ratio]);
    b.port("new", Role::State, w + step);
    b.probe("norms of w", of_w);
    b.probe("norms of g", of_g);
    b.finish().unwrap()
}

fn all_reduce(value: phalanx_ir::Tensor<'_>, axes: Vec<Axis>) -> phalanx_ir::Tensor<'_> {
    match axes.is_empty() {
        true => value,
        false => value.builder().apply(Collective::new(CollectiveKind::AllReduce, axes), &[value]),
    }
}

fn norm(tensor: &RefTensor) -> f64 {
    tensor.values().iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The same for each parameter, whole and alone.
fn alone(w: &RefTensor, g: &RefTensor) -> RefTensor {
    let ratio = norm(w) / (norm(g) + EPS);
    let new =
        w.values().iter().zip(g.values()).map(|(w, g)| w - LR * ratio * g).collect::<Vec<_>>();
    RefTensor::new(WIDE, w.shape(), &new).unwrap()
}

fn norms(unit: &Unit, params: &BTreeMap<usize, RefTensor>) -> RefTensor {
    let all: Vec<f64> = unit.members.iter().map(|m| norm(&params[&m.param])).collect();
    RefTensor::new(WIDE, &[all.len()], &all).unwrap()
}

#[test]
fn parameters_inside_units_are_updated_by_their_own_norms() {
    let cpu = |threads| {
        Ranks::new(move |endpoint: Box<dyn Communicator>| {
            CpuEngine::on_rank(threads, endpoint).unwrap()
        })
    };
    let (mut one, mut three) = (cpu(1), cpu(3));
    // By how many axes units are cut and dealt.
    let mut seen = BTreeMap::new();
    for stage in [0, 1] {
        let laid = Laid::new(stage);
        for unit in &laid.units {
            let program = update(unit, &laid.mesh);
            verify(&program).unwrap();
            let [w, g] = ["w", "g"].map(|what| laid.values(unit, what));
            let new = w.iter().map(|(param, w)| (*param, alone(w, &g[param]))).collect();
            let expected = [laid.pack(unit, &new), norms(unit, &w), norms(unit, &g)];
            let given = [laid.pack(unit, &w), laid.pack(unit, &g)];
            // Ranks that hold the same are compared bit for bit, and so all ranks' norms are.
            let found = one.run(&program, &given, None).unwrap();
            assert_eq!(found, three.run(&program, &given, None).unwrap(), "any number of threads");
            let [w, g] = given;
            let interpreted = phalanx_reference::run(&program, &[("w", w), ("g", g)]).unwrap();
            for (i, expected) in expected.iter().enumerate() {
                assert!(furthest(&found[i], expected) < 1e-12, "{}: {program}", unit.name);
                assert!(furthest(&interpreted[i].1, expected) < 1e-12, "{}: {program}", unit.name);
            }
            let kind = (unit.blocks.len(), unit.facts.axes.len());
            let most = seen.entry(kind).or_insert(0);
            *most = unit.members.len().max(*most);
        }
    }
    // Cut or not, dealt or not, and some unit with several members in each case.
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    assert!(seen.values().all(|&members| members > 1), "{seen:?}");
}
