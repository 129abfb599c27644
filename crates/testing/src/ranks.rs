//! A partitioned program on simulated ranks: what every rank would hold, computed in one thread.
//!
//! Each rank has a block of every value, padding poisoned with NaN. Ops run on the valid elements of
//! local blocks, through the reference interpreter; collectives move blocks between ranks and are
//! written here a second time, after their definition. Ops that need to know where a block lies
//! (causal attention over a part of a sequence, a part of a vocabulary, dropout) see the parts along
//! those factors together, and give each rank its own: so this checks layouts and collectives, not
//! such kernels.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::layout::Sharding;
use phalanx_ir::ops::{Broadcast, Collective, CollectiveKind, Fill, Reshape};
use phalanx_ir::rule::FactorKind;
use phalanx_ir::{Axis, DType, Instr, Mesh, Op, OpDef, Phase, Program, Role, TensorType, ValueId};
use phalanx_reference::{Tensor, run};

/// A dense array of numbers, whatever their element type.
#[derive(Clone, Debug, PartialEq)]
struct Block {
    shape: Vec<usize>,
    data: Vec<f64>,
}

/// Runs a program on all ranks of its mesh and returns its outputs as whole tensors, partial sums
/// summed. Panics where ranks that should hold the same do not.
pub fn run_on_ranks(
    program: &Program,
    inputs: &BTreeMap<String, Tensor>,
) -> BTreeMap<String, Tensor> {
    run_with(program, inputs, None)
}

/// A mistake in how collectives move blocks. Tests plant them to see that cases find them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// Gathered blocks are put together in the reverse order.
    GatherOrder,
    /// Of a scattered sum, ranks take blocks in the reverse order.
    ScatterOrder,
    /// Exchanged blocks are put together in the reverse order.
    ExchangeOrder,
    /// Slices are taken in the reverse order.
    ShardOrder,
    /// A permutation moves nothing.
    NoPermute,
    /// Every rank keeps what only the first should.
    PartialEverywhere,
    /// The last rank's share of a sum is left out.
    ForgottenShare,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 7] = [
        Bug::GatherOrder,
        Bug::ScatterOrder,
        Bug::ExchangeOrder,
        Bug::ShardOrder,
        Bug::NoPermute,
        Bug::PartialEverywhere,
        Bug::ForgottenShare,
    ];
}

/// The same with a planted bug.
pub fn run_with(
    program: &Program,
    inputs: &BTreeMap<String, Tensor>,
    bug: Option<Bug>,
) -> BTreeMap<String, Tensor> {
    let mesh = program.mesh();
    let mut values: Vec<Vec<Block>> = vec![Vec::new(); program.values().len()];
    for port in program.inputs() {
        let tensor = inputs.get(&port.name).unwrap_or_else(|| panic!("no input `{}`", port.name));
        let ty = program.ty(port.value);
        values[port.value.index()] =
            (0..mesh.ranks()).map(|rank| scatter(tensor, ty, mesh, rank)).collect();
    }
    for instr in program.instrs() {
        let results = match &instr.op {
            Op::Collective(c) => {
                let ty = program.ty(instr.inputs[0]);
                let blocks = &values[instr.inputs[0].index()];
                vec![Exchange { mesh, ty, blocks, bug }.run(c)]
            }
            _ => compute(program, instr, &values),
        };
        for (value, blocks) in instr.outputs.iter().zip(results) {
            let expected = program.ty(*value).local_shape(mesh);
            for block in &blocks {
                assert_eq!(block.shape, expected, "{} %{}", instr.op.name(), value.0);
            }
            values[value.index()] = blocks;
        }
    }
    let whole = |v: ValueId| gather(program.ty(v), mesh, &values[v.index()]);
    program.outputs().iter().map(|p| (p.name.clone(), whole(p.value))).collect()
}

/// Every multi-index of a shape, row-major.
fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    let count: usize = shape.iter().product();
    (0..count).map(move |mut flat| {
        let mut index = vec![0; shape.len()];
        for (i, &n) in index.iter_mut().zip(shape).rev() {
            *i = flat % n;
            flat /= n;
        }
        index
    })
}

fn offset(shape: &[usize], index: &[usize]) -> usize {
    shape.iter().zip(index).fold(0, |at, (n, i)| at * n + i)
}

/// The global index of a local one.
fn global(ty: &TensorType, mesh: &Mesh, rank: usize, index: &[usize]) -> Vec<usize> {
    let dims = ty.layout.dims().iter().zip(ty.padded()).zip(index);
    dims.map(|((sharding, &padded), &local)| {
        let shards = mesh.count(&sharding.axes);
        sharding.order.global(local, mesh.shard(rank, &sharding.axes), shards, padded)
    })
    .collect()
}

fn is_valid(ty: &TensorType, index: &[usize]) -> bool {
    index.iter().zip(&ty.shape).all(|(i, n)| i < n)
}

fn scatter(tensor: &Tensor, ty: &TensorType, mesh: &Mesh, rank: usize) -> Block {
    assert_eq!(tensor.shape(), ty.shape);
    let (shape, all) = (ty.local_shape(mesh), tensor.values());
    // Of a partial sum the first rank has all.
    let has = ty.layout.partial().iter().all(|&a| mesh.coordinate(rank, a) == 0);
    let data = indices(&shape).map(|index| {
        let at = global(ty, mesh, rank, &index);
        match (is_valid(ty, &at), has) {
            (false, _) => f64::NAN,
            (true, false) => 0.0,
            (true, true) => all[offset(&ty.shape, &at)],
        }
    });
    Block { data: data.collect(), shape }
}

/// The whole tensor; replicas must agree.
fn gather(ty: &TensorType, mesh: &Mesh, blocks: &[Block]) -> Tensor {
    let sharing: BTreeSet<Axis> = ty.layout.all_axes().collect();
    let mut copies: BTreeMap<Vec<usize>, Vec<f64>> = BTreeMap::new();
    for (rank, block) in blocks.iter().enumerate() {
        let replica: Vec<usize> = (mesh.axes())
            .filter(|(axis, _)| !sharing.contains(axis))
            .map(|(axis, _)| mesh.coordinate(rank, axis))
            .collect();
        let whole = copies.entry(replica).or_insert_with(|| vec![0.0; ty.elements()]);
        for index in indices(&block.shape) {
            let at = global(ty, mesh, rank, &index);
            if is_valid(ty, &at) {
                whole[offset(&ty.shape, &at)] += block.data[offset(&block.shape, &index)];
            }
        }
    }
    let mut copies = copies.into_values();
    let first = copies.next().unwrap();
    for other in copies {
        let same = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * a.abs().max(1.0);
        assert!(first.iter().zip(&other).all(same), "replicas of {ty} differ");
    }
    Tensor::new(ty.dtype, &ty.shape, &first).unwrap()
}

/// A collective on the blocks of one value.
struct Exchange<'a> {
    mesh: &'a Mesh,
    ty: &'a TensorType,
    blocks: &'a [Block],
    bug: Option<Bug>,
}

impl Exchange<'_> {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn run(&self, c: &Collective) -> Vec<Block> {
        let ranks = 0..self.mesh.ranks();
        let reversed = match c.kind {
            CollectiveKind::AllGather { .. } => self.has(Bug::GatherOrder),
            CollectiveKind::ReduceScatter { .. } => self.has(Bug::ScatterOrder),
            CollectiveKind::AllToAll { .. } => self.has(Bug::ExchangeOrder),
            CollectiveKind::Shard { .. } => self.has(Bug::ShardOrder),
            _ => false,
        };
        let n = self.mesh.count(&c.axes);
        let group = |rank| {
            let mut group = self.mesh.group(rank, &c.axes);
            let gathers = matches!(
                c.kind,
                CollectiveKind::AllGather { .. } | CollectiveKind::AllToAll { .. }
            );
            if reversed && gathers {
                group.reverse();
            }
            group
        };
        let place = |rank| {
            let place = self.mesh.shard(rank, &c.axes);
            let cuts = matches!(
                c.kind,
                CollectiveKind::ReduceScatter { .. } | CollectiveKind::Shard { .. }
            );
            if reversed && cuts { n - 1 - place } else { place }
        };
        match c.kind {
            CollectiveKind::AllGather { dim } => {
                ranks.map(|r| concat(group(r).into_iter().map(|q| &self.blocks[q]), dim)).collect()
            }
            CollectiveKind::AllReduce => ranks.map(|r| self.sum(&group(r))).collect(),
            CollectiveKind::ReduceScatter { dim } => {
                ranks.map(|r| cut(&self.sum(&group(r)), dim, n, place(r))).collect()
            }
            CollectiveKind::AllToAll { from, to } => ranks
                .map(|r| {
                    let parts: Vec<Block> = group(r)
                        .into_iter()
                        .map(|q| cut(&self.blocks[q], to, n, place(r)))
                        .collect();
                    concat(parts.iter(), from)
                })
                .collect(),
            CollectiveKind::Shard { dim } => {
                ranks.map(|r| cut(&self.blocks[r], dim, n, place(r))).collect()
            }
            CollectiveKind::ToPartial => ranks
                .map(|r| match place(r) {
                    0 => self.blocks[r].clone(),
                    _ if self.has(Bug::PartialEverywhere) => self.blocks[r].clone(),
                    _ => Block {
                        data: vec![0.0; self.blocks[r].data.len()],
                        ..self.blocks[r].clone()
                    },
                })
                .collect(),
            CollectiveKind::Permute { .. } if self.has(Bug::NoPermute) => self.blocks.to_vec(),
            CollectiveKind::Permute { dim } => {
                ranks.map(|r| self.blocks[self.holder(r, dim, &c.axes)].clone()).collect()
            }
            CollectiveKind::Done => self.blocks.to_vec(),
        }
    }

    fn sum(&self, group: &[usize]) -> Block {
        let mut sum = self.blocks[group[0]].clone();
        let end = group.len() - usize::from(self.has(Bug::ForgottenShare));
        for &rank in &group[1..end] {
            for (a, b) in sum.data.iter_mut().zip(&self.blocks[rank].data) {
                *a += b;
            }
        }
        sum
    }

    /// A rank that holds the block which `rank` shall have when `axes` shard a dim.
    fn holder(&self, rank: usize, dim: usize, axes: &[Axis]) -> usize {
        let fits = |&other: &usize| {
            let layout = &self.ty.layout;
            let block = |r, d: usize| self.mesh.shard(r, layout.axes(d));
            (0..layout.dims().len()).all(|d| match d == dim {
                true => block(other, d) == self.mesh.shard(rank, axes),
                false => block(other, d) == block(rank, d),
            }) && (layout.partial().iter())
                .all(|&a| self.mesh.coordinate(other, a) == self.mesh.coordinate(rank, a))
        };
        (0..self.mesh.ranks()).find(fits).unwrap()
    }
}

fn concat<'a>(parts: impl Iterator<Item = &'a Block>, dim: usize) -> Block {
    let parts: Vec<&Block> = parts.collect();
    let mut shape = parts[0].shape.clone();
    let each = shape[dim];
    shape[dim] = each * parts.len();
    let data = indices(&shape).map(|mut index| {
        let part = parts[index[dim] / each];
        index[dim] %= each;
        part.data[offset(&part.shape, &index)]
    });
    Block { data: data.collect(), shape }
}

fn cut(block: &Block, dim: usize, n: usize, place: usize) -> Block {
    let mut shape = block.shape.clone();
    assert!(shape[dim].is_multiple_of(n));
    shape[dim] /= n;
    let data = indices(&shape).map(|mut index| {
        index[dim] += place * shape[dim];
        block.data[offset(&block.shape, &index)]
    });
    Block { data: data.collect(), shape }
}

/// An op on every rank.
fn compute(program: &Program, instr: &Instr, values: &[Vec<Block>]) -> Vec<Vec<Block>> {
    let mesh = program.mesh();
    let rule = program.rule(instr);
    let types = |ids: &[ValueId]| ids.iter().map(|&v| program.ty(v)).collect::<Vec<_>>();
    let (ins, outs) = (types(&instr.inputs), types(&instr.outputs));
    let assignment = rule.check(mesh, &ins, &outs).unwrap();
    let joined = joined_axes(&instr.op, &rule, &assignment);
    let mut results = vec![Vec::new(); outs.len()];
    for rank in 0..mesh.ranks() {
        let view = View { mesh, rank, joined: &joined };
        let operands: Vec<Block> = (instr.inputs.iter().zip(&ins))
            .map(|(v, ty)| view.operand(ty, &values[v.index()]))
            .collect();
        let shapes: Vec<Vec<usize>> = outs.iter().map(|ty| view.extents(ty)).collect();
        let made = apply(&instr.op, &ins, &operands, &shapes);
        for ((result, block), ty) in results.iter_mut().zip(made).zip(&outs) {
            result.push(view.result(ty, &block));
        }
    }
    results
}

/// The axes along which an op must see the parts together.
fn joined_axes(op: &Op, rule: &phalanx_ir::Rule, assignment: &[Sharding]) -> BTreeSet<Axis> {
    let names: &[&str] = match op {
        Op::Embedding(_) | Op::EmbeddingGrad(_) | Op::CrossEntropyGrad(_) => &["v"],
        Op::Attention(a) if !a.drops() => &["s"],
        Op::AttentionGrad(a) if !a.of.drops() => &["s"],
        Op::Rotary(_) => &["s"],
        _ => &[],
    };
    let all = matches!(op, Op::Dropout(_))
        || matches!(op, Op::Attention(a) if a.drops())
        || matches!(op, Op::AttentionGrad(a) if a.of.drops());
    let joined =
        rule.factors.iter().zip(assignment).filter(|(f, _)| {
            all || f.kind == FactorKind::Lowered || names.contains(&f.name.as_str())
        });
    joined.flat_map(|(_, sharding)| sharding.axes.iter().copied()).collect()
}

/// What one rank sees of values when some axes are joined.
struct View<'a> {
    mesh: &'a Mesh,
    rank: usize,
    joined: &'a BTreeSet<Axis>,
}

impl View<'_> {
    /// Whether a dim is seen whole; its axes are joined all together or not at all.
    fn whole(&self, ty: &TensorType, dim: usize) -> bool {
        let axes = ty.layout.axes(dim);
        let joined = axes.iter().filter(|a| self.joined.contains(a)).count();
        assert!(joined == 0 || joined == axes.len(), "{ty} over {:?}", self.joined);
        joined > 0
    }

    /// The valid elements that are seen, per dim.
    fn extents(&self, ty: &TensorType) -> Vec<usize> {
        let valid = ty.local_valid(self.mesh, self.rank);
        (0..valid.len()).map(|d| if self.whole(ty, d) { ty.shape[d] } else { valid[d] }).collect()
    }

    fn operand(&self, ty: &TensorType, blocks: &[Block]) -> Block {
        let shape = self.extents(ty);
        let mut out = Block { data: vec![f64::NAN; shape.iter().product()], shape };
        let joined: Vec<Axis> = self.joined.iter().copied().collect();
        for rank in self.mesh.group(self.rank, &joined) {
            let block = &blocks[rank];
            for index in indices(&block.shape) {
                let at = global(ty, self.mesh, rank, &index);
                let seen: Vec<usize> = (0..index.len())
                    .map(|d| if self.whole(ty, d) { at[d] } else { index[d] })
                    .collect();
                if is_valid(ty, &at) {
                    out.data[offset(&out.shape, &seen)] = block.data[offset(&block.shape, &index)];
                }
            }
        }
        out
    }

    /// This rank's part of a result. Of a sum over joined axes the first rank has all.
    fn result(&self, ty: &TensorType, block: &Block) -> Block {
        let shape = ty.local_shape(self.mesh);
        let partial = ty.layout.partial().intersection(self.joined);
        let has = partial.into_iter().all(|&a| self.mesh.coordinate(self.rank, a) == 0);
        let data = indices(&shape).map(|index| {
            let at = global(ty, self.mesh, self.rank, &index);
            let seen: Vec<usize> = (0..index.len())
                .map(|d| if self.whole(ty, d) { at[d] } else { index[d] })
                .collect();
            match (is_valid(ty, &at), has) {
                (false, _) => f64::NAN,
                (true, false) => 0.0,
                (true, true) => block.data[offset(&block.shape, &seen)],
            }
        });
        Block { data: data.collect(), shape }
    }
}

/// One op on blocks, through the reference interpreter.
fn apply(op: &Op, types: &[&TensorType], operands: &[Block], shapes: &[Vec<usize>]) -> Vec<Block> {
    let shape = || shapes[0].clone();
    let local: Op = match op {
        Op::Reshape(_) => Reshape { shape: shape() }.into(),
        Op::Broadcast(b) => Broadcast { shape: shape(), dims: b.dims.clone() }.into(),
        Op::Fill(f) => Fill { shape: shape(), ..f.clone() }.into(),
        other => other.clone(),
    };
    let mut program = Program::new(op.name(), Mesh::single());
    let tensors: Vec<(String, Tensor)> = (types.iter().zip(operands).enumerate())
        .map(|(i, (ty, block))| (format!("x{i}"), tensor(ty.dtype, &block.shape, &block.data)))
        .collect();
    let inputs: Vec<ValueId> = (tensors.iter())
        .map(|(name, t)| program.input(name, Role::Probe, TensorType::new(t.dtype(), t.shape())))
        .collect();
    let made = program.push(local, &inputs, Phase::F).unwrap();
    for (i, value) in made.into_iter().enumerate() {
        program.output(format!("y{i}"), Role::Probe, value);
    }
    let named: Vec<(&str, Tensor)> =
        tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    let results = run(&program, &named).unwrap();
    results
        .into_iter()
        .map(|(_, t)| Block { shape: t.shape().to_vec(), data: t.values() })
        .collect()
}

fn tensor(dtype: DType, shape: &[usize], data: &[f64]) -> Tensor {
    Tensor::new(dtype, shape, data).unwrap()
}
