//! Every op, each as an instruction of a program of its own: those of the forward builder, their
//! gradients, and the few that passes and scripts form.

use std::collections::BTreeSet;

use phalanx_ir::vjp::Vjp;
use phalanx_ir::{Instr, Op, OpDef, Phase, Program, Role, TensorType, ValueId, text, verify};

/// What only passes and scripts form.
const FORMED: &str = "mesh a=2
program formed {
  x: data f32[8,4]
  row: data f32[4]
  w: param f32[4,16]
  targets: data i32[8]
  s: scalar f32[]
  u: state f32[*8]
  p: data f32[8,4]{P:a}
  d: data f32[8,4]{0:a}
  q: state f32[*8]{*:a}
  r: gradient f32[*8]{P:a}
  v: state f32[2]
  k: data f32[1,8,2,2]{1:a}
  o: data f32[1,8,2,2]{1:a}
  lse: data f32[1,2,8]{2:a}
  %1 = fused(x, row, body=mul(i0|i1)/f32;exp(s0)/f32, results=1, full=0) : f32[8,4]
  %2, %3, %4 = linear_cross_entropy(x, w, targets, s, transposed=false, chunk=4, out=f32) : f32[8], f32[8,4], f32[4,16]
  %5, %6, %7 = adamw(u, u, u, u, s, s, s, beta1=0.9, beta2=0.95, eps=0.1, decay=0, decays=1, block=1, narrow=none) : f32[*8], f32[*8], f32[*8]
  %8, %9 = sgd(u, u, u, s, s, s, momentum=0.9, nesterov=true, decay=0, decays=1, block=1, narrow=none) : f32[*8], f32[*8]
  %10 = sum_squares(u) : f32[]
  %11 = pad(x, dim=1, before=1, after=2) : f32[8,7]
  %12 = all_gather<a>(d, dim=0) : f32[8,4]
  %13 = reduce_scatter<a>(p, dim=1) : f32[8,4]{1:a}
  %14 = all_reduce<a>(p) : f32[8,4]
  %15 = all_to_all<a>(d, from=0, to=1) : f32[8,4]{1:a}
  %16 = shard<a>(x, dim=0) : f32[8,4]{0:a}
  %17 = to_partial<a>(x) : f32[8,4]{P:a}
  %18 = permute<a>(d, dim=0) : f32[8,4]{0:a}
  %19 = zero_padding(d) : f32[8,4]{0:a}
  %20 = all_gather<a>(q, dim=0, pieces=3) : f32[*8]
  %21 = all_reduce<a>(r, pieces=2) : f32[*8]
  %22, %23 = packed_matmul(x, w, w, spec=rd,de->re, out=f32) : f32[8,16], f32[8,16]
  %24 = member_squares(q, begins=0x2, ends=1x4, block=4) : f32[2]{P:a}
  %25 = member_scale(r, v, begins=0x2, ends=1x4, block=4) : f32[*8]{P:a}
  %26, %27 = lion(u, u, u, s, s, s, s, beta1=0.9, beta2=0.99, decay=0, decays=1, block=1, narrow=none) : f32[*8], f32[*8]
  %28, %29, %30 = lamb_direction(u, u, u, u, s, s, s, beta1=0.9, beta2=0.95, eps=0.1, decay=0, decays=1, block=1) : f32[*8], f32[*8], f32[*8]
  %31, %32, %33 = adam(u, u, u, u, s, s, s, s, beta1=0.9, beta2=0.95, eps=0.1, decay=0, decays=1, block=1, narrow=none) : f32[*8], f32[*8], f32[*8]
  %34 = turn<a>(k, dim=1) : f32[1,8,2,2]{1:a+1}
  %35, %36 = attend(k, %34, %34, o, lse, causal=true, dropout=0, site=1, goes_on=true) : f32[1,8,2,2]{1:a}, f32[1,2,8]{2:a}
  %37, %38, %39 = attend_grad(k, %34, %34, o, lse, o, causal=true, dropout=0, site=1, goes_on=false) : f32[1,8,2,2]{1:a}, f32[1,8,2,2]{1:a+1}, f32[1,8,2,2]{1:a+1}
  %40 = shard<a>(x, dim=0, order=zigzag) : f32[8,4]{0:a@zigzag}
  %41 = key_product(k, %34, form=scores, key_heads=2, causal=true, goes_on=false) : f32[1,2,8,8]{2:a}
  %42 = key_product(%41, %34, o, form=weighted, key_heads=2, causal=false, goes_on=true) : f32[1,8,2,2]{1:a}
  %43 = key_product(%41, k, form=sums, key_heads=2, causal=false, goes_on=false) : f32[1,8,2,2]{1:a+1}
  %44, %45 = factor_means(q, begins=0, dims=2, tiles=2x2, sizes=2x4, moves=0x2, grid=2, block=4) : f32[2]{P:a}, f32[4]{P:a}
  %46 = factor_direction(q, v, row, s, s, begins=0, dims=2, tiles=2x2, sizes=2x4, moves=0x2, grid=2, block=4) : f32[*8]{*:a}
}
";

/// One program for each instruction of these programs and of their gradients.
pub(crate) fn every_op() -> Vec<Program> {
    let formed = text::parse(FORMED).unwrap();
    verify(&formed).unwrap();
    let mut out = Vec::new();
    for program in [crate::text::everything(), formed] {
        for instr in program.instrs() {
            out.push(alone(&program, instr));
        }
        for (joint, instr, _) in gradients(&program) {
            let formed = joint.instrs().iter().skip_while(|i| **i != instr).skip(1);
            out.extend(formed.map(|i| alone(&joint, i)));
        }
    }
    let found: BTreeSet<&str> = out.iter().map(|p| p.instrs()[0].op.variant()).collect();
    assert_eq!(found, Op::VARIANTS.iter().copied().collect(), "every op is there");
    out
}

/// For each instruction that has a gradient: a program of it and its gradient, the instruction in
/// that program, and the gradients of its operands. The cotangent is the input `dy`.
pub(crate) fn gradients(program: &Program) -> Vec<(Program, Instr, Vec<Option<ValueId>>)> {
    let mut out = Vec::new();
    for instr in program.instrs() {
        let mut joint = alone(program, instr);
        let instr = joint.instrs()[0].clone();
        let dy = joint.ty(instr.outputs[0]).clone();
        let mut cotangents = vec![None; instr.outputs.len()];
        cotangents[0] = Some(joint.input("dy", Role::Cotangent, dy));
        let wanted = (instr.inputs.iter())
            .map(|&v| Some(joint.ty(v).dtype).filter(|d| d.is_float()))
            .collect();
        let mut vjp = Vjp::new(&mut joint, instr.clone(), cotangents, wanted);
        if instr.op.vjp(&mut vjp).is_ok() {
            let gradients = vjp.finish();
            out.push((joint, instr, gradients));
        }
    }
    out
}

/// A program of one instruction, whose operands are inputs.
fn alone(program: &Program, instr: &Instr) -> Program {
    let mut new = Program::new("alone", program.mesh().clone());
    let types = |ids: &[ValueId]| -> Vec<TensorType> {
        ids.iter().map(|&v| program.ty(v).clone()).collect()
    };
    let inputs: Vec<ValueId> = (types(&instr.inputs).into_iter().enumerate())
        .map(|(i, ty)| new.input(format!("in{i}"), Role::Data, ty))
        .collect();
    new.push_unchecked(instr.op.clone(), &inputs, types(&instr.outputs), Phase::F);
    new
}
