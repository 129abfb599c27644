//! What a partitioned program takes: seconds, by the same closed forms that choices are made with.

use phalanx_ir::ops::CollectiveKind;
use phalanx_ir::rule::FactorKind;
use phalanx_ir::{Op, Program, Role, TensorType};

use crate::cost::Costs;

/// Estimated seconds of a partitioned program on each rank: work, memory traffic, collectives, and
/// the reductions of gradients that it leaves to the script.
pub fn seconds(program: &Program, costs: &Costs) -> f64 {
    let mesh = program.mesh();
    let local = |ty: &TensorType| ty.local_bytes(mesh) as f64;
    let mut total = 0.0;
    for instr in program.instrs() {
        let ins: Vec<&TensorType> = instr.inputs.iter().map(|&v| program.ty(v)).collect();
        let outs: Vec<&TensorType> = instr.outputs.iter().map(|&v| program.ty(v)).collect();
        if let Op::Collective(c) = &instr.op {
            total += costs.collective(&c.kind, mesh.count(&c.axes), local(ins[0]));
            continue;
        }
        let rule = program.rule(instr);
        let assigned = rule.check(mesh, &ins, &outs).unwrap_or_default();
        for (factor, sharding) in rule.factors.iter().zip(&assigned) {
            if factor.kind == FactorKind::Lowered && !sharding.axes.is_empty() {
                let n = mesh.count(&sharding.axes);
                total += 2.0 * costs.collective(&CollectiveKind::AllReduce, n, 0.0);
            }
        }
        let shares: usize = assigned.iter().map(|s| mesh.count(&s.axes)).product();
        let moved: f64 = ins.iter().chain(&outs).map(|ty| local(ty)).sum();
        total += program.instr_flops(instr) as f64 / shares as f64 / costs.flops_per_s;
        total += moved / costs.memory_bytes_per_s;
    }
    for port in program.outputs_with(Role::Gradient) {
        let ty = program.ty(port.value);
        let axes: Vec<_> = ty.layout.partial().iter().copied().collect();
        if !axes.is_empty() {
            total += costs.collective(&CollectiveKind::AllReduce, mesh.count(&axes), local(ty));
        }
    }
    total
}
