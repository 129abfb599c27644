//! Reverse mode as plainly as it can be said: enough to give passes real backward programs.

use phalanx_ir::ops::{Binary, BinaryKind};
use phalanx_ir::vjp::Vjp;
use phalanx_ir::{OpDef, Phase, Program, Role, ValueId};

/// Forward and backward in one program, instructions tagged F, B or W.
pub(crate) fn joint(forward: &Program) -> Program {
    let mut program = forward.clone();
    let mut grads: Vec<Option<ValueId>> = vec![None; forward.values().len()];
    for port in forward.outputs() {
        let ty = forward.ty(port.value).clone();
        grads[port.value.index()] = Some(match port.role {
            Role::Loss => program.constant(ty.dtype, &[], 1.0, Phase::B).unwrap(),
            _ => program.input(format!("d_{}", port.name), Role::Cotangent, ty),
        });
    }
    let wanted = wanted(forward);
    for instr in forward.instrs().iter().rev() {
        let cotangents: Vec<_> = instr.outputs.iter().map(|v| grads[v.index()]).collect();
        if cotangents.iter().all(Option::is_none) {
            continue;
        }
        let dtypes = (instr.inputs.iter())
            .map(|&v| wanted[v.index()].then(|| forward.ty(v).dtype))
            .collect();
        let mut vjp = Vjp::new(&mut program, instr.clone(), cotangents, dtypes);
        instr.op.vjp(&mut vjp).unwrap();
        for (value, grad) in instr.inputs.iter().zip(vjp.finish()) {
            let slot = &mut grads[value.index()];
            *slot = match (*slot, grad) {
                (Some(old), Some(new)) => {
                    let add = Binary { kind: BinaryKind::Add };
                    Some(program.push(add.into(), &[old, new], Phase::B).unwrap()[0])
                }
                (old, new) => new.or(old),
            };
        }
    }
    for port in forward.inputs() {
        let role = match port.role {
            Role::Param => Role::Gradient,
            Role::Boundary => Role::Cotangent,
            _ => continue,
        };
        if let Some(grad) = grads[port.value.index()] {
            program.output(format!("d_{}", port.name), role, grad);
        }
    }
    tagged(&program)
}

/// The backward of a joint graph alone: forward values that it reads become residuals.
pub(crate) fn backward(joint: &Program) -> Program {
    let mut program = Program::new("backward", joint.mesh().clone());
    let mut map: Vec<Option<ValueId>> = vec![None; joint.values().len()];
    for port in joint.inputs() {
        let ty = joint.ty(port.value).clone();
        map[port.value.index()] = Some(program.input(port.name.clone(), port.role, ty));
    }
    let instrs = joint.instrs().iter().filter(|i| i.phase != Phase::F);
    for instr in instrs {
        let mut inputs = Vec::new();
        for &value in &instr.inputs {
            let ty = joint.ty(value).clone();
            let new = map[value.index()]
                .unwrap_or_else(|| program.input(format!("r{}", value.0), Role::Residual, ty));
            map[value.index()] = Some(new);
            inputs.push(new);
        }
        let made = program.push(instr.op.clone(), &inputs, instr.phase).unwrap();
        for (old, new) in instr.outputs.iter().zip(made) {
            map[old.index()] = Some(new);
        }
    }
    for port in joint.outputs() {
        if matches!(port.role, Role::Cotangent | Role::Gradient) {
            let value = map[port.value.index()].unwrap();
            program.output(port.name.clone(), port.role, value);
        }
    }
    program.canonical()
}

/// Which values depend on a parameter or a boundary.
fn wanted(forward: &Program) -> Vec<bool> {
    let mut wanted = vec![false; forward.values().len()];
    for port in forward.inputs() {
        wanted[port.value.index()] = matches!(port.role, Role::Param | Role::Boundary);
    }
    for instr in forward.instrs() {
        let any = instr.inputs.iter().any(|v| wanted[v.index()]);
        for &value in &instr.outputs {
            wanted[value.index()] = any && forward.ty(value).dtype.is_float();
        }
    }
    wanted
}

/// What leads only to gradients of parameters is W.
fn tagged(program: &Program) -> Program {
    let mut early = vec![false; program.values().len()];
    for port in program.outputs() {
        early[port.value.index()] = port.role != Role::Gradient;
    }
    let mut phases = Vec::new();
    for instr in program.instrs().iter().rev() {
        let needed = instr.outputs.iter().any(|v| early[v.index()]);
        let last = instr.phase == Phase::B && !needed && instr.op.name() == "matmul";
        phases.push(if last { Phase::W } else { instr.phase });
        // A W instruction reads values of B, which are therefore not W themselves.
        for value in &instr.inputs {
            early[value.index()] = true;
        }
    }
    phases.reverse();
    let program = program.canonical();
    let mut new = Program::new(program.name.clone(), program.mesh().clone());
    for port in program.inputs() {
        new.input(port.name.clone(), port.role, program.ty(port.value).clone());
    }
    for (instr, phase) in program.instrs().iter().zip(phases) {
        new.push(instr.op.clone(), &instr.inputs, phase).unwrap();
    }
    for port in program.outputs() {
        new.output(port.name.clone(), port.role, port.value);
    }
    new
}
