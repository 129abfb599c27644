//! What a model reaches on held-out data while it is trained.

use phalanx_data::Batch;
use phalanx_error::Result;
use phalanx_script::ScriptKey;
use phalanx_session::{Accuracy, Session, corpus};

use crate::metrics::EvaluationLine;

/// Evaluates a session on batches, after this step.
pub(super) fn evaluated(
    session: &mut Session,
    batches: &[Batch],
    after_step: usize,
) -> Result<EvaluationLine> {
    let mut right = Accuracy::default();
    let val_loss = corpus::mean_loss(batches, |data| {
        let loss = session.evaluate(data)?;
        right.add(session.accuracy(ScriptKey::Evaluate, data)?);
        Ok(loss)
    })?;
    Ok(EvaluationLine { after_step, val_loss, val_accuracy: right.share() })
}
