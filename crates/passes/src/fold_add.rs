//! Folds additions into products: `add(matmul(a, b), c)` becomes one product that starts from `c`.
//!
//! Residual additions `h + x·W` and sums of cotangents are of this form. The product moves down to
//! the addition, where `c` always exists, and keeps its phase, since only a product and an addition
//! of one phase are merged. If both operands are products, the later one takes the other as its
//! addend, so a sum of products becomes a chain that runs in the old order. It runs on the joint
//! graph before phases are sliced, so that recomputed clones inherit it.

use phalanx_ir::ops::{Binary, BinaryKind, Matmul};
use phalanx_ir::{Graph, Instr, Op, Program, Rewriter, ValueId};

/// Folds additions into the products before them.
pub fn fold_add(program: &Program) -> Program {
    let folds = folds(program);
    let mut moved = vec![false; folds.len()];
    for fold in folds.iter().flatten() {
        moved[fold.product] = true;
    }
    let mut rewriter = Rewriter::new(program);
    for (index, instr) in program.instrs().iter().enumerate() {
        match &folds[index] {
            Some(fold) => {
                let inputs = [fold.a, fold.b, fold.addend];
                rewriter.emit(fold.op.clone(), &inputs, &instr.outputs, instr.phase);
            }
            None if moved[index] => {}
            None => rewriter.keep(index),
        }
    }
    rewriter.finish()
}

/// An addition that becomes a product with an addend.
struct Fold {
    /// The instruction that is removed.
    product: usize,
    op: Matmul,
    a: ValueId,
    b: ValueId,
    addend: ValueId,
}

/// For each instruction, how it folds if it is an addition that does. A folded product has one
/// reader, so two additions never fold the same one.
fn folds(program: &Program) -> Vec<Option<Fold>> {
    let graph = Graph::new(program);
    (program.instrs().iter().enumerate())
        .map(|(index, instr)| {
            let Op::Binary(Binary { kind: BinaryKind::Add }) = instr.op else {
                return None;
            };
            let [left, right] = [instr.inputs[0], instr.inputs[1]];
            [(left, right), (right, left)]
                .into_iter()
                .filter_map(|(value, addend)| fold(program, &graph, index, instr, value, addend))
                .max_by_key(|f| f.product)
        })
        .collect()
}

fn fold(
    program: &Program,
    graph: &Graph<'_>,
    index: usize,
    add: &Instr,
    value: ValueId,
    addend: ValueId,
) -> Option<Fold> {
    let (product, made) = graph.making(value)?;
    let Op::Matmul(op) = &made.op else {
        return None;
    };
    let result = program.ty(add.outputs[0]);
    let fits = !op.add
        && made.phase == add.phase
        && value != addend
        && graph.read_only_by(value, &[index])
        && program.ty(value) == result
        && program.ty(addend) == result;
    fits.then(|| Fold {
        product,
        op: Matmul { add: true, ..op.clone() },
        a: made.inputs[0],
        b: made.inputs[1],
        addend,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{check, check_on, check_unchanged};

    #[test]
    fn a_residual_addition_folds_from_either_side() {
        check(
            "
            h: boundary f32[4,8]
            w: param f32[8,8]
            %1 = matmul(h, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = tanh(h) : f32[4,8]
            %3 = add(%1, %2) : f32[4,8]
            %4 = matmul(%3, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %5 = add(%3, %4) : f32[4,8]
            return y: boundary %5",
            fold_add,
            "
            %2 = tanh(h) : f32[4,8]
            %3 = matmul(h, w, %2, spec=ay,yz->az, out=f32, add=true) : f32[4,8]
            %5 = matmul(%3, w, %3, spec=ay,yz->az, out=f32, add=true) : f32[4,8]",
        );
    }

    #[test]
    fn a_sum_of_products_becomes_a_chain_in_the_old_order() {
        check(
            "
            a: boundary f32[4,8]
            b: boundary f32[4,8]
            c: boundary f32[4,8]
            w: param f32[8,8]
            %1 = matmul(a, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = matmul(b, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %3 = matmul(c, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %4 = add(%1, %2) : f32[4,8]
            %5 = add(%4, %3) : f32[4,8]
            return y: boundary %5",
            fold_add,
            "
            %1 = matmul(a, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = matmul(b, w, %1, spec=ay,yz->az, out=f32, add=true) : f32[4,8]
            %5 = matmul(c, w, %2, spec=ay,yz->az, out=f32, add=true) : f32[4,8]",
        );
    }

    #[test]
    fn products_that_others_read_or_that_differ_stay() {
        let text = "
            h: boundary f32[4,8]
            bias: param f32[8]
            w: param f32[8,8]
            %1 = matmul(h, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %2 = add(%1, bias) : f32[4,8]
            %3 = matmul(%2, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %4 = add(%3, h) : f32[4,8]
            %5 = relu(%3) : f32[4,8]
            %6 = matmul(%5, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %7 = add(%6, h) : f32[4,8] @B
            %8 = matmul(%5, w, %4, spec=ay,yz->az, out=f32, add=true) : f32[4,8]
            %9 = add(%8, h) : f32[4,8]
            %10 = matmul(%9, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %11 = add(%10, %10) : f32[4,8]
            %12 = matmul(%9, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]
            %13 = add(%12, h) : f32[4,8]
            return y: boundary %7
            return z: boundary %11
            return p: probe %12
            return q: probe %13";
        check_unchanged("", text, fold_add);
    }

    #[test]
    fn partial_sums_fold_with_partial_sums() {
        check_on(
            "tp=2",
            "
            x: boundary f32[4,8]{1:tp}
            w: param f32[8,8]{0:tp}
            c: boundary f32[4,8]{P:tp}
            %1 = matmul(x, w, spec=ay,yz->az, out=f32, add=false) : f32[4,8]{P:tp}
            %2 = add(%1, c) : f32[4,8]{P:tp}
            return y: probe %2",
            fold_add,
            "
            %2 = matmul(x, w, c, spec=ay,yz->az, out=f32, add=true) : f32[4,8]{P:tp}",
        );
    }
}
