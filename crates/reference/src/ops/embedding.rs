//! Looks up rows of a table; the gradient adds rows up.

use phalanx_ir::ops::EmbeddingGrad;

use super::Call;
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn embedding(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (vocab, width) = (call.shape(0)[0], call.width(0));
    let mut places = Vec::new();
    for (position, &id) in call.ints(1)?.iter().enumerate() {
        let row = call.row(id, position, vocab)?;
        places.extend(row * width..(row + 1) * width);
    }
    Ok(vec![call.moved(call.ins[0].data().gather(&places))])
}

pub(super) fn embedding_grad(
    op: &EmbeddingGrad,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let (ids, dy, width) = (call.ints(0)?, call.floats(1)?, call.width(1));
    let mut dtable = vec![0.0; op.vocab * width];
    for (position, &id) in ids.iter().enumerate() {
        let row = call.row(id, position, op.vocab)?;
        for i in 0..width {
            dtable[row * width + i] += dy[position * width + i];
        }
    }
    Ok(vec![call.result(0, dtable)])
}
