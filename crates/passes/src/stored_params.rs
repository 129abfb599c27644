//! Parameters that are stored in another element type than programs compute in: each is cast
//! where it enters, so a program reads `f32` weights and multiplies in `bf16`, for example.
//!
//! On a joint graph this comes after the gradients were formed: they then come out in the type
//! they are accumulated in, and never pass through the cast.

use phalanx_ir::ops::Cast;
use phalanx_ir::{DType, Phase, Program, Role, ValueId};

/// Declares every parameter in `stored` and casts it to the type the program computes in.
pub fn stored_params(program: &Program, stored: DType) -> Program {
    let differs = |value| program.ty(value).dtype != stored;
    if !program.inputs_with(Role::Param).any(|p| differs(p.value)) {
        return program.clone();
    }
    let mut out = Program::new(program.name.clone(), program.mesh().clone());
    let mut map = vec![ValueId(u32::MAX); program.values().len()];
    let mut casts = Vec::new();
    for port in program.inputs() {
        let mut ty = program.ty(port.value).clone();
        if port.role == Role::Param && ty.dtype != stored {
            casts.push(port.value);
            ty.dtype = stored;
        }
        map[port.value.index()] = out.input(&port.name, port.role, ty);
    }
    for value in casts {
        let ty = program.ty(value).clone();
        let cast = Cast { to: ty.dtype };
        let inputs = [map[value.index()]];
        map[value.index()] = out.push_unchecked(cast.into(), &inputs, vec![ty], Phase::F)[0];
    }
    for instr in program.instrs() {
        let inputs: Vec<ValueId> = instr.inputs.iter().map(|v| map[v.index()]).collect();
        let types = instr.outputs.iter().map(|&v| program.ty(v).clone());
        let made = out.push_unchecked(instr.op.clone(), &inputs, types.collect(), instr.phase);
        for (old, new) in instr.outputs.iter().zip(made) {
            map[old.index()] = new;
        }
    }
    for port in program.outputs() {
        out.output(&port.name, port.role, map[port.value.index()]);
    }
    out.canonical()
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
