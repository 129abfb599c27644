//! Where a session's state comes from when it starts: new weights, or a checkpoint of any layout.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_checkpoint::Checkpoint;
use phalanx_ir::{DType, Param};
use phalanx_models::hf::WeightTensor;
use phalanx_script::{Optimizer, StateKind};

use super::save::{FULL, kind_name};
use super::store::ReadParam;
use phalanx_error::{Error, Problem, Result};

/// Reads state in ranges of row-major indices of a parameter, one range after the other, as bytes of
/// an element type; nothing if that kind of state starts with zeros.
pub trait StateSource: Sync {
    /// Reads values of a state.
    fn read(
        &self,
        param: &Param,
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>>;
}

/// Weights of a new run; everything else starts with zeros.
pub(crate) struct NewRun<'a>(pub(crate) &'a ReadParam<'a>);

impl StateSource for NewRun<'_> {
    fn read(
        &self,
        param: &Param,
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        match kind {
            StateKind::Weights | StateKind::Master => (self.0)(param, ranges, dtype).map(Some),
            StateKind::Gradient | StateKind::Optimizer(_) => Ok(None),
        }
    }
}

/// The state of a checkpoint.
pub struct Restored<'a> {
    checkpoint: &'a Checkpoint,
    names: &'static [&'static str],
}

impl<'a> Restored<'a> {
    /// Makes sure that a checkpoint holds what a model with this optimizer needs, and nothing else.
    pub fn new(
        checkpoint: &'a Checkpoint,
        params: &[Param],
        optimizer: &Optimizer,
    ) -> Result<Self> {
        let (path, names) = (checkpoint.path().display(), optimizer.state_names());
        let known: BTreeSet<&str> = names.iter().copied().chain([FULL]).collect();
        for param in params {
            let found = checkpoint.params().find(|(name, _)| *name == param.name);
            let Some((_, shape)) = found else {
                let what = format!("{path} has no parameter `{}`, which the model has", param.name);
                return Err(other_model(what));
            };
            if shape != param.shape {
                let name = &param.name;
                let what = format!("`{name}` is {shape:?} in {path}, and {:?} here", param.shape);
                return Err(other_model(what));
            }
            let there: BTreeSet<&str> =
                checkpoint.kinds(&param.name).map(|(kind, _)| kind).collect();
            if there != known {
                let list = |kinds: &BTreeSet<&str>| {
                    kinds.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(", ")
                };
                let problem = Problem::new(format!(
                    "{path} holds {} of `{}`; this run keeps {}",
                    list(&there),
                    param.name,
                    list(&known)
                ));
                let fix = "go on with the optimizer of that run (optim.kind), or start a new run \
                           from its weights";
                return Err(Error::refused(problem.fix(fix)));
            }
        }
        let own: BTreeSet<&str> = params.iter().map(|param| param.name.as_str()).collect();
        if let Some((name, _)) = checkpoint.params().find(|(name, _)| !own.contains(name)) {
            let what = format!("{path} has a parameter `{name}`, which the model has not");
            return Err(other_model(what));
        }
        Ok(Self { checkpoint, names })
    }
}

impl StateSource for Restored<'_> {
    fn read(
        &self,
        param: &Param,
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        if kind == StateKind::Gradient {
            return Ok(None);
        }
        let kind = kind_name(kind, self.names);
        let (stored, bytes) = self.checkpoint.read(&param.name, kind, ranges)?;
        if stored == dtype {
            return Ok(Some(bytes));
        }
        let count = bytes.len() / stored.size();
        let values = WeightTensor::from_bytes(vec![count], stored, &bytes);
        Ok(values.to_bytes(0..count, dtype))
    }
}

fn other_model(what: String) -> Error {
    let fix = "resume with the model of that run: give no model.* settings";
    Error::refused(Problem::new(what).because("it is a checkpoint of another model").fix(fix))
}
