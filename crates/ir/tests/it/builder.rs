//! Mistakes in tensor code are kept and reported by `finish`; ordinary notation works.

use phalanx_ir::{Builder, DType, Role};

#[test]
fn a_name_stands_for_one_input() {
    let b = Builder::new("same", DType::F32);
    assert_eq!(b.param("w", [4]).id(), b.param("w", [4]).id());
    b.finish().unwrap();
    for other in ["f32[5]", "bf16[4]"] {
        let b = Builder::new("other", DType::F32);
        b.param("w", [4]);
        b.typed("w", Role::Param, other);
        let error = b.finish().unwrap_err().to_string();
        let expected = format!("input: `w` was declared as param f32[4], and now as param {other}");
        assert_eq!(error, expected);
    }
    let b = Builder::new("role", DType::F32);
    b.param("w", [4]);
    b.boundary("w", [4]);
    assert!(b.finish().unwrap_err().to_string().contains("now as boundary f32[4]"));
}

#[test]
fn a_tensor_of_another_program_is_refused() {
    let (one, two) = (Builder::new("one", DType::F32), Builder::new("two", DType::F32));
    let (x, y) = (one.param("x", [4]), two.param("y", [4]));
    let _ = x + y;
    two.output("x", x);
    let error = one.finish().unwrap_err().to_string();
    assert_eq!(error, "add: operand 1 (f32[4]) is a value of program two, not of one");
    let error = two.finish().unwrap_err().to_string();
    assert_eq!(error, "x: operand 0 (f32[4]) is a value of program one, not of two");
}

#[test]
fn code_that_looks_at_shapes_survives_a_mistake() {
    let b = Builder::new("wrong", DType::F32);
    let x = b.data("x", DType::F32, [2, 3, 4]);
    let y = x.matmul(b.param("w", [9, 9]));
    let width = y.shape()[2];
    b.output("z", y.rms_norm(b.param("n", [width]), 1e-5));
    assert!(b.finish().unwrap_err().to_string().starts_with("matmul: "));
}

#[test]
fn numbers_and_signs_are_written_as_usual() {
    let b = Builder::new("notation", DType::F32);
    let x = b.data("x", DType::F32, [4]);
    let y = -x * 2.0 + 1.0 - 3.0;
    b.output("y", y.exp().log().sqrt().sigmoid());
    let text = b.finish().unwrap().to_string();
    let calls: Vec<&str> =
        (text.lines()).filter_map(|l| Some(l.split_once(" = ")?.1.split_once(" : ")?.0)).collect();
    let expected = [
        "neg(x)",
        "scale(%1, by=2)",
        "shift(%2, by=1)",
        "shift(%3, by=-3)",
        "exp(%4)",
        "log(%5)",
        "sqrt(%6)",
        "sigmoid(%7)",
    ];
    assert_eq!(calls, expected);
}
