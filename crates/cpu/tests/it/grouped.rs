//! Rows of experts, packed, and products with the matrices of their experts.

use phalanx_ir::ops::{CompareKind, GroupedMatmul, GroupedMatmulGrad, Queue};
use phalanx_ir::{Builder, DType, Program, Role, TensorType};

use crate::harness::{distance, inputs, on_cpu, on_own_products, on_reference, tolerance};
use crate::ops::{each, gradient};

/// Tokens to experts and back, and the gradient of the matrices; some choices do not stand.
fn packed(b: &Builder, dtype: DType, tokens: usize, [parts, room]: [usize; 2]) {
    let (experts, width, ffn) = (4, 12, 9);
    let x = b.data("x", dtype, [2, tokens, width]);
    let index = b.data("index", DType::I32, [2, tokens, 2]);
    let gates = b.data("gates", dtype.accumulator(), [2, tokens, 2]);
    let zero = b.data("zero", dtype.accumulator(), [2, tokens, 2]);
    let stands = gates.compare(CompareKind::Lt, zero.shift(1.0));
    let w = b.param("w", [experts, width, ffn]);
    let (rows, slot, counts) = x.queue(index, Queue { experts, parts, room }, Some(stands));
    let inner = rows.grouped_matmul(w, counts);
    let back = b.apply(GroupedMatmul { transposed: true }, &[inner, w, counts]);
    b.probe("slot", slot);
    b.probe("counts", counts);
    b.probe("inner", inner);
    b.output("y", back.combine(slot, gates));
    let grad = GroupedMatmulGrad { experts, out: dtype };
    gradient(b, "dw", b.apply(grad, &[rows, inner, counts]));
}

#[test]
fn packed_rows_in_every_type() {
    // The last two have less room than some regions need.
    for of in [[1, 14], [2, 14], [1, 9], [2, 4]] {
        each("packed", |b, dtype| packed(b, dtype, 7, of));
    }
}

/// Enough rows that an expert's are taken in several turns: the bits are the same for any number of threads,
/// also where some experts have most of the rows.
#[test]
fn many_rows_have_the_same_bits_on_any_number_of_threads() {
    for (dtype, out) in
        [(DType::F32, DType::F32), (DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)]
    {
        let program: Program = {
            let b = Builder::new("many", dtype);
            // More columns than are packed at once.
            let (experts, width, ffn) = (5, 72, 530);
            let input = |name: &str, shape: &[usize]| {
                b.input(name, Role::Data, TensorType::new(dtype, shape.to_vec()))
            };
            let (x, w) = (input("x", &[2, 700, width]), input("w", &[experts, width, ffn]));
            let index = b.data("index", DType::I32, [2, 700, 2]);
            let (rows, _, counts) = x.queue(index, Queue::worst(experts, 1, [700, 2]), None);
            let inner = rows.grouped_matmul(w, counts);
            b.probe("inner", inner);
            let grad = GroupedMatmulGrad { experts, out };
            gradient(&b, "dw", b.apply(grad, &[rows, inner, counts]));
            b.finish().unwrap()
        };
        // Choices among three of five experts: two have no rows.
        let given = inputs(&program, 3, 5);
        let expected = on_reference(&program, &given);
        for run in [on_cpu, on_own_products] {
            let alone = run(&program, &given, 1, None);
            for (got, expected) in alone.iter().zip(&expected) {
                assert!(distance(got, expected, 0.0) <= tolerance(dtype), "{dtype} to {out}");
            }
            for threads in 2..6 {
                let got = run(&program, &given, threads, None);
                assert_eq!(got, alone, "{threads} threads, {dtype} to {out}");
            }
        }
    }
}
