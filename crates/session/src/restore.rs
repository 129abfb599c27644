//! Where a session's state comes from when it starts: new weights, or a checkpoint of any layout.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_checkpoint::{Checkpoint, FULL};
use phalanx_ir::{DType, Draw, Param};
use phalanx_models::hf::WeightTensor;
use phalanx_script::{Optimizer, Scalar, StateKind};

use super::save::kind_name;
use super::store::{ReadParam, from_weights, initial};
use phalanx_error::{Error, Problem, Result};

/// Reads state in ranges of row-major indices of a replica's parameter, one range after the other, as
/// bytes of an element type; nothing if that kind of state starts with zeros.
pub trait StateSource: Sync {
    /// Reads values of a state.
    fn read(
        &self,
        of: (&Param, usize),
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>>;

    /// How values of a state are drawn, if they are: then engines may draw them where they lie.
    fn draw(&self, _param: &Param, _kind: StateKind) -> Option<Draw> {
        None
    }

    /// A number that ranks keep beside parameters; nothing if it starts with its first value.
    fn scalar(&self, _scalar: &Scalar) -> Result<Option<f64>> {
        Ok(None)
    }
}

/// Weights of a new run; everything else starts with zeros.
pub(crate) struct NewRun<'a>(pub(crate) &'a ReadParam<'a>);

impl StateSource for NewRun<'_> {
    fn read(
        &self,
        (param, _): (&Param, usize),
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        match kind {
            StateKind::Weights | StateKind::Older(_) | StateKind::Master => {
                (self.0)(param, ranges, dtype).map(Some)
            }
            StateKind::Preview | StateKind::Gradient | StateKind::Optimizer(_) => Ok(None),
        }
    }
}

/// Weights of a folder; everything else starts with zeros.
pub(crate) struct FromWeights<'a>(pub(crate) &'a dyn phalanx_models::hf::Weights);

impl StateSource for FromWeights<'_> {
    fn read(
        &self,
        of: (&Param, usize),
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        NewRun(&from_weights(self.0)).read(of, kind, ranges, dtype)
    }
}

/// Weights that a seed determines; everything else starts with zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seeded(pub u64);

impl StateSource for Seeded {
    fn read(
        &self,
        of: (&Param, usize),
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        NewRun(&initial(self.0)).read(of, kind, ranges, dtype)
    }

    fn draw(&self, param: &Param, kind: StateKind) -> Option<Draw> {
        let is_drawn = matches!(kind, StateKind::Weights | StateKind::Older(_) | StateKind::Master);
        is_drawn.then(|| Draw::of(param, self.0))
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
        replicas: usize,
    ) -> Result<Self> {
        check_replicas(checkpoint, replicas)?;
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
        (param, replica): (&Param, usize),
        kind: StateKind,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Option<Vec<u8>>> {
        if kind == StateKind::Gradient {
            return Ok(None);
        }
        let name = kind_name(kind, self.names);
        // Versions that are older than those of the run that was saved begin as its oldest.
        let version = match kind {
            StateKind::Older(age) => age.min(self.checkpoint.oldest(&param.name, name)),
            _ => 0,
        };
        // Replicas that begin apart begin with the same state.
        let replica = replica.min(self.checkpoint.replicas() - 1);
        read_version(self.checkpoint, &param.name, (name, version), replica, (ranges, dtype))
            .map(Some)
    }

    fn scalar(&self, scalar: &Scalar) -> Result<Option<f64>> {
        let found = self.checkpoint.manifest().scalars.get(scalar.name());
        let missing = || no_scalar(self.checkpoint.path(), scalar.name());
        found.map(|value| Some(*value)).ok_or_else(missing)
    }
}

/// Replicas that train by themselves differ, so each goes on with its own state.
fn check_replicas(checkpoint: &Checkpoint, replicas: usize) -> Result<()> {
    let (path, found) = (checkpoint.path().display(), checkpoint.replicas());
    if found == 1 || found == replicas {
        return Ok(());
    }
    let here = match replicas {
        1 => "this run has none that train by themselves".to_owned(),
        count => format!("this run has {count}"),
    };
    let problem = Problem::new(format!("{path} holds {found} replicas; {here}"));
    let fix = format!("--set parallel.dp={found}, with parallel.sync as that run had it");
    Err(Error::refused(problem.because("each replica goes on with its own weights").fix(fix)))
}

/// A scalar that this run keeps and the checkpoint lacks.
fn no_scalar(path: &std::path::Path, name: &str) -> Error {
    let what = format!("{} has no `{name}`, which this run keeps", path.display());
    let problem = Problem::new(what).because("its run did not compute in f16");
    Error::refused(problem.fix("go on with the precision of that run (precision.compute)"))
}

/// Elements of one kind of a parameter's state of a replica in a checkpoint, as bytes of an element type.
pub fn read_as(
    checkpoint: &Checkpoint,
    (param, kind, replica): (&str, &str, usize),
    ranges: &[Range<usize>],
    dtype: DType,
) -> Result<Vec<u8>> {
    read_version(checkpoint, param, (kind, 0), replica, (ranges, dtype))
}

/// The same of one version.
fn read_version(
    checkpoint: &Checkpoint,
    param: &str,
    kind: (&str, usize),
    replica: usize,
    (ranges, dtype): (&[Range<usize>], DType),
) -> Result<Vec<u8>> {
    let (stored, bytes) = checkpoint.read_of(param, kind, replica, ranges)?;
    if stored == dtype {
        return Ok(bytes);
    }
    let count = bytes.len() / stored.size();
    let values = WeightTensor::from_bytes(vec![count], stored, &bytes);
    Ok(values.to_bytes(0..count, dtype).expect("the range is that of all values"))
}

fn other_model(what: String) -> Error {
    let fix = "resume with the model of that run: give no model.* settings";
    Error::refused(Problem::new(what).because("it is a checkpoint of another model").fix(fix))
}
