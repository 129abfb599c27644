//! A model in the forms that a session runs: trained, evaluated, and asked for predictions.

use phalanx_ir::{DType, IrError, Model};
use phalanx_models::{Architecture, BatchShape};
use phalanx_script::ScriptKey;

/// A model in the forms that a session runs. Their parameters are the same, in the same order.
#[derive(Clone, Debug)]
pub struct Models {
    /// The model whose loss is trained, for the shape of one micro-batch.
    pub train: Model,
    /// The same with more and more room for the rows of experts, for steps that find too little in the ones before.
    pub roomier: Vec<Model>,
    /// The same in which every rank reads all experts, if steps may choose that.
    pub gathered: Option<Model>,
    /// The model whose loss is evaluated: without dropout.
    pub evaluate: Option<ForwardModel>,
    /// The model that exposes what it predicts, without a loss.
    pub predict: Option<ForwardModel>,
}

/// A model that is run forward, with the parameters of the one that is trained.
#[derive(Clone, Debug)]
pub struct ForwardModel {
    /// The model, for the shape of one micro-batch.
    pub model: Model,
    /// The micro-batches of a batch.
    pub microbatches: usize,
}

impl Models {
    /// A model that is trained and nothing else.
    pub fn trained(train: Model) -> Self {
        Self { train, roomier: Vec::new(), gathered: None, evaluate: None, predict: None }
    }

    /// The model of a network for training, with all bounds of the room for rows of experts.
    pub fn of(
        architecture: &dyn Architecture,
        shape: BatchShape,
        compute: DType,
    ) -> Result<Self, IrError> {
        let mut models = Self::trained(architecture.model(shape, compute)?);
        let mut next = architecture.with_more_room();
        while let Some(roomier) = next {
            models.roomier.push(roomier.model(shape, compute)?);
            next = roomier.with_more_room();
        }
        let at_home = architecture.with_rows_at_home();
        models.gathered = at_home.map(|own| own.model(shape, compute)).transpose()?;
        Ok(models)
    }

    /// The same with room for all rows of experts from the start, and one way to read them.
    pub fn with_all_room(&self) -> Self {
        let train = self.roomier.last().unwrap_or(&self.train).clone();
        Self { train, roomier: Vec::new(), gathered: None, ..self.clone() }
    }

    /// The models that are run forward, by the key of their script.
    pub(crate) fn forward(&self) -> impl Iterator<Item = (ScriptKey, &ForwardModel)> {
        let own = [(ScriptKey::Evaluate, &self.evaluate), (ScriptKey::Predict, &self.predict)];
        own.into_iter().filter_map(|(key, model)| Some((key, model.as_ref()?)))
    }
}
