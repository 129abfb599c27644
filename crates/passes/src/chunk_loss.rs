//! Logits in chunks: where a program holds a projection, its cross-entropy and both gradients, one
//! instruction that works on a few rows at a time replaces them, and the logits never exist whole.
//!
//! It recognises the instructions that the builder and autodiff produce:
//!
//! ```text
//! logits    = matmul(x, w)                               (or by w transposed)
//! nll, lse  = cross_entropy(logits, targets)
//! dnll      = broadcast(scalar)
//! dlogits   = cross_entropy_grad(logits, targets, lse, dnll)
//! dx        = matmul(dlogits, w)
//! dw        = matmul(x, dlogits)
//! ```
//!
//! with nothing else reading logits, lse and dlogits. It works on forward and backward together.
//! Readers of nll come before the scalar that scales the gradient; so the new instruction is
//! inserted where the first of its results is read, and its operands are hoisted there. Both get
//! the phase of the cross-entropy. If the scalar depends on nll itself, the rewrite does not apply.

use std::num::NonZeroUsize;

use phalanx_ir::ops::{LinearCrossEntropy, Matmul, Spec};
use phalanx_ir::{Graph, Op, Phase, Program, Rewriter, Role, ValueId};

/// Replaces every projection with cross-entropy and gradients by a [`LinearCrossEntropy`] that
/// holds the logits of `chunk` rows at a time. It runs before products take addends
/// ([`fold_add`](crate::fold_add())), which would hide a tied weight's gradient.
pub fn chunk_loss(program: &Program, chunk: NonZeroUsize) -> Program {
    let mut program = program.clone();
    while let Some(found) = (0..program.instrs().len()).find_map(|i| find(&program, i, chunk)) {
        program = found.apply(&program);
    }
    program
}

/// A place where the rewrite applies.
struct Found {
    op: LinearCrossEntropy,
    /// x, w, targets, scalar.
    operands: [ValueId; 4],
    /// nll, dx, dw.
    results: [ValueId; 3],
    /// The instructions that are removed.
    gone: Vec<usize>,
    phase: Phase,
}

/// Looks for the pattern around the `cross_entropy_grad` at this index.
fn find(program: &Program, index: usize, chunk: NonZeroUsize) -> Option<Found> {
    let instrs = program.instrs();
    let grad = &instrs[index];
    let (Op::CrossEntropyGrad(_), &[logits, targets, lse, dnll]) = (&grad.op, &grad.inputs[..])
    else {
        return None;
    };
    let graph = Graph::new(program);
    let (project, matmul, [x, w]) = plain_product(&graph, logits)?;
    let transposed = projection(&matmul.spec)?;
    let (loss, forward) = graph.making(lse)?;
    let is_loss = matches!(forward.op, Op::CrossEntropy(_))
        && forward.inputs == [logits, targets]
        && forward.outputs[1] == lse;
    let (spread, scalar) = scalar_of(program, &graph, dnll)?;
    let (dx, dw) = gradients(program, &graph, &matmul.spec, [x, w, grad.outputs[0]])?;
    let mut readers = [loss, index];
    readers.sort_unstable();
    let hidden = graph.read_only_by(logits, &readers) && graph.read_only_by(lse, &[index]);
    if !(is_loss && hidden) {
        return None;
    }
    let mut gone = vec![project, loss, index, dx, dw];
    if graph.read_only_by(dnll, &[index]) {
        gone.push(spread);
    }
    let dw = instrs[dw].outputs[0];
    let found = Found {
        op: LinearCrossEntropy { transposed, chunk: chunk.get(), out: program.ty(dw).dtype },
        operands: [x, w, targets, scalar],
        results: [forward.outputs[0], instrs[dx].outputs[0], dw],
        gone,
        phase: forward.phase,
    };
    (found.types_fit(program) && !found.is_cyclic(program, &graph)).then_some(found)
}

/// The products that compute dx and dw from the gradient of the logits, if only they read it.
fn gradients(
    program: &Program,
    graph: &Graph<'_>,
    spec: &Spec,
    [x, w, dlogits]: [ValueId; 3],
) -> Option<(usize, usize)> {
    let &[first, second] = graph.readers(dlogits) else {
        return None;
    };
    let product = |spec: &Spec, operands: [ValueId; 2]| {
        [first, second].into_iter().find(|&i| {
            let instr = &program.instrs()[i];
            matches!(&instr.op, Op::Matmul(m) if !m.add && m.spec == *spec)
                && instr.inputs == operands
        })
    };
    let dx = product(&spec.grad_a(), [dlogits, w])?;
    let dw = product(&spec.grad_b(), [x, dlogits])?;
    (dx != dw && !graph.returned(dlogits)).then_some((dx, dw))
}

/// The product without an addend that computes a value.
fn plain_product<'a>(
    graph: &Graph<'a>,
    value: ValueId,
) -> Option<(usize, &'a Matmul, [ValueId; 2])> {
    let (index, instr) = graph.making(value)?;
    match (&instr.op, &instr.inputs[..]) {
        (Op::Matmul(matmul), &[a, b]) if !matmul.add => Some((index, matmul, [a, b])),
        _ => None,
    }
}

/// Whether a product is a projection of the last dim, and then whether by a transposed matrix.
fn projection(spec: &Spec) -> Option<bool> {
    let [x, w, out] = spec.letters();
    let (rows, inner) = x.split_at_checked(x.len().checked_sub(1)?)?;
    let column = out.strip_prefix(rows).filter(|c| c.len() == 1)?;
    if w == format!("{inner}{column}") {
        Some(false)
    } else {
        (w == format!("{column}{inner}")).then_some(true)
    }
}

/// The single number that a value repeats, with the index of the instruction that repeats it.
fn scalar_of(program: &Program, graph: &Graph<'_>, value: ValueId) -> Option<(usize, ValueId)> {
    let (index, instr) = graph.making(value)?;
    let &scalar = instr.inputs.first()?;
    let repeats = matches!(instr.op, Op::Broadcast(_)) && program.ty(scalar).shape.is_empty();
    repeats.then_some((index, scalar))
}

impl Found {
    /// Whether the new instruction has the same types as the values it replaces. On a mesh that
    /// shards the vocabulary it would not: the plain gradients are partial sums there.
    fn types_fit(&self, program: &Program) -> bool {
        let mut trial = Program::new("trial", program.mesh().clone());
        let operands = (self.operands).map(|v| trial.input("", Role::Probe, program.ty(v).clone()));
        let Ok(made) = trial.push(self.op.into(), &operands, self.phase) else {
            return false;
        };
        (made.iter().map(|&v| trial.ty(v))).eq(self.results.iter().map(|&v| program.ty(v)))
    }

    /// Whether an operand depends on what the new instruction computes.
    fn is_cyclic(&self, program: &Program, graph: &Graph<'_>) -> bool {
        let needed = self.needed(program, graph);
        self.gone.iter().any(|&index| needed[index])
    }

    /// The instructions that the operands depend on.
    fn needed(&self, program: &Program, graph: &Graph<'_>) -> Vec<bool> {
        let mut needed = vec![false; program.instrs().len()];
        let mut values = self.operands.to_vec();
        while let Some(value) = values.pop() {
            if let Some((index, instr)) = graph.making(value)
                && !needed[index]
            {
                needed[index] = true;
                values.extend(&instr.inputs);
            }
        }
        needed
    }

    fn apply(&self, program: &Program) -> Program {
        let graph = Graph::new(program);
        let needed = self.needed(program, &graph);
        let count = program.instrs().len();
        let reads = self.results.iter().flat_map(|&v| graph.readers(v));
        let place = reads.copied().min().unwrap_or(count);
        let before = (0..count).filter(|&i| i < place || needed[i]);
        let after = (place..count).filter(|&i| !needed[i]);
        let mut rewriter = Rewriter::new(program);
        let keep = |rewriter: &mut Rewriter<'_>, index: usize| {
            let own = program.instrs()[index].phase;
            let phase = if needed[index] { own.min(self.phase) } else { own };
            if !self.gone.contains(&index) {
                rewriter.keep_in(phase, index);
            }
        };
        before.for_each(|index| keep(&mut rewriter, index));
        rewriter.emit(self.op, &self.operands, &self.results, self.phase);
        after.for_each(|index| keep(&mut rewriter, index));
        rewriter.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_on, check_unchanged};

    fn pass(program: &Program) -> Program {
        chunk_loss(program, NonZeroUsize::new(16).unwrap())
    }

    const BEFORE: &str = "
        x: boundary f32[2,4,8]
        w: param f32[8,32]
        targets: data i32[2,4]
        inv_tokens: scalar f32[]
        %1 = matmul(x, w, spec=aby,yz->abz, out=f32, add=false) : f32[2,4,32]
        %2, %3 = cross_entropy(%1, targets) : f32[2,4], f32[2,4]
        %4 = sum(%2, dims=0x1, out=f32) : f32[]
        %5 = mul(%4, inv_tokens) : f32[]
        %6 = fill(dtype=f32, shape=none, value=1) : f32[] @B
        %7 = mul(%6, inv_tokens) : f32[] @B
        %8 = broadcast(%7, shape=2x4, dims=0x1) : f32[2,4] @B
        %9 = cross_entropy_grad(%1, targets, %3, %8) : f32[2,4,32] @B
        %10 = matmul(%9, w, spec=abz,yz->aby, out=f32, add=false) : f32[2,4,8] @B
        %11 = matmul(x, %9, spec=aby,abz->yz, out=f32, add=false) : f32[8,32] @W
        return loss: loss %5
        return dx: cotangent %10
        return dw: gradient %11";

    #[test]
    fn a_head_with_its_gradients_becomes_one_instruction() {
        check(
            BEFORE,
            pass,
            "
            %6 = fill(dtype=f32, shape=none, value=1) : f32[]
            %7 = mul(%6, inv_tokens) : f32[]
            %2, %10, %11 = linear_cross_entropy(x, w, targets, %7, transposed=false, chunk=16, out=f32) : f32[2,4], f32[2,4,8], f32[8,32]
            %4 = sum(%2, dims=0x1, out=f32) : f32[]
            %5 = mul(%4, inv_tokens) : f32[]",
        );
    }

    #[test]
    fn a_tied_matrix_is_transposed_and_its_gradient_wider() {
        let before = (BEFORE.replace("f32[8,32]", "f32[32,8]"))
            .replace("aby,yz->abz", "aby,zy->abz")
            .replace("abz,yz->aby", "abz,zy->aby")
            .replace("aby,abz->yz", "aby,abz->zy")
            .replace("x: boundary f32", "x: boundary bf16")
            .replace("w: param f32", "w: param bf16")
            .replace("abz, out=f32, add=false) : f32", "abz, out=bf16, add=false) : bf16")
            .replace("%8) : f32", "%8) : bf16")
            .replace("aby, out=f32, add=false) : f32", "aby, out=bf16, add=false) : bf16");
        check(
            &before,
            pass,
            "
            %6 = fill(dtype=f32, shape=none, value=1) : f32[]
            %7 = mul(%6, inv_tokens) : f32[]
            %2, %10, %11 = linear_cross_entropy(x, w, targets, %7, transposed=true, chunk=16, out=f32) : f32[2,4], bf16[2,4,8], f32[32,8]
            %4 = sum(%2, dims=0x1, out=f32) : f32[]
            %5 = mul(%4, inv_tokens) : f32[]",
        );
    }

    #[test]
    fn a_pattern_that_is_read_elsewhere_or_incomplete_stays() {
        let variants = [
            BEFORE.replace("return loss", "return logits: probe %1\n return loss"),
            BEFORE.replace("return loss", "return lse: probe %3\n return loss"),
            BEFORE.replace("return loss", "return dlogits: probe %9\n return loss"),
            // The gradient depends on the loss itself.
            BEFORE.replace("mul(%6, inv_tokens)", "mul(%6, %5)"),
            // The gradient of w is missing.
            (BEFORE.lines()).filter(|l| !l.contains("%11")).collect::<Vec<_>>().join("\n"),
        ];
        for text in &variants {
            assert_ne!(text, BEFORE);
            check_unchanged("", text, pass);
        }
    }

    #[test]
    fn sharded_rows_pass_and_a_sharded_vocabulary_does_not() {
        let rows = "
            x: boundary f32[4,8]{0:dp}
            w: param f32[8,32]
            targets: data i32[4]{0:dp}
            s: scalar f32[]
            %1 = matmul(x, w, spec=ay,yz->az, out=f32, add=false) : f32[4,32]{0:dp}
            %2, %3 = cross_entropy(%1, targets) : f32[4]{0:dp}, f32[4]{0:dp}
            %4 = broadcast(s, shape=4, dims=0) : f32[4]{0:dp} @B
            %5 = cross_entropy_grad(%1, targets, %3, %4) : f32[4,32]{0:dp} @B
            %6 = matmul(%5, w, spec=az,yz->ay, out=f32, add=false) : f32[4,8]{0:dp} @B
            %7 = matmul(x, %5, spec=ay,az->yz, out=f32, add=false) : f32[8,32]{P:dp} @W
            return nll: probe %2
            return dx: cotangent %6
            return dw: gradient %7";
        let after = "
            %2, %6, %7 = linear_cross_entropy(x, w, targets, s, transposed=false, chunk=16, out=f32) : f32[4]{0:dp}, f32[4,8]{0:dp}, f32[8,32]{P:dp}";
        check_on("dp=2", rows, pass, after);
        let vocabulary = (rows.replace("{0:dp}", ""))
            .replace("w: param f32[8,32]", "w: param f32[8,32]{1:dp}")
            .replace(": f32[4,32]", ": f32[4,32]{1:dp}")
            .replace(
                "ay, out=f32, add=false) : f32[4,8]",
                "ay, out=f32, add=false) : f32[4,8]{P:dp}",
            )
            .replace("f32[8,32]{P:dp}", "f32[8,32]{1:dp}")
            .replace("dx: cotangent", "dx: probe");
        check_unchanged("dp=2", &vocabulary, pass);
    }
}
