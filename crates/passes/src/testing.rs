//! What the passes' own tests share.

use phalanx_ir::{Program, text, verify};

/// Reads a program that must verify.
pub(crate) fn read(source: &str) -> Program {
    let program = text::parse(source).unwrap();
    verify(&program).unwrap();
    program
}

/// Runs a pass on a program of one device, given by its lines, and compares the result's text.
pub(crate) fn check(before: &str, pass: impl Fn(&Program) -> Program, after: &str) {
    check_on("", before, pass, after);
}

/// The same on a mesh.
pub(crate) fn check_on(mesh: &str, before: &str, pass: impl Fn(&Program) -> Program, after: &str) {
    let whole = |lines: &str| format!("mesh {mesh}\nprogram p {{\n{lines}\n}}\n");
    let result = pass(&read(&whole(before)));
    verify(&result).unwrap_or_else(|e| panic!("{e}\n{result}"));
    let expected = read(&whole(after)).canonical();
    assert_eq!(result.to_string(), expected.to_string());
}
