//! A model on a mesh: its programs in all the forms in which ranks run it.

use std::collections::BTreeMap;

use phalanx_autodiff::LossSeed;
use phalanx_error::{Error, Result};
use phalanx_ir::{Mesh, Model};
use phalanx_script::{Compiled, ScriptKey};
use phalanx_spmd::Partition;

use crate::compile::{compile, compile_forward};
use crate::{Models, Settings};

/// A model on a mesh.
pub(super) struct OnMesh {
    pub(super) mesh: Mesh,
    pub(super) partition: Partition,
    pub(super) compiled: Compiled,
    /// With more and more room for the rows of experts.
    pub(super) roomier: Vec<Compiled>,
    /// With weights of experts that are gathered.
    pub(super) gathered: Option<Compiled>,
    pub(super) forward: BTreeMap<ScriptKey, Compiled>,
}

impl OnMesh {
    pub(super) fn new(models: &Models, settings: &Settings, mesh: &Mesh) -> Result<Self> {
        let limit = settings.memory_limit.and_then(|limit| limit.asked());
        let found = settings.parallel.found(&models.train, mesh, limit)?;
        let lay = |model: &Model| settings.parallel.partition(model, mesh, found.as_ref());
        let partition = lay(&models.train)?;
        let (precision, recompute) = (settings.precision, settings.recompute);
        let seed = settings.scaling.map_or(LossSeed::One, |_| LossSeed::Scale);
        let compiled = compile(&models.train, precision, seed, recompute, &partition)?;
        let roomier = |model: &Model| {
            Ok::<_, Error>(compile(model, precision, seed, recompute, &lay(model)?)?)
        };
        let roomier = models.roomier.iter().map(roomier).collect::<Result<_>>()?;
        let gathered = |model: &Model| {
            let partition = settings.parallel.partition_gathered(model, mesh)?;
            Ok::<_, Error>(compile(model, precision, seed, recompute, &partition)?)
        };
        let gathered = models.gathered.as_ref().map(gathered).transpose()?;
        let forward = |model: &Model| {
            Ok::<_, Error>(compile_forward(model, precision.weights, &lay(model)?)?)
        };
        let forward = models.forward().map(|(key, own)| Ok((key, forward(&own.model)?)));
        let forward = forward.collect::<Result<_>>()?;
        Ok(Self { mesh: mesh.clone(), partition, compiled, roomier, gathered, forward })
    }
}
