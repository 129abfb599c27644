//! Products of stored scores with the keys that are here.

use phalanx_engine::EngineError;
use phalanx_ir::ops::{KeyForm, KeyProduct};

use super::position::part_words;
use super::{Arg, Operation, Task, Tasks};
use crate::kernels::{KernelSpec, Source};

pub(super) fn compile(op: &mut Operation<'_>, product: KeyProduct) -> Result<Tasks, EngineError> {
    let (inputs, out) = (op.inputs(), op.output(0));
    let (a, b, c) = (op.instr.inputs[0], op.instr.inputs[1], op.instr.outputs[0]);
    let ((x, queries), (y, keys), p) = match product.form {
        KeyForm::Scores => ((&inputs[0], a), (&inputs[1], b), &out),
        KeyForm::Weighted => ((&out, c), (&inputs[1], b), &inputs[0]),
        KeyForm::Sums => ((&inputs[1], b), (&out, c), &inputs[0]),
    };
    // Padding of the major factor of the heads is padding of the key heads; with one key head, those of
    // its group may be padded.
    let group = if y.shape[2] == 1 { x.valid[2] } else { x.shape[2] / y.shape[2].max(1) };
    let mut words = vec![x.shape[0], x.shape[1], y.shape[1], x.shape[2], y.shape[2], x.shape[3]];
    words.extend([p.shape[3], usize::from(product.causal), usize::from(product.goes_on)]);
    words.extend([op.program.ty(queries).shape[1], op.program.ty(keys).shape[1]]);
    words.extend([x.valid[0], x.valid[1], y.valid[1], y.valid[2], group, x.valid[3]]);
    let mut words: Vec<i64> = words.into_iter().map(|n| n as i64).collect();
    words.extend(part_words(op.part(queries, 1)));
    words.extend(part_words(op.part(keys, 1)));
    let words = Arg::Words(words);
    let before = inputs.get(2);
    let bytes = out.elements() * out.dtype.size();
    let float = op.float(inputs[0].dtype)?;
    let operands = vec![inputs[0].arg(), inputs[1].arg()];
    if product.form != KeyForm::Scores {
        let name = if product.form == KeyForm::Weighted { "key_weighted" } else { "key_sums" };
        let kernel = KernelSpec::of(Source::KeyProduct, name, &[float]);
        let so_far = before.map_or(Arg::Null, |var| var.arg());
        let args = [operands, vec![so_far, out.arg(), words]].concat();
        return Ok(vec![op.over(out.elements(), kernel, args)]);
    }
    let mut tasks = match before {
        None => vec![Task::Clear { to: out.place(), bytes }],
        Some(before) if before.place() == out.place() => vec![],
        Some(before) => vec![Task::Copy { from: before.place(), to: out.place(), bytes }],
    };
    let kernel = KernelSpec::of(Source::KeyProduct, "key_scores", &[float]);
    let args = [operands, vec![out.arg(), words]].concat();
    let pairs = x.shape[0] * x.shape[1] * x.shape[2] * y.shape[1];
    tasks.push(op.over(pairs, kernel, args));
    Ok(tasks)
}
