//! Parameters by name, on one side; a rank's part of units of packed bytes, on the other.

use std::collections::BTreeMap;
use std::ops::Range;

use phalanx_engine::Engine;
use phalanx_ir::{DType, ElementRun, Mesh, Model, Param, TensorType};
use phalanx_models::{hf, initial_values};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{Held, Member, Ranks, Unit};

use super::numbers::{decode, encode};
use crate::error::{Error, Problem, Result};

/// Gives some values of a parameter, by their numbers in row-major order.
pub type ReadParam<'a> = dyn Fn(&Param, Range<usize>) -> Result<Vec<f64>> + Sync + 'a;

/// The initial values that the seed determines.
pub fn initial(seed: u64) -> impl Fn(&Param, Range<usize>) -> Result<Vec<f64>> + Sync {
    move |param, elements| Ok(initial_values(param, seed, elements).collect())
}

/// Values of a parameter that a rank holds.
#[derive(Clone, PartialEq, Debug)]
pub struct Piece {
    /// The parameter's number in the model.
    pub param: usize,
    /// The first one's number in the whole parameter.
    pub first: usize,
    /// The values, in the parameter's order.
    pub values: Vec<f64>,
}

/// Which part of which parameter lies where.
pub(crate) struct Store {
    script: ScriptId,
    params: Vec<Param>,
    /// By parameter: the elements that this rank holds of it, in the order of its memory.
    runs: Vec<Vec<ElementRun>>,
    units: Vec<Unit>,
}

impl Store {
    /// `types` says how programs read each parameter.
    pub(crate) fn new(
        script: ScriptId,
        model: &Model,
        types: Vec<Option<TensorType>>,
        units: Vec<Unit>,
        ranks: Ranks<'_>,
    ) -> Self {
        let Ranks { mesh, rank, .. } = ranks;
        let runs = |(ty, param): (Option<TensorType>, &Param)| match ty {
            Some(ty) => ty.local_runs(mesh, rank),
            None => whole(param).local_runs(&Mesh::single(), 0),
        };
        let params = model.params().to_vec();
        let runs = types.into_iter().zip(&params).map(runs).collect();
        Self { script, params, runs, units }
    }

    /// The model's parameters.
    pub(crate) fn params(&self) -> &[Param] {
        &self.params
    }

    /// Fills a unit's buffers, each in its own element type; padding becomes zero.
    pub(crate) fn fill<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        unit: usize,
        buffers: &[&Held],
        read: &ReadParam<'_>,
    ) -> Result<()> {
        let bytes = |held: &&Held| vec![0; held.elements.len() * held.dtype.size()];
        let mut bytes: Vec<Vec<u8>> = buffers.iter().map(bytes).collect();
        for member in &self.units[unit].members {
            let placed: Vec<Vec<Placed>> =
                buffers.iter().map(|held| self.placed(member, held)).collect();
            // One look at a parameter for all its pieces in all buffers: who gives it may have to
            // open it.
            let all = || placed.iter().flatten().map(|piece| &piece.global);
            let (Some(start), Some(end)) =
                (all().map(|r| r.start).min(), all().map(|r| r.end).max())
            else {
                continue;
            };
            let values = read_checked(read, &self.params[member.param], start..end)?;
            for ((bytes, held), placed) in bytes.iter_mut().zip(buffers).zip(placed) {
                for Placed { global, at } in placed {
                    let own = &values[global.start - start..global.end - start];
                    encode(held.dtype, own, &mut bytes[at * held.dtype.size()..]);
                }
            }
        }
        for (bytes, held) in bytes.iter().zip(buffers) {
            executor.write(self.script, held.buffer, bytes)?;
        }
        Ok(())
    }

    /// Reads one buffer of each unit.
    pub(crate) fn pieces<'a, E: Engine>(
        &self,
        executor: &mut Executor<E>,
        buffers: impl Iterator<Item = &'a Held>,
    ) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        for (unit, held) in self.units.iter().zip(buffers) {
            let size = held.dtype.size();
            let bytes = executor.script(self.script).buffers[held.buffer.0].bytes;
            let mut bytes = vec![0; bytes];
            executor.read(self.script, held.buffer, &mut bytes)?;
            for member in &unit.members {
                pieces.extend(self.placed(member, held).into_iter().map(|placed| {
                    let end = placed.at + placed.global.len();
                    let values = decode(held.dtype, &bytes[placed.at * size..end * size]);
                    Piece { param: member.param, first: placed.global.start, values }
                }));
            }
        }
        Ok(pieces)
    }

    /// The elements of a member that a buffer holds: their numbers in the whole parameter, and where
    /// in the buffer they lie.
    fn placed(&self, member: &Member, held: &Held) -> Vec<Placed> {
        let (part, at) = held.part(member);
        let runs = self.runs[member.param].iter();
        runs.filter_map(|run| {
            let start = run.local.max(part.start);
            let end = (run.local + run.len).min(part.end);
            (start < end).then(|| {
                let global = run.global + (start - run.local);
                Placed { global: global..global + (end - start), at: at + start - part.start }
            })
        })
        .collect()
    }
}

struct Placed {
    global: Range<usize>,
    at: usize,
}

/// Puts together what ranks hold, as tensors by parameter name.
pub(crate) fn assemble(
    params: &[Param],
    ranks: Vec<Vec<Piece>>,
    dtype: DType,
) -> Result<BTreeMap<String, hf::Tensor>> {
    let mut whole: Vec<Vec<f64>> = params.iter().map(|p| vec![f64::NAN; p.elements()]).collect();
    let mut found: Vec<Vec<bool>> = params.iter().map(|p| vec![false; p.elements()]).collect();
    for piece in ranks.into_iter().flatten() {
        let end = piece.first + piece.values.len();
        whole[piece.param][piece.first..end].copy_from_slice(&piece.values);
        found[piece.param][piece.first..end].fill(true);
    }
    for (param, found) in params.iter().zip(&found) {
        if let Some(missing) = found.iter().position(|found| !found) {
            return Err(Error::failed(Problem::new(format!(
                "no rank holds element {missing} of parameter `{}`",
                param.name
            ))));
        }
    }
    Ok((params.iter().zip(whole))
        .map(|(param, values)| {
            let shape = param.shape.clone();
            let tensor = match dtype {
                DType::F64 => hf::Tensor::f64(shape, values),
                _ => hf::Tensor::f32(shape, values.iter().map(|&x| x as f32).collect()),
            };
            (param.name.clone(), tensor)
        })
        .collect())
}

fn read_checked(read: &ReadParam<'_>, param: &Param, elements: Range<usize>) -> Result<Vec<f64>> {
    let expected = elements.len();
    let values = read(param, elements)?;
    if values.len() == expected {
        return Ok(values);
    }
    Err(Error::refused(Problem::new(format!(
        "parameter `{}` gives {} values where its shape {:?} asks for {expected}",
        param.name,
        values.len(),
        param.shape,
    ))))
}

fn whole(param: &Param) -> TensorType {
    TensorType::new(DType::F32, param.shape.clone())
}
