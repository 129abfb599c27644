//! The partitioner: the order in which layouts are decided.

use phalanx_autodiff::Joint;
use phalanx_ir::{Mesh, Program, Rule};

use crate::annotate::Annotations;
use crate::cost::Costs;
use crate::emit::emit;
use crate::error::SpmdError;
use crate::mask::Grid;
use crate::net::Net;
use crate::padding::padding;
use crate::pins::Pins;
use crate::plan::Plan;
use crate::reshard::Resharder;

/// Gives every value of a joint graph its layout on a mesh, and inserts the collectives.
///
/// The result verifies, and [`phalanx_autodiff::slice`] slices it like the original.
pub fn partition(
    joint: &Joint,
    mesh: &Mesh,
    annotations: &Annotations,
    costs: &Costs,
) -> Result<Joint, SpmdError> {
    let problem = Problem::new(joint, mesh, annotations, costs)?;
    let mut plan = problem.plan(0.0)?;
    if let Some(limit) = costs.memory_limit {
        plan = problem.within(plan, limit)?;
    }
    problem.emit(plan)
}

/// The same, with every choice made by `pick`, which gets the number of legal choices for each
/// instruction and axis, independent of its neighbours. For tests: most such programs are slow, but
/// all must be correct.
pub fn partition_by(
    joint: &Joint,
    mesh: &Mesh,
    annotations: &Annotations,
    mut pick: impl FnMut(usize) -> usize,
) -> Result<Joint, SpmdError> {
    let costs = Costs::default();
    let problem = Problem::new(joint, mesh, annotations, &costs)?;
    let mut plan = problem.fresh();
    for axis in plan.axes() {
        for node in 0..plan.net.nodes.len() {
            let options = plan.node_choices[node].options(&plan.net.nodes[node], plan.grid, axis);
            plan.put(node, axis, options[pick(options.len()).min(options.len() - 1)]);
        }
        plan.close_params(axis);
    }
    problem.emit(plan)
}

/// A joint graph with all constraints on it.
pub(crate) struct Problem<'a> {
    joint: &'a Joint,
    mesh: &'a Mesh,
    costs: &'a Costs,
    grid: Grid,
    net: Net,
    pins: Pins,
}

/// The highest price of memory that is tried before a segment is said not to fit: a microsecond per
/// byte.
const MAX_PRICE: f64 = 1e-6;

impl<'a> Problem<'a> {
    pub(crate) fn new(
        joint: &'a Joint,
        mesh: &'a Mesh,
        annotations: &Annotations,
        costs: &'a Costs,
    ) -> Result<Self, SpmdError> {
        let grid = Grid::new(mesh)?.ordered(&annotations.orders).travelling(&annotations.travel);
        let pins = Pins::new(joint, annotations, &grid);
        let program: &Program = &joint.program;
        let rules: Vec<Rule> = program.instrs().iter().map(|i| program.rule(i)).collect();
        let padded = padding(program, &rules, &pins, &grid)?;
        let net = Net::new(joint, rules, padded);
        Ok(Self { joint, mesh, costs, grid, net, pins })
    }

    fn fresh(&self) -> Plan<'_> {
        Plan::new(self.joint, &self.net, &self.grid, self.costs, self.pins.clone())
    }

    /// Decides everything; `price` is the seconds that a byte of memory is worth.
    pub(crate) fn plan(&self, price: f64) -> Result<Plan<'_>, SpmdError> {
        let mut plan = self.fresh();
        plan.price = price;
        for axis in plan.axes() {
            if !plan.propagate(axis)? {
                plan.choose(axis);
            }
            plan.close_params(axis);
            plan.propagate_backward(axis)?;
        }
        Ok(plan)
    }

    /// The first plan that fits, with rising prices of memory.
    fn within<'p>(&'p self, free: Plan<'p>, limit: usize) -> Result<Plan<'p>, SpmdError> {
        let fits = |plan: &Plan<'_>| plan.memory() <= limit as f64;
        if fits(&free) {
            return Ok(free);
        }
        let mut smallest = free.memory();
        let mut price = 1e-3 / self.costs.hardware.link_bytes_per_s;
        while price < MAX_PRICE {
            let plan = self.plan(price)?;
            if fits(&plan) {
                return Ok(plan);
            }
            smallest = smallest.min(plan.memory());
            price *= 4.0;
        }
        let segment = self.joint.program.name.clone();
        Err(SpmdError::Memory { segment, needed: smallest.ceil() as usize, limit })
    }

    pub(crate) fn emit(&self, mut plan: Plan<'_>) -> Result<Joint, SpmdError> {
        let mut resharder = Resharder::new(&self.grid, self.costs);
        plan.order(&mut resharder);
        emit(self.joint, self.mesh, &plan, &mut resharder)
    }
}
