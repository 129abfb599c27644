//! Partitioned programs on ranks that are threads: whole tensors in, whole tensors out.
//!
//! Every rank gets its shard of each input, with poison in padding and random summands for partial
//! sums, runs the program on its own engine, and returns its part of each output. These are
//! assembled: replicas must be equal bit for bit, summands are added, and padding is ignored.

use std::collections::BTreeMap;
use std::time::Duration;

use phalanx_call::{Lane, Slots, Tier};
use phalanx_comm::{Communicator, Options, PoolFailure, RankPool, Threads};
use phalanx_engine::{Args, Engine, Span, Target};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Mesh, Program, Role, TensorType};
use phalanx_reference::RefTensor;

/// Ranks that are threads, each with an engine, and outlive the programs that they run.
pub struct Ranks<E, F> {
    make: F,
    /// By number of ranks.
    crews: BTreeMap<usize, RankPool<E>>,
}

impl<E: Engine + Send, F: Fn(Box<dyn Communicator>) -> E + Sync> Ranks<E, F> {
    /// No ranks yet. `make` makes a rank's engine from its endpoint.
    pub fn new(make: F) -> Self {
        Self { make, crews: BTreeMap::new() }
    }

    /// Runs a program on as many ranks as its mesh has; inputs are given in the order of the
    /// program's ports.
    ///
    /// If `before` is given, gradient outputs are first filled with that number, and results are
    /// added.
    pub fn run(
        &mut self,
        program: &Program,
        inputs: &[RefTensor],
        before: Option<f64>,
    ) -> Result<Vec<RefTensor>, String> {
        let mesh = program.mesh();
        let mut crew = match self.crews.remove(&mesh.ranks()) {
            Some(crew) => crew,
            None => {
                let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
                let make = |endpoint| Ok::<E, String>((self.make)(endpoint));
                RankPool::new(&Threads { ranks: mesh.ranks(), options }, make).map_err(told)?
            }
        };
        // After a failure every communication of a worker pool fails, so it is not kept.
        let work = |rank, engine: &mut E| one_rank(program, inputs, before, rank, engine);
        let found: Vec<Vec<Vec<u8>>> = crew.run(work).map_err(told)?;
        self.crews.insert(mesh.ranks(), crew);
        (program.outputs().iter().enumerate())
            .map(|(i, port)| {
                let parts: Vec<&[u8]> = found.iter().map(|outputs| outputs[i].as_slice()).collect();
                assemble(program.ty(port.value), mesh, &parts)
                    .map_err(|e| format!("{}: {e}", port.name))
            })
            .collect()
    }
}

fn told(lost: PoolFailure<String>) -> String {
    lost.failure.to_string()
}

/// One rank: its shards in, its shards out.
fn one_rank<E: Engine>(
    program: &Program,
    inputs: &[RefTensor],
    before: Option<f64>,
    rank: usize,
    engine: &mut E,
) -> Result<Vec<Vec<u8>>, String> {
    let mesh = program.mesh();
    let slots = Slots::assign_for(program, &*engine.requirements());
    let ranks: Vec<usize> = (0..mesh.ranks()).collect();
    let kernel = engine.compile(program, &slots, &ranks).map_err(|e| e.to_string())?;
    let mut end = 0;
    let mut place = |ty: &TensorType| {
        let span = Span::device(end, ty.local_bytes(mesh));
        end = span.end().next_multiple_of(64);
        span
    };
    let ins: Vec<Span> = program.inputs().iter().map(|p| place(program.ty(p.value))).collect();
    let adds = |role| before.is_some() && matches!(role, Role::Gradient | Role::Cotangent);
    let outs: Vec<Target> = (program.outputs().iter())
        .map(|p| Target { span: place(program.ty(p.value)), add: adds(p.role) })
        .collect();
    let workspace = Span::device(end, slots.extent);
    let fail = |e: phalanx_engine::EngineError| e.to_string();
    let all = Span::device(0, workspace.end());
    engine.reserve(Tier::Device, all.bytes).map_err(fail)?;
    // All other memory is garbage.
    engine.upload(all, &vec![0xFF; all.bytes]).map_err(fail)?;
    for ((port, tensor), span) in program.inputs().iter().zip(inputs).zip(&ins) {
        let bytes = shard(tensor, program.ty(port.value), mesh, rank);
        engine.upload(*span, &bytes).map_err(fail)?;
    }
    for (port, target) in program.outputs().iter().zip(&outs).filter(|(_, t)| t.add) {
        let ty = program.ty(port.value);
        let values = vec![before.unwrap_or(0.0); ty.elements()];
        let first = RefTensor::new(ty.dtype, &ty.shape, &values).map_err(|e| e.to_string())?;
        engine.upload(target.span, &shard(&first, ty, mesh, rank)).map_err(fail)?;
    }
    let args = Args { inputs: &ins, outputs: &outs, workspace };
    let event = engine.launch(&kernel, &args, Lane::Compute, &[]).map_err(fail)?;
    engine.wait(event).map_err(fail)?;
    (program.outputs().iter().zip(&outs))
        .map(|(port, target)| {
            let mut bytes = vec![0; target.span.bytes];
            engine.download(target.span, &mut bytes).map_err(fail)?;
            if !target.add {
                all_written(program.ty(port.value), &bytes)?;
            }
            Ok(bytes)
        })
        .collect()
}

/// Fails if some element of a result, padding among them, still holds what was there before it was
/// computed: everything that is planned to be written must be written.
fn all_written(ty: &TensorType, bytes: &[u8]) -> Result<(), String> {
    let untouched = |element: &[u8]| element.iter().all(|&byte| byte == 0xFF);
    match bytes.chunks_exact(ty.dtype.size()).position(untouched) {
        None => Ok(()),
        Some(at) => Err(format!("element {at} of {ty} was not written")),
    }
}

/// What a rank holds of a value, as bytes.
pub fn shard(tensor: &RefTensor, ty: &TensorType, mesh: &Mesh, rank: usize) -> Vec<u8> {
    let values = tensor.values();
    let axes: Vec<_> = ty.layout.partial().iter().copied().collect();
    let (shares, own) = (mesh.count(&axes), mesh.shard(rank, &axes));
    let noise = |share: usize, at: usize| {
        Stream::named(share as u64, "share of a partial sum").normal(at as u64)
    };
    let poison = if ty.dtype.is_float() { f64::NAN } else { f64::from(i32::MAX) };
    let local: Vec<f64> = (places(ty, mesh, rank).into_iter())
        .map(|place| match place {
            None => poison,
            // All summands but the last are noise; the last makes the sum right.
            Some(at) if own + 1 < shares => noise(own, at),
            Some(at) => values[at] - (0..own).map(|share| noise(share, at)).sum::<f64>(),
        })
        .collect();
    let shape = ty.local_shape(mesh);
    RefTensor::new(ty.dtype, &shape, &local).unwrap().to_bytes()
}

/// A whole value from what each rank holds of it.
pub fn assemble(ty: &TensorType, mesh: &Mesh, parts: &[&[u8]]) -> Result<RefTensor, String> {
    let axes: Vec<_> = ty.layout.partial().iter().copied().collect();
    let size = ty.dtype.size();
    // For each summand and element: the first rank that has it, and its value.
    type Given<'a> = Option<(usize, &'a [u8])>;
    let mut found: Vec<Vec<Given<'_>>> = vec![vec![None; ty.elements()]; mesh.count(&axes)];
    for (rank, bytes) in parts.iter().enumerate() {
        let share = &mut found[mesh.shard(rank, &axes)];
        for (local, place) in places(ty, mesh, rank).into_iter().enumerate() {
            let Some(at) = place else { continue };
            let element = &bytes[local * size..][..size];
            let (first, other) = *share[at].get_or_insert((rank, element));
            if other != element {
                return Err(format!(
                    "ranks {first} and {rank} hold {other:?} and {element:?} of element {at} of {ty}"
                ));
            }
        }
    }
    let mut sum = vec![0.0; ty.elements()];
    for share in found {
        let bytes: Option<Vec<u8>> = share
            .into_iter()
            .map(|e| e.map(|(_, e)| e.to_vec()))
            .collect::<Option<Vec<_>>>()
            .map(|e| e.concat());
        let bytes = bytes.ok_or_else(|| format!("no rank holds some element of {ty}"))?;
        let tensor =
            RefTensor::from_bytes(ty.dtype, &ty.shape, &bytes).map_err(|e| e.to_string())?;
        sum.iter_mut().zip(tensor.values()).for_each(|(sum, x)| *sum += x);
    }
    RefTensor::new(ty.dtype, &ty.shape, &sum).map_err(|e| e.to_string())
}

/// For each local element: its number in the whole value, or nothing for padding.
fn places(ty: &TensorType, mesh: &Mesh, rank: usize) -> Vec<Option<usize>> {
    let mut found = vec![Some(0)];
    for (dim, &size) in ty.shape.iter().enumerate() {
        let part = ty.part(dim, mesh, rank);
        let along = |at: Option<usize>| {
            (0..part.len()).map(move |local| {
                let global = part.global(local);
                at.filter(|_| global < size).map(|at| at * size + global)
            })
        };
        found = found.into_iter().flat_map(along).collect();
    }
    found
}

/// How far results are from the expected ones: the largest difference, relative to the largest
/// number expected or, if that is larger, to one. Equal infinities do not differ.
pub fn furthest(found: &RefTensor, expected: &RefTensor) -> f64 {
    let (found, expected) = (found.values(), expected.values());
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(1.0f64, |m, x| m.max(x.abs()));
    let apart = |(x, y): (&f64, &f64)| if x == y { 0.0 } else { (x - y).abs() };
    let differences = found.iter().zip(&expected).map(apart);
    differences.fold(0.0, |m: f64, d| if d.is_nan() { f64::INFINITY } else { m.max(d) }) / scale
}

/// Random tensors for a program's inputs: normal floats, ids below `ids` (for the data of that
/// type), keys for scalars of five words.
pub fn random_inputs(program: &Program, ids: u32, seed: u64) -> Vec<RefTensor> {
    (program.inputs().iter())
        .map(|port| {
            let ty = program.ty(port.value);
            let stream = Stream::named(seed, &port.name);
            match (ty.dtype, port.role) {
                (DType::I32, Role::Random) => {
                    RefTensor::from_i32(&ty.shape, &[7, 1, 3, 2, 40]).unwrap()
                }
                (DType::I32, _) => RefTensor::ids(&ty.shape, ids, stream),
                (dtype, _) => RefTensor::normal(dtype, &ty.shape, stream),
            }
        })
        .collect()
}
