//! Parameters that are stored in another element type than programs compute in: each is cast
//! where it enters, so a program reads `f32` weights and multiplies in `bf16`, for example.
//!
//! On a joint graph this runs after the gradients were added: so gradients have the type in which
//! they are accumulated, and never go through the cast.

use phalanx_ir::ops::Cast;
use phalanx_ir::{DType, Phase, Port, Program, Rewriter, Role};

/// Declares every parameter in `stored` and casts it to the type the program computes in.
pub fn stored_params(program: &Program, stored: DType) -> Program {
    let differs = |value| program.ty(value).dtype != stored;
    if !program.inputs_with(Role::Param).any(|p| differs(p.value)) {
        return program.clone();
    }
    let is_cast = |port: &Port| port.role == Role::Param && differs(port.value);
    let mut rewriter = Rewriter::with_types(program, |port| {
        let mut ty = program.ty(port.value).clone();
        if is_cast(port) {
            ty.dtype = stored;
        }
        ty
    });
    for port in program.inputs().iter().filter(|p| is_cast(p)) {
        let cast = Cast { to: program.ty(port.value).dtype };
        rewriter.emit(cast, &[port.value], &[port.value], Phase::F);
    }
    (0..program.instrs().len()).for_each(|index| rewriter.keep(index));
    rewriter.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_ir::{Builder, Op, verify};

    #[test]
    fn only_parameters_change_and_each_is_cast_once() {
        let b = Builder::new("line", DType::Bf16);
        let w = b.param("w", [4, 4]);
        b.output("y", b.boundary("x", [2, 4]).matmul(w).matmul(w));
        let program = b.finish().unwrap();
        assert_eq!(stored_params(&program, DType::Bf16), program);

        let wide = stored_params(&program, DType::F32);
        verify(&wide).unwrap();
        let dtype = |name: &str| wide.ty(wide.input_named(name).unwrap().value).dtype;
        assert_eq!((dtype("w"), dtype("x")), (DType::F32, DType::Bf16));
        let casts = wide.instrs().iter().filter(|i| matches!(i.op, Op::Cast(_)));
        assert_eq!(casts.count(), 1);
        assert_eq!(wide.instrs().len(), 3);
    }
}
