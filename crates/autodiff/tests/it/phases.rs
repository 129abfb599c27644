//! F, B, W, BW and FBW are cuts of one graph: however a schedule runs them, the bits are the same.

use phalanx_autodiff::{Recompute, joint, slice};
use phalanx_ir::{Builder, DType, Graph, Op, Program, Role, TensorType, verify};
use phalanx_passes::dead_code;

use crate::support::{DTYPES, assert_same_bits, chain, chains, numbers, segments};

#[test]
fn every_chain_of_phases_gives_the_same_bits() {
    for (compute, grads) in DTYPES {
        for (name, forward) in segments(compute) {
            let numbers = numbers(&forward);
            for recompute in Recompute::ALL {
                let phases = slice(&joint(&forward, grads).unwrap(), recompute);
                let expected = chain(&[&phases.fbw], &numbers);
                for (order, programs) in chains(&phases) {
                    let found = chain(&programs, &numbers);
                    let what = format!("{name}, {compute}, {grads}, {recompute}: {order}");
                    assert_same_bits(&found, &expected, &what);
                }
            }
        }
    }
}

#[test]
fn every_phase_is_a_valid_program_without_waste() {
    for (name, forward) in segments(DType::Bf16) {
        for recompute in Recompute::ALL {
            let phases = slice(&joint(&forward, DType::F32).unwrap(), recompute);
            for (order, programs) in chains(&phases) {
                let what = format!("{name}, {recompute}: {order}");
                programs.iter().for_each(|p| verify(p).unwrap());
                let mut kept: Vec<String> = Vec::new();
                for program in programs.iter().rev() {
                    let unread: Vec<&str> = (program.outputs_with(Role::Residual))
                        .map(|p| p.name.as_str())
                        .filter(|name| !kept.iter().any(|k| k == name))
                        .collect();
                    // In the split backward W reads its share, so only what nobody reads is waste.
                    assert!(unread.is_empty(), "{what}: nobody reads {unread:?}");
                    kept.extend(program.inputs_with(Role::Residual).map(|p| p.name.clone()));
                }
            }
        }
    }
}

#[test]
fn w_reads_no_weights() {
    for (name, forward) in segments(DType::F32) {
        for recompute in Recompute::ALL {
            let phases = slice(&joint(&forward, DType::F32).unwrap(), recompute);
            let weights = phases.w.inputs_with(Role::Param).count();
            assert_eq!(weights, 0, "{name}, {recompute}");
        }
    }
}

/// Nor what is made from weights alone: a cast or reshaped weight is made again where it is read, and
/// what reads it belongs in B, also in a first segment, which has no cotangent to give.
#[test]
fn nothing_made_from_weights_alone_is_kept_or_handed_on() {
    let weight = [7, 3];
    let b = Builder::new("first", DType::F32);
    let x = b.data("x", DType::F32, [5, 4]);
    let stored = |name: &str, shape: &[usize]| {
        b.input(name, Role::Param, TensorType::new(DType::F64, shape))
    };
    let cast = stored("cast", &weight).cast(DType::F32);
    let reshaped = stored("reshaped", &[9]).cast(DType::F32).reshape([3, 3]).scale(2.0);
    let h = x.matmul(b.param("w", [4, 7])).tanh();
    b.output("h", h.matmul(cast).tanh().matmul(reshaped).tanh());
    let forward = b.finish().unwrap();
    for recompute in Recompute::ALL {
        let joint = joint(&forward, DType::F64).unwrap();
        let phases = slice(&joint, recompute);
        assert_eq!(phases.w.inputs_with(Role::Param).count(), 0, "{recompute}");
        for program in [&phases.f, &phases.b] {
            for port in program.outputs_with(Role::Residual) {
                let shape = &program.ty(port.value).shape;
                assert!(shape[0] == 5, "{recompute}: {} hands on {shape:?}", program.name);
            }
        }
        // Both products that read weights are in B, the three weight gradients in W; the last
        // activation reads what comes after all three products of the forward.
        let again = if recompute == Recompute::Full { 3 } else { 0 };
        assert_eq!([&phases.b, &phases.w].map(products), [2 + again, 3], "{recompute}");
        let numbers = numbers(&forward);
        let expected = chain(&[&phases.fbw], &numbers);
        for (order, programs) in chains(&phases) {
            assert_same_bits(&chain(&programs, &numbers), &expected, order);
        }
    }
}

/// A product belongs in B if a cotangent needs it, or an instruction that reads a weight does: W
/// may not read weights. All others, in particular every weight gradient, wait in W.
#[test]
fn b_holds_no_product_that_only_w_needs() {
    for (name, forward) in segments(DType::F32) {
        for recompute in Recompute::ALL {
            let phases = slice(&joint(&forward, DType::F32).unwrap(), recompute);
            let needed = needed(&phases.b);
            for (index, instr) in phases.b.instrs().iter().enumerate() {
                let idle = is_product(&instr.op) && !needed[index];
                assert!(!idle, "{name}, {recompute}: {:?}", instr.op);
            }
            let (before, after) = (products(&phases.b), products(&dead_code(&phases.b)));
            assert_eq!(before, after, "{name}, {recompute}: a product is not used");
        }
    }
}

/// The same by counting: one product for the cotangent of each linear layer's input, if that is
/// wanted, and one for its weight; full recomputation makes all but the last layer's again.
#[test]
fn products_of_each_phase_are_counted() {
    let expected = |name: &str| match name.split(" (").next().unwrap() {
        "llama embed" | "gpt2 embed" => [0, 0, 0, 0],
        "llama block" => [7, 7, 7, 6],
        "gpt2 block" => [6, 6, 6, 5],
        // The loss's gradient reads the logits, so here the product is made again.
        "llama head" | "gpt2 head" => [1, 1, 1, 1],
        // The activation's gradient reads the activation, which comes after the product. The
        // first layer has no differentiated input; the last one's error is its gradient.
        "mlp layer" => [1, 1, 1, 1],
        other => panic!("no count for {other}"),
    };
    for (name, forward) in segments(DType::F32) {
        let [f, b, w, again] = expected(&name);
        let b = match forward.inputs_with(Role::Boundary).count() {
            0 => 0,
            _ => b,
        };
        let joint = joint(&forward, DType::F32).unwrap();
        let found = |recompute| {
            let p = slice(&joint, recompute);
            [&p.f, &p.b, &p.w, &p.bw, &p.fbw].map(products)
        };
        let none = [f, b, w, b + w, f + b + w];
        assert_eq!(found(Recompute::None), none, "{name}");
        let full = [f, b + again, w, b + again + w, f + b + w];
        assert_eq!(found(Recompute::Full), full, "{name}, full");
    }
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::Matmul(_))
}

fn products(program: &Program) -> usize {
    let instrs = program.instrs().iter();
    instrs.filter(|i| is_product(&i.op)).count()
}

/// By instruction: whether a cotangent, or an instruction that reads a weight, depends on it.
fn needed(b: &Program) -> Vec<bool> {
    let graph = Graph::new(b);
    let weights: Vec<_> = b.inputs_with(Role::Param).map(|p| p.value).collect();
    let mut needed = vec![false; b.instrs().len()];
    for port in b.outputs_with(Role::Cotangent) {
        if let Some(maker) = graph.maker(port.value) {
            needed[maker] = true;
        }
    }
    for index in (0..needed.len()).rev() {
        let instr = &b.instrs()[index];
        needed[index] |= instr.inputs.iter().any(|v| weights.contains(v));
        if needed[index] {
            let makers = instr.inputs.iter().filter_map(|v| graph.maker(*v));
            makers.for_each(|maker| needed[maker] = true);
        }
    }
    needed
}
