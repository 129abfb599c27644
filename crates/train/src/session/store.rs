//! Parameters by name, on one side; units of packed bytes, on the other.

use std::collections::BTreeMap;

use phalanx_engine::Engine;
use phalanx_ir::{DType, Model, Param};
use phalanx_models::{hf, initial_values};
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{Held, Unit};

use super::numbers::{decode, encode};
use crate::error::{Error, Problem, Result};

/// Gives the values of a parameter, row-major.
pub type ReadParam<'a> = dyn FnMut(&Param) -> Result<Vec<f64>> + 'a;

/// The initial values that the seed determines.
pub fn initial(seed: u64) -> impl FnMut(&Param) -> Result<Vec<f64>> {
    move |param| Ok(initial_values(param, seed, 0..param.elements()).collect())
}

/// Which parameter lies where.
pub(crate) struct Store {
    script: ScriptId,
    params: Vec<Param>,
    units: Vec<Unit>,
}

impl Store {
    pub(crate) fn new(script: ScriptId, model: &Model, units: Vec<Unit>) -> Self {
        Self { script, params: model.params().to_vec(), units }
    }

    /// Fills a unit's buffers, each in its own element type; padding becomes zero.
    pub(crate) fn fill<E: Engine>(
        &self,
        executor: &mut Executor<E>,
        unit: usize,
        buffers: &[&Held],
        read: &mut ReadParam<'_>,
    ) -> Result<()> {
        let unit = &self.units[unit];
        let mut bytes: Vec<Vec<u8>> =
            (buffers.iter()).map(|held| vec![0; held.elements.len() * held.dtype.size()]).collect();
        for member in &unit.members {
            let param = &self.params[member.param];
            let values = read(param)?;
            if values.len() != param.elements() {
                return Err(Error::refused(Problem::new(format!(
                    "parameter `{}` has {} values, its shape {:?} asks for {}",
                    param.name,
                    values.len(),
                    param.shape,
                    param.elements()
                ))));
            }
            for (bytes, held) in bytes.iter_mut().zip(buffers) {
                let (part, at) = held.part(member);
                encode(held.dtype, &values[part], &mut bytes[at * held.dtype.size()..]);
            }
        }
        for (bytes, held) in bytes.iter().zip(buffers) {
            executor.write(self.script, held.buffer, bytes)?;
        }
        Ok(())
    }

    /// Reads one buffer of each unit as tensors by parameter name.
    pub(crate) fn tensors<'a, E: Engine>(
        &self,
        executor: &mut Executor<E>,
        buffers: impl Iterator<Item = &'a Held>,
    ) -> Result<BTreeMap<String, hf::Tensor>> {
        let mut tensors = BTreeMap::new();
        for (unit, held) in self.units.iter().zip(buffers) {
            let dtype = held.dtype;
            let mut bytes = vec![0; unit.elements * dtype.size()];
            executor.read(self.script, held.buffer, &mut bytes)?;
            for member in &unit.members {
                let param = &self.params[member.param];
                let at = member.offset * dtype.size();
                let values = decode(dtype, &bytes[at..at + member.elements * dtype.size()]);
                let tensor = match dtype {
                    DType::F64 => hf::Tensor::f64(param.shape.clone(), values),
                    _ => {
                        let narrow = values.iter().map(|&x| x as f32).collect();
                        hf::Tensor::f32(param.shape.clone(), narrow)
                    }
                };
                tensors.insert(param.name.clone(), tensor);
            }
        }
        Ok(tensors)
    }
}
