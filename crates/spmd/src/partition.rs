//! The order in which things are decided.

use phalanx_autodiff::Joint;
use phalanx_ir::{Mesh, Rule};

use crate::annotate::Annotations;
use crate::cost::Costs;
use crate::emit::emit;
use crate::error::SpmdError;
use crate::lay::Grid;
use crate::net::Net;
use crate::padding::padding;
use crate::pins::Pins;
use crate::plan::Plan;
use crate::reshard::Resharder;

/// Gives every value of a joint graph its layout on a mesh, and inserts the collectives.
///
/// The result verifies, and [`phalanx_autodiff::slice`] cuts it as it cuts the original.
pub fn partition(
    joint: &Joint,
    mesh: &Mesh,
    annotations: &Annotations,
    costs: &Costs,
) -> Result<Joint, SpmdError> {
    decide(joint, mesh, annotations, costs, |plan, axis| {
        if !plan.propagate(axis)? {
            plan.choose(axis)?;
        }
        plan.close_params(axis);
        plan.propagate_backward(axis)
    })
}

/// The same with every choice made by `pick`, which gets the number of legal ones: of each
/// instruction and axis, whatever its neighbours do. For tests: most such programs are foolish, and
/// all must be right.
pub fn partition_by(
    joint: &Joint,
    mesh: &Mesh,
    annotations: &Annotations,
    mut pick: impl FnMut(usize) -> usize,
) -> Result<Joint, SpmdError> {
    decide(joint, mesh, annotations, &Costs::default(), |plan, axis| {
        for node in 0..plan.net.nodes.len() {
            let options = plan.strats[node].options(&plan.net.nodes[node], plan.grid, axis);
            plan.put(node, axis, options[pick(options.len()).min(options.len() - 1)]);
        }
        plan.close_params(axis);
        Ok(())
    })
}

fn decide(
    joint: &Joint,
    mesh: &Mesh,
    annotations: &Annotations,
    costs: &Costs,
    mut axis_by_axis: impl FnMut(&mut Plan<'_>, usize) -> Result<(), SpmdError>,
) -> Result<Joint, SpmdError> {
    let grid = Grid::new(mesh)?;
    let pins = Pins::new(joint, annotations, &grid);
    let program = &joint.program;
    let rules: Vec<Rule> = program.instrs().iter().map(|i| program.rule(i)).collect();
    let padded = padding(program, &rules, &pins, &grid)?;
    let net = Net::new(joint, rules, padded);
    let mut plan = Plan::new(joint, &net, &grid, costs, pins);
    for axis in 0..grid.len() {
        axis_by_axis(&mut plan, axis)?;
    }
    let mut resharder = Resharder::new(&grid, costs);
    plan.order(&mut resharder);
    emit(joint, mesh, &plan, &mut resharder)
}
