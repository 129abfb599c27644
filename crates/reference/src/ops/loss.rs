//! Cross-entropy of rows of logits, alone and with the projection before it.

use phalanx_ir::ops::{
    Broadcast, Cast, CrossEntropy, CrossEntropyGrad, LinearCrossEntropy, Matmul, Spec,
};
use phalanx_ir::{DType, Op};

use super::softmax::log_sum_exp;
use super::{Call, apply};
use crate::error::ReferenceError;
use crate::tensor::RefTensor;

pub(super) fn cross_entropy(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (logits, vocab) = (call.floats(0)?, call.width(0));
    let (mut losses, mut totals) = (Vec::new(), Vec::new());
    for (position, &id) in call.ints(1)?.iter().enumerate() {
        let row = &logits[position * vocab..(position + 1) * vocab];
        let total = log_sum_exp(row);
        losses.push(match target(call, id, position, vocab)? {
            Some(target) => total - row[target],
            None => 0.0,
        });
        totals.push(total);
    }
    Ok(vec![call.result(0, losses), call.result(1, totals)])
}

pub(super) fn cross_entropy_grad(call: &Call<'_>) -> Result<Vec<RefTensor>, ReferenceError> {
    let (logits, vocab) = (call.floats(0)?, call.width(0));
    let (totals, dnll) = (call.floats(2)?, call.floats(3)?);
    let mut dlogits = vec![0.0; logits.len()];
    for (position, &id) in call.ints(1)?.iter().enumerate() {
        let Some(target) = target(call, id, position, vocab)? else {
            continue;
        };
        for i in 0..vocab {
            let at = position * vocab + i;
            let probability = (logits[at] - totals[position]).exp();
            let hit = f64::from(u8::from(i == target));
            dlogits[at] = (probability - hit) * dnll[position];
        }
    }
    Ok(vec![call.result(0, dlogits)])
}

/// The ops that it replaces, one after the other: chunks of rows only matter for memory.
pub(super) fn linear_cross_entropy(
    op: &LinearCrossEntropy,
    call: &Call<'_>,
) -> Result<Vec<RefTensor>, ReferenceError> {
    let &[x, w, targets, dnll] = call.ins else {
        return Err(call.wrong(0, "the first of four operands"));
    };
    let rows = call.outs[0].1.clone();
    let letters: String = ('a'..).take(rows.len()).collect();
    let weight = if op.transposed { "zy" } else { "yz" };
    let text = format!("{letters}y,{weight}->{letters}z");
    let spec: Spec =
        (text.parse()).map_err(|what| ReferenceError::Operands { op: call.name, what })?;
    let product = |spec: Spec, out: DType| Op::Matmul(Matmul { spec, out, add: false });
    let first = |op: Op, ins: &[&RefTensor]| Ok(apply(&op, ins)?.swap_remove(0));

    // Logits and their gradient never leave the op, and stay in the accumulator type.
    let (narrow, wide) = (x.dtype(), x.dtype().accumulator());
    let widen = |t: &RefTensor| first(Cast { to: wide }.into(), &[t]);
    let (x, w) = (&widen(x)?, &widen(w)?);
    let logits = first(product(spec.clone(), wide), &[x, w])?;
    let statistics = apply(&CrossEntropy.into(), &[&logits, targets])?;
    let spread = Broadcast { dims: (0..rows.len()).collect(), shape: rows };
    let dnll = first(spread.into(), &[dnll])?;
    let operands = [&logits, targets, &statistics[1], &dnll];
    let dlogits = first(CrossEntropyGrad.into(), &operands)?;
    let dx = first(product(spec.grad_a(), narrow), &[&dlogits, w])?;
    let dw = first(product(spec.grad_b(), op.out), &[x, &dlogits])?;
    Ok(vec![statistics[0].clone(), dx, dw])
}

/// The column of a target; nothing if it is negative and so ignored.
fn target(
    call: &Call<'_>,
    id: i32,
    position: usize,
    vocab: usize,
) -> Result<Option<usize>, ReferenceError> {
    if id < 0 {
        return Ok(None);
    }
    call.row(id, position, vocab).map(Some)
}
