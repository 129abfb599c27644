//! Mistakes are errors that name what is wrong.

use phalanx_ir::ops::Op;
use phalanx_ir::{Builder, DType, Mesh, Phase, Program, Role, TensorType, ValueId};
use phalanx_reference::{RefTensor, ReferenceError, run};
use phalanx_testing::{ids, tensor};

fn sum() -> Program {
    let b = Builder::new("sum", DType::F64);
    let (x, y) = (b.param("x", [2]), b.param("y", [2]));
    b.output("z", x + y);
    b.finish().unwrap()
}

fn message(program: &Program, inputs: &[(&str, RefTensor)]) -> String {
    run(program, inputs).unwrap_err().to_string()
}

#[test]
fn inputs_are_checked_by_name_and_type() {
    let x = ("x", tensor(&[2], &[1.0, 2.0]));
    assert_eq!(
        message(&sum(), std::slice::from_ref(&x)),
        "program sum: the input `y`, f64[2], was not given"
    );
    assert_eq!(
        message(&sum(), &[x.clone(), ("y", tensor(&[1], &[1.0]))]),
        "program sum: the input `y` is f64[2], but f64[1] was given"
    );
    let single = RefTensor::from_f32(&[2], &[1.0, 2.0]).unwrap();
    assert_eq!(
        message(&sum(), &[x.clone(), ("y", single)]),
        "program sum: the input `y` is f64[2], but f32[2] was given"
    );
    assert_eq!(
        message(&sum(), &[("w", tensor(&[1], &[1.0]))]),
        "program sum has no input `w` (it has: x, y)"
    );
    let both = [x.clone(), ("y", x.1)];
    let (name, z) = run(&sum(), &both).unwrap().remove(0);
    assert_eq!((name.as_str(), z.values()), ("z", vec![2.0, 4.0]));
}

#[test]
fn ids_out_of_range_name_op_and_value() {
    let b = Builder::new("lookup", DType::F64);
    let rows = b.data("ids", DType::I32, [3]);
    b.output("y", b.param("table", [4, 1]).embedding(rows));
    let program = b.finish().unwrap();
    for (bad, text) in [(4, "4"), (-1, "-1")] {
        let rows = ids(&[3], &[0, bad, 3]);
        assert_eq!(
            message(&program, &[("table", tensor(&[4, 1], &[0.0; 4])), ("ids", rows)]),
            format!("embedding: the id {text} at position 1 is not in 0..4")
        );
    }
    let b = Builder::new("loss", DType::F64);
    let targets = b.data("targets", DType::I32, [2]);
    b.output("y", b.param("logits", [2, 3]).cross_entropy(targets));
    let targets = ids(&[2], &[-5, 3]);
    assert_eq!(
        message(
            &b.finish().unwrap(),
            &[("logits", tensor(&[2, 3], &[0.0; 6])), ("targets", targets)]
        ),
        "cross_entropy: the id 3 at position 1 is not in 0..3"
    );
}

#[test]
fn wrong_programs_are_refused() {
    let mut program = Program::new("wrong", Mesh::single());
    let ty = TensorType::new(DType::F64, [2]);
    let x = program.input("x", Role::Data, ty);
    let op = || Op::from(phalanx_ir::ops::Scale { by: 2.0 });
    let declared = vec![TensorType::new(DType::F64, [3])];
    program.push_unchecked(op(), &[x], declared, Phase::F);
    let inputs = [("x", tensor(&[2], &[0.0; 2]))];
    assert!(matches!(
        run(&program, &inputs),
        Err(ReferenceError::WrongResult { value: 1, op: "scale", .. })
    ));

    let mut program = Program::new("early", Mesh::single());
    let ty = vec![TensorType::new(DType::F64, [2])];
    program.push_unchecked(op(), &[ValueId(0)], ty, Phase::F);
    assert!(matches!(run(&program, &[]), Err(ReferenceError::Undefined { value: 0, .. })));
}

#[test]
fn integers_have_no_quotient() {
    let b = Builder::new("quotient", DType::F64);
    let (x, y) = (b.data("x", DType::I32, [1]), b.data("y", DType::I32, [1]));
    b.probe("z", x / y);
    let one = ids(&[1], &[1]);
    let error = message(&b.finish().unwrap(), &[("x", one.clone()), ("y", one)]);
    assert!(error.starts_with("div: operand 1 is i32[1]"), "{error}");
}
