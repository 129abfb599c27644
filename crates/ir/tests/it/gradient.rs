//! Gradients that would be silently wrong are refused, and odd operands are errors, not panics.

use phalanx_ir::ops::{Attention, AttentionKind, LayerNorm, Op, RmsNorm};
use phalanx_ir::vjp::Vjp;
use phalanx_ir::{DType, IrError, Mesh, OpDef, Phase, Program, Role, TensorType};

fn attention(kind: AttentionKind, dropout: f64) -> Op {
    let (causal, site) = (true, 1);
    Op::from(Attention { kind, causal, dropout, site })
}

/// The op's vjp when its second result has a cotangent too.
fn through_a_statistic(op: Op, shapes: &[&[usize]]) -> Result<(), IrError> {
    let mut program = Program::new("statistic", Mesh::single());
    let inputs: Vec<_> = (shapes.iter().enumerate())
        .map(|(i, shape)| {
            let ty = TensorType::new(DType::F64, *shape);
            program.input(format!("x{i}"), Role::Param, ty)
        })
        .collect();
    let outputs = program.push(op, &inputs, Phase::F)?;
    let instr = program.instrs()[0].clone();
    let cotangents = outputs.iter().map(|&v| Some(v)).collect();
    let wanted = vec![Some(DType::F64); inputs.len()];
    let op = instr.op.clone();
    op.vjp(&mut Vjp::new(&mut program, instr, cotangents, wanted))
}

#[test]
fn a_gradient_through_a_statistic_is_refused() {
    let heads: &[usize] = &[1, 2, 1, 2];
    for (op, shapes) in [
        (RmsNorm { eps: 1e-5 }.into(), &[&[2, 3][..], &[3]][..]),
        (LayerNorm { eps: 1e-5 }.into(), &[&[2, 3], &[3], &[3]]),
        (attention(AttentionKind::Flash, 0.0), &[heads; 3]),
        (attention(AttentionKind::Materialised, 0.0), &[heads; 3]),
    ] {
        let error = through_a_statistic(op, shapes).unwrap_err();
        assert!(
            matches!(&error, IrError::NoGradient { help, .. } if help.contains("statistic")),
            "{error}"
        );
    }
}

#[test]
fn attentions_that_mean_nothing_are_refused() {
    let q = TensorType::new(DType::F32, [1, 2, 2, 4]);
    let none = TensorType::new(DType::F32, [1, 2, 0, 4]);
    let plain = attention(AttentionKind::Flash, 0.0);
    assert!(plain.infer(&[&q, &q, &q]).is_ok());
    assert!(plain.infer(&[&q, &none, &none]).is_err());
    let key = TensorType::new(DType::I32, [5]);
    for dropout in [1.0, 1.5, f64::INFINITY] {
        let op = attention(AttentionKind::Flash, dropout);
        assert!(op.infer(&[&q, &q, &q, &key]).is_err(), "{dropout}");
    }
    for dropout in [-0.1, f64::NAN] {
        let op = attention(AttentionKind::Flash, dropout);
        assert!(op.infer(&[&q, &q, &q]).is_err(), "{dropout}");
    }
}
