//! A model in the forms that a session runs, and the sizes that follow from it.

use std::collections::BTreeMap;

use phalanx_error::Result;
use phalanx_ir::{DType, IrError, Model, Role};
use phalanx_models::hf::ModelSpec;
use phalanx_models::{Architecture, BatchShape, Purpose};
use phalanx_session::{ForwardModel, Models};

use crate::mistake::Mistake;

/// What is trained.
pub(crate) enum Subject {
    Architecture(Box<dyn Architecture>),
    Model(Model),
}

/// The sizes that a trainer was asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) batch: Option<usize>,
    pub(crate) seq_len: usize,
    pub(crate) microbatches: usize,
    /// Replicas that train by themselves: each has a model of its share of a micro-batch.
    pub(crate) replicas: usize,
    pub(crate) compute: DType,
}

/// A model in its forms, with its sizes.
pub(crate) struct Ready {
    pub(crate) models: Models,
    pub(crate) spec: Option<ModelSpec>,
    /// Tokens at the beginning of each sample that are read and not predicted.
    pub(crate) unpredicted: usize,
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    pub(crate) microbatches: usize,
}

/// Whether a model is trained and nothing else, or evaluated and asked for predictions too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    Train,
    Everything,
}

impl Subject {
    /// The model in the forms that are used, with the sizes that follow from it.
    pub(crate) fn ready(&self, asked: Asked, used: Use) -> Result<Ready> {
        let (models, spec) = self.forms(asked, used)?;
        let model = &models.train;
        let name = || model.name.clone();
        if !model.segments().iter().any(|p| p.outputs_with(Role::Loss).next().is_some()) {
            return Err(Mistake::NoLoss { model: name() }.into());
        }
        let Some((rows, seq_len)) = sample_shape(model) else {
            return Err(Mistake::ReadsNothing { model: name() }.into());
        };
        let batch = match self {
            Subject::Model(_) => asked.batch.unwrap_or(rows),
            Subject::Architecture(_) => asked.batch.unwrap_or(32),
        };
        let rows = rows * asked.replicas;
        if batch == 0 || batch % rows != 0 {
            let parts = format!("micro-batches of {rows} samples");
            return Err(Mistake::Uneven { batch, parts }.into());
        }
        let unpredicted = match self {
            Subject::Model(_) => 0,
            Subject::Architecture(architecture) => architecture.unpredicted(seq_len),
        };
        Ok(Ready { models, spec, unpredicted, batch, seq_len, microbatches: batch / rows })
    }

    fn forms(&self, asked: Asked, used: Use) -> Result<(Models, Option<ModelSpec>)> {
        let all = used == Use::Everything;
        let once = |model: Model| ForwardModel { model, microbatches: 1 };
        match self {
            Subject::Model(model) => {
                let evaluate = all.then(|| once(model.clone()));
                let predict = if all { predicting(model)?.map(once) } else { None };
                Ok((Models { evaluate, predict, ..Models::trained(model.clone()) }, None))
            }
            Subject::Architecture(architecture) => {
                let (batch, parts) = (asked.batch.unwrap_or(32), asked.microbatches);
                let pieces = parts * asked.replicas;
                if pieces == 0 || batch % pieces != 0 {
                    let parts = match asked.replicas {
                        1 => format!("{parts} micro-batches"),
                        replicas => {
                            format!("{parts} micro-batches for each of {replicas} replicas")
                        }
                    };
                    return Err(Mistake::Uneven { batch, parts }.into());
                }
                let shape = BatchShape { batch: batch / pieces, seq: asked.seq_len };
                let build = |purpose| architecture.build(shape, asked.compute, purpose);
                let mut models = Models::of(&**architecture, shape, asked.compute)?;
                if all {
                    models.evaluate = Some(once(build(Purpose::Evaluate)?));
                    models.predict = Some(once(build(Purpose::Predict)?));
                }
                Ok((models, architecture.spec()))
            }
        }
    }
}

/// The samples of a micro-batch, and the tokens of a sample, by the first data port.
fn sample_shape(model: &Model) -> Option<(usize, usize)> {
    let programs = model.segments().iter();
    let mut data = programs.flat_map(|p| p.inputs_with(Role::Data).map(|port| p.ty(port.value)));
    let shape = &data.next()?.shape;
    Some((*shape.first()?, shape.get(1).copied().unwrap_or(1)))
}

/// The model without its loss and all that only the loss needs, such as targets; none if it exposes
/// nothing else.
fn predicting(model: &Model) -> Result<Option<Model>, IrError> {
    let probes = |p: &phalanx_ir::Program| p.outputs_with(Role::Probe).next().is_some();
    if !model.segments().iter().any(probes) {
        return Ok(None);
    }
    let mut own = Model::new(model.name.clone());
    for param in model.params() {
        own.param(param.clone())?;
    }
    for program in model.segments() {
        own.segment(phalanx_passes::some_outputs(program, |port| port.role != Role::Loss));
    }
    for instance in model.instances() {
        let program = &own.segments()[instance.segment];
        let read = |name: &str| program.inputs_with(Role::Param).any(|port| port.name == name);
        let params: BTreeMap<String, usize> = (instance.params.iter())
            .filter(|(name, _)| read(name))
            .map(|(name, param)| (name.clone(), *param))
            .collect();
        own.append(&instance.name, instance.segment, params)?;
    }
    Ok(Some(own))
}
