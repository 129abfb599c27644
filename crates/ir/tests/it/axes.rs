//! Every refusal of a layout names the axis it is about.

use phalanx_ir::{Axis, IrError, VerifyError, text, verify};

fn refused(body: &str) -> VerifyError {
    let program = text::parse(&format!("mesh dp=2 tp=4\nprogram t {{\n{body}\n}}\n")).unwrap();
    *verify(&program).unwrap_err()
}

fn axis(name: &str) -> Option<Axis> {
    Some(Axis::new(name).unwrap())
}

#[test]
fn operands_that_disagree_name_the_axis() {
    let error = refused("a: data f32[8]{0:dp}\nb: data f32[8]\n%2 = add(a, b) : f32[8]{0:dp}");
    assert_eq!(error.axis, axis("dp"));
    assert!(error.to_string().contains("`dp`"), "{error}");
}

#[test]
fn a_wrong_declaration_names_the_axis() {
    let error = refused("a: data f32[8,8]{0:dp 1:tp}\n%1 = exp(a) : f32[8,8]{0:dp}");
    assert_eq!(error.axis, axis("tp"));
    assert!(IrError::from(Box::new(error)).to_string().contains("differs in `tp`"));
}

#[test]
fn shards_of_a_minor_factor_are_gathered_before_a_reshape() {
    let error = refused("a: data f32[8,16]{1:tp}\n%1 = reshape(a, shape=128) : f32[128]{0:tp}");
    assert_eq!(error.axis, axis("tp"));
    assert!(error.to_string().contains("gather a first (all_gather<tp>)"), "{error}");
}
