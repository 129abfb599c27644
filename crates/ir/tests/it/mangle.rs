//! No program that can be read makes the verifier panic, however little its operands fit.

use std::collections::BTreeSet;

use phalanx_ir::{DType, OpDef, Program, TensorType, text, verify};

use crate::every::every_op;

/// The text of a program whose operand `which` has another type.
fn with_operand(program: &Program, which: usize, ty: &str) -> String {
    let head = format!("  in{which}: data ");
    let lines = program.to_string();
    let lines = lines.lines().map(|line| {
        if line.starts_with("mesh") {
            "mesh a=2 b=3".to_owned()
        } else if line.starts_with(&head) {
            format!("{head}{ty}")
        } else {
            line.to_owned()
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Shapes near a shape: a dim more, less, longer, shorter, empty.
fn mangled(shape: &[usize]) -> BTreeSet<Vec<usize>> {
    let mut out = BTreeSet::from([vec![], vec![7], vec![2, 3, 4, 5, 6]]);
    out.insert([shape, &[3]].concat());
    out.insert([&[3], shape].concat());
    for i in 0..shape.len() {
        out.insert([&shape[..i], &shape[i + 1..]].concat());
        for size in [0, 1, shape[i] + 1, shape[i] * 2] {
            let mut other = shape.to_vec();
            other[i] = size;
            out.insert(other);
        }
    }
    out.remove(shape);
    out
}

fn check(text: &str) -> Result<(), String> {
    let program = text::parse(text).map_err(|e| e.to_string())?;
    verify(&program).map_err(|e| e.to_string())
}

#[test]
fn operands_of_other_shapes_types_and_layouts_never_panic() {
    let (mut tried, mut refused) = (0, 0);
    let mut attempt = |text: String| {
        tried += 1;
        refused += usize::from(check(&text).is_err());
    };
    for program in every_op() {
        for which in 0..program.inputs().len() {
            let ty = program.ty(program.inputs()[which].value);
            for shape in mangled(&ty.shape) {
                let other = TensorType::new(ty.dtype, shape);
                attempt(with_operand(&program, which, &other.to_string()));
            }
            for dtype in [DType::F32, DType::Bf16, DType::I32, DType::Bool] {
                let other = TensorType::new(dtype, ty.shape.clone());
                attempt(with_operand(&program, which, &other.to_string()));
            }
            let plain = TensorType::new(ty.dtype, ty.shape.clone());
            for axis in ["a", "b", "a,b", "a@zigzag", "b@striped"] {
                for dim in 0..ty.shape.len() {
                    let layout = format!("{plain}{{{dim}:{axis}}}");
                    attempt(with_operand(&program, which, &layout));
                }
            }
            attempt(with_operand(&program, which, &format!("{plain}{{P:a,b}}")));
            attempt(with_operand(&program, which, &format!("pending {plain}")));
        }
    }
    // Some of it is legal: another vocabulary, a longer dim to slice or to sum.
    assert!(tried > 1000 && refused * 10 > tried * 9, "{refused} of {tried} refused");
}

#[test]
fn instructions_with_missing_or_extra_operands_are_refused() {
    for program in every_op() {
        let (text, arity) = (program.to_string(), program.inputs().len());
        if arity == 0 {
            continue;
        }
        let last = format!("in{}", arity - 1);
        let doubled = text.replace(&format!("{last},"), &format!("{last}, {last},"));
        let doubled = doubled.replace(&format!("{last})"), &format!("{last}, {last})"));
        let op = &program.instrs()[0].op;
        // A group of elementwise ops may ignore an operand, and an update may have one more number,
        // which says whether anything changes.
        let may_have_more = op.name() == "fused" || op.is_update();
        assert!(check(&doubled).is_err() || may_have_more, "{doubled}");
        let line = text.lines().find(|l| l.contains(" = ")).unwrap();
        let none = line.split_once('(').unwrap().0.to_owned()
            + "("
            + line
                .split_once("in0")
                .unwrap()
                .1
                .trim_start_matches(", in1")
                .trim_start_matches(", ");
        assert!(check(&text.replace(line, &none)).is_err(), "{none}");
    }
}

#[test]
fn every_operand_of_a_gradient_is_checked() {
    let named = ["attention_grad", "rms_norm_grad", "layer_norm_grad", "softmax_grad"];
    let named = [&named[..], &["cross_entropy_grad"]].concat();
    for program in every_op().iter().filter(|p| named.contains(&p.instrs()[0].op.name())) {
        for which in 0..program.inputs().len() {
            let ty = program.ty(program.inputs()[which].value);
            let other = if ty.dtype == DType::I32 { DType::F32 } else { DType::I32 };
            let other = TensorType::new(other, ty.shape.clone()).to_string();
            assert!(check(&with_operand(program, which, &other)).is_err(), "{program}");
            for shape in mangled(&ty.shape) {
                let text =
                    with_operand(program, which, &TensorType::new(ty.dtype, shape).to_string());
                assert!(check(&text).is_err(), "{text}");
            }
        }
    }
}

#[test]
fn absurd_attributes_are_refused() {
    let huge = usize::MAX;
    for call in [
        format!("slice(x, dim=0, start={huge}, len=2) : f32[8]"),
        "slice(x, dim=7, start=0, len=2) : f32[8]".to_owned(),
        format!("pad(x, dim=0, before={huge}, after={huge}) : f32[8]"),
        format!("reshape(x, shape={huge}x{huge}) : f32[8]"),
        "broadcast(x, shape=8, dims=9) : f32[8]".to_owned(),
        "matmul(x, x, spec=ßa,aß->ß, out=f32, add=false) : f32[8]".to_owned(),
        "fused(x, body=exp(i0)/f32, results=none, full=0) : f32[8]".to_owned(),
        "fused(x, body=exp(i3)/f32, results=0, full=0) : f32[8]".to_owned(),
        "transpose(x, perm=0x0) : f32[8]".to_owned(),
    ] {
        let text = format!("mesh a=2\nprogram t {{\nx: data f32[8]\n%1 = {call}\n}}\n");
        assert!(check(&text).is_err(), "{call}");
    }
}
