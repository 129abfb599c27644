//! Running a program: instructions in order, every value kept.

use phalanx_ir::{OpDef, Port, Program, ValueId};

use crate::error::ReferenceError;
use crate::ops;
use crate::tensor::RefTensor;

/// Runs a program on named inputs and returns its outputs by name, in order.
pub fn run(
    program: &Program,
    inputs: &[(&str, RefTensor)],
) -> Result<Vec<(String, RefTensor)>, ReferenceError> {
    let values = run_values(program, inputs)?;
    let output = |port: &Port| (port.name.clone(), values[port.value.index()].clone());
    Ok(program.outputs().iter().map(output).collect())
}

/// Runs a program on named inputs and returns every value, by [`ValueId::index`].
pub fn run_values(
    program: &Program,
    inputs: &[(&str, RefTensor)],
) -> Result<Vec<RefTensor>, ReferenceError> {
    let mut values: Vec<Option<RefTensor>> = vec![None; program.values().len()];
    bind(program, inputs, &mut values)?;
    for instr in program.instrs() {
        let operands = (instr.inputs.iter())
            .map(|&v| defined(program, v, values[v.index()].as_ref()))
            .collect::<Result<Vec<&RefTensor>, _>>()?;
        let results = ops::apply(&instr.op, &operands)?;
        for (&value, result) in instr.outputs.iter().zip(results) {
            let declared = program.ty(value);
            if declared.dtype != result.dtype() || declared.shape != result.shape() {
                return Err(ReferenceError::WrongResult {
                    program: program.name.clone(),
                    value: value.0,
                    op: instr.op.name(),
                    declared: Box::new(declared.clone()),
                    dtype: result.dtype(),
                    shape: result.shape().to_vec(),
                });
            }
            values[value.index()] = Some(result);
        }
    }
    (values.into_iter().enumerate())
        .map(|(i, value)| defined(program, ValueId(i as u32), value))
        .collect()
}

/// Puts the given tensors where the program's inputs are.
fn bind(
    program: &Program,
    inputs: &[(&str, RefTensor)],
    values: &mut [Option<RefTensor>],
) -> Result<(), ReferenceError> {
    for (name, tensor) in inputs {
        let port = program.input_named(name).ok_or_else(|| {
            let known = program.inputs().iter().map(|p| p.name.clone()).collect();
            ReferenceError::UnknownInput {
                program: program.name.clone(),
                name: (*name).to_owned(),
                known,
            }
        })?;
        let ty = program.ty(port.value);
        if ty.dtype != tensor.dtype() || ty.shape != tensor.shape() {
            return Err(ReferenceError::WrongInput {
                program: program.name.clone(),
                name: port.name.clone(),
                ty: Box::new(ty.clone()),
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            });
        }
        values[port.value.index()] = Some(tensor.clone());
    }
    let missing = |port: &&Port| values[port.value.index()].is_none();
    match program.inputs().iter().find(missing) {
        None => Ok(()),
        Some(port) => Err(ReferenceError::MissingInput {
            program: program.name.clone(),
            name: port.name.clone(),
            ty: Box::new(program.ty(port.value).clone()),
        }),
    }
}

fn defined<T>(program: &Program, value: ValueId, tensor: Option<T>) -> Result<T, ReferenceError> {
    tensor
        .ok_or_else(|| ReferenceError::Undefined { program: program.name.clone(), value: value.0 })
}
