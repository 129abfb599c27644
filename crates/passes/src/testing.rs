//! What the passes' own tests share.

use phalanx_ir::{Program, text, verify};

/// Reads a program that must verify.
pub(crate) fn read(source: &str) -> Program {
    let program = text::parse(source).unwrap();
    verify(&program).unwrap();
    program
}

/// Runs a pass on a program of one device, given by its lines, and compares the result: the same
/// inputs and outputs around these instructions.
pub(crate) fn check(before: &str, pass: impl Fn(&Program) -> Program, instrs: &str) {
    check_on("", before, pass, instrs);
}

/// The same on a mesh.
pub(crate) fn check_on(mesh: &str, before: &str, pass: impl Fn(&Program) -> Program, instrs: &str) {
    let (outputs, lines): (Vec<&str>, Vec<&str>) =
        before.lines().partition(|line| line.trim().starts_with("return "));
    let inputs: Vec<&str> = lines.into_iter().filter(|line| !line.contains(" = ")).collect();
    let after = [inputs.join("\n").as_str(), instrs, &outputs.join("\n")].join("\n");
    check_whole(mesh, before, pass, &after);
}

/// Runs a pass that finds nothing to do.
pub(crate) fn check_unchanged(mesh: &str, text: &str, pass: impl Fn(&Program) -> Program) {
    check_whole(mesh, text, pass, text);
}

/// Runs a pass and compares the whole text of the result.
pub(crate) fn check_whole(
    mesh: &str,
    before: &str,
    pass: impl Fn(&Program) -> Program,
    after: &str,
) {
    let whole = |lines: &str| format!("mesh {mesh}\nprogram p {{\n{lines}\n}}\n");
    let result = pass(&read(&whole(before)));
    verify(&result).unwrap_or_else(|e| panic!("{e}\n{result}"));
    let expected = read(&whole(after)).canonical();
    assert_eq!(result.to_string(), expected.to_string());
}
