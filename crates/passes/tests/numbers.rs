//! Every pass keeps what a program computes: on random programs, and on a transformer with its
//! gradients. The reference interpreter is the judge.

#![allow(clippy::unwrap_used, reason = "a test that can't build its program has failed")]

mod support;

use std::num::NonZeroUsize;

use phalanx_ir::{DType, Op, OpDef, Phase, Program, verify};
use phalanx_passes::{
    chunk_loss, common, dead_code, dead_code_and_inputs, fold_add, fuse, pack, peak_bytes,
    sort_free,
};
use support::{backward, block_program, distance, joint, numbers, random_program, transformer};

type Pass = fn(&Program) -> Program;

/// Each pass, and how far its numbers may move: folding and chunking sum in another order.
const PASSES: [(&str, Pass, f64); 9] = [
    ("dead_code", dead_code, 0.0),
    ("common", common, 0.0),
    ("fuse", fuse, 0.0),
    ("sort_free", sort_free, 0.0),
    ("pack", pack, 0.0),
    ("fold_add", fold_add, 1e-12),
    ("chunk_loss", chunked, 1e-12),
    ("all", all, 1e-12),
    ("all twice", |p| all(&all(p)), 1e-12),
];

fn chunked(program: &Program) -> Program {
    chunk_loss(program, NonZeroUsize::new(5).unwrap())
}

fn all(program: &Program) -> Program {
    [common, chunked, fold_add, pack, sort_free, fuse, dead_code]
        .into_iter()
        .fold(program.clone(), |p, pass: Pass| pass(&p))
}

fn check(program: &Program, seed: u64) {
    verify(program).unwrap();
    let before = numbers(program, seed);
    for (name, pass, tolerance) in PASSES {
        let after = pass(program);
        verify(&after).unwrap_or_else(|e| panic!("{name}, seed {seed}: {e}\n{after}"));
        check_phases(name, &after);
        let distance = distance(&before, &numbers(&after, seed));
        assert!(distance <= tolerance, "{name}, seed {seed}: {distance:e}\n{program}\n{after}");
        assert_eq!(after.inputs(), program.inputs(), "{name}");
        assert_eq!(after, after.canonical(), "{name}");
    }
}

/// No instruction reads a value of a later phase.
fn check_phases(name: &str, program: &Program) {
    let mut phases = vec![Phase::F; program.values().len()];
    for instr in program.instrs() {
        for value in &instr.inputs {
            assert!(
                phases[value.index()] <= instr.phase,
                "{name}: {} reads %{} of a later phase\n{program}",
                instr.op.name(),
                value.0
            );
        }
        for value in &instr.outputs {
            phases[value.index()] = instr.phase;
        }
    }
}

fn count(program: &Program, wanted: impl Fn(&Op) -> bool) -> usize {
    program.instrs().iter().filter(|i| wanted(&i.op)).count()
}

#[test]
fn random_programs_keep_their_numbers() {
    let mut work = [0; 5];
    for seed in 0..300 {
        let program = random_program(seed);
        check(&program, seed);
        let live = dead_code(&program);
        work[0] += program.instrs().len() - live.instrs().len();
        work[1] += live.instrs().len() - common(&live).instrs().len();
        work[2] += live.instrs().len() - fold_add(&live).instrs().len();
        work[3] += live.instrs().len() - fuse(&live).instrs().len();
        work[4] += live.instrs().len() - pack(&live).instrs().len();
    }
    // The programs are of use only if the passes find something in them.
    assert!(work.iter().all(|&n| n > 150), "{work:?}");
}

#[test]
fn random_programs_peak_no_higher() {
    let mut lower = 0;
    for seed in 0..300 {
        let program = dead_code(&random_program(seed));
        let (before, after) = (peak_bytes(&program), peak_bytes(&sort_free(&program)));
        assert!(after <= before, "seed {seed}: {after} > {before}");
        lower += usize::from(after < before);
    }
    assert!(lower > 50, "{lower}");
}

#[test]
fn a_transformer_keeps_its_loss_and_gradients() {
    for tied in [false, true] {
        check(&joint(&transformer(DType::F64, tied)), 7);
    }
    check(&joint(&block_program(DType::F64)), 8);
    check(&backward(&joint(&block_program(DType::F64))), 9);
}

#[test]
fn narrow_types_stay_within_their_rounding() {
    let program = joint(&transformer(DType::Bf16, true));
    let exact = joint(&transformer(DType::F64, true));
    let after = all(&program);
    verify(&after).unwrap();
    let (mut plain, mut rewritten) = (0.0, 0.0);
    for seed in 0..10 {
        let before = numbers(&program, seed);
        for pass in [common, sort_free, pack, fuse, dead_code] {
            assert_eq!(distance(&before, &numbers(&pass(&program), seed)), 0.0);
        }
        let truth = numbers(&exact, seed);
        plain += distance(&truth, &before) / 10.0;
        rewritten += distance(&truth, &numbers(&after, seed)) / 10.0;
    }
    // Sums that are rounded once instead of twice move the numbers, but not away from the truth.
    println!("bf16 against f64: {plain} as written, {rewritten} rewritten");
    assert!(rewritten < 1.1 * plain, "{rewritten} against {plain}");
}

#[test]
fn the_head_of_a_transformer_is_chunked() {
    for tied in [false, true] {
        let program = joint(&transformer(DType::F32, tied));
        let after = chunked(&program);
        assert_eq!(count(&after, |op| matches!(op, Op::LinearCrossEntropy(_))), 1);
        assert_eq!(count(&after, |op| op.name().starts_with("cross_entropy")), 0);
        let logits = after.values().iter().filter(|ty| ty.shape == [2, 6, 24]);
        assert_eq!(logits.count(), 0);
        // The three products of the head are gone, and nothing else is.
        let products = |p: &Program| count(p, |op| matches!(op, Op::Matmul(_)));
        assert_eq!(products(&after) + 3, products(&program));
        assert_eq!(after.flops(), program.flops());
    }
}

#[test]
fn a_block_folds_every_sum_that_ends_in_a_product() {
    let program = joint(&block_program(DType::F32));
    let after = fold_add(&program);
    let adds = |p: &Program| count(p, |op| op.name() == "add");
    let folded = count(&after, |op| matches!(op, Op::Matmul(m) if m.add));
    // Forward: both residuals. Backward: q, k, v meet in one cotangent and gate, up in another
    // (three sums of products); the two sums with a norm's gradient are not of products.
    assert_eq!((adds(&program), adds(&after), folded), (7, 2, 5));
}

/// Query, key, value and gate, up, forward; the gradients of their weights, backward. What makes the
/// cotangents shares nothing.
#[test]
fn a_block_packs_the_products_of_its_norms() {
    let sizes = |program: &Program| -> Vec<(Phase, usize)> {
        let packs = program.instrs().iter().filter(|i| matches!(i.op, Op::PackedMatmul(_)));
        packs.map(|i| (i.phase, i.outputs.len())).collect()
    };
    let joint = fold_add(&joint(&block_program(DType::F32)));
    let whole = pack(&joint);
    use Phase::{F, W};
    assert_eq!(sizes(&whole), [(F, 3), (F, 2), (W, 2), (W, 3)]);
    assert_eq!(whole.flops(), joint.flops());
    let after = pack(&dead_code_and_inputs(&backward(&joint)));
    assert_eq!(sizes(&after), [(W, 2), (W, 3)]);
}

#[test]
fn swiglu_is_one_group_forward_and_one_backward() {
    let after = fuse(&fold_add(&joint(&block_program(DType::F32))));
    let steps: Vec<(Phase, usize)> = (after.instrs().iter())
        .filter_map(|i| match &i.op {
            Op::Fused(fused) => Some((i.phase, fused.steps.len())),
            _ => None,
        })
        .collect();
    assert_eq!(steps, [(Phase::F, 2), (Phase::B, 3)]);
}

#[test]
fn the_backward_of_a_block_peaks_no_higher() {
    for dtype in [DType::F32, DType::Bf16] {
        let program = dead_code_and_inputs(&backward(&joint(&block_program(dtype))));
        let sorted = sort_free(&program);
        verify(&sorted).unwrap();
        let (before, after) = (peak_bytes(&program), peak_bytes(&sorted));
        println!("{dtype}: {before} -> {after}");
        assert!(after <= before);
        // Weight gradients last is the worst order for memory, and sorting mends it.
        let split = weights_last(&program);
        assert!(peak_bytes(&split) > before);
        assert!(peak_bytes(&sort_free(&split)) <= before);
    }
}

fn weights_last(program: &Program) -> Program {
    let mut rewriter = phalanx_ir::Rewriter::new(program);
    for phase in [Phase::F, Phase::B, Phase::W] {
        for (index, _) in (program.instrs().iter().enumerate()).filter(|(_, i)| i.phase == phase) {
            rewriter.keep(index);
        }
    }
    rewriter.finish()
}
