//! Automatic: finds layouts from only a mesh and a memory limit.
//!
//! Values between segments need one layout, so a few layouts are tried on each axis: replicated, by
//! batch, by sequence. For each, every segment is partitioned with its weights open, at rising
//! prices of memory until the model fits; the one with the least estimated time wins. Weights then
//! have the layouts that the segments chose. On one axis these are the classical ones: Megatron's
//! columns and rows where weights must be sharded and activations are small, data parallelism where
//! there is enough memory, FSDP's gathered weights in between.

use std::collections::BTreeMap;

use phalanx_autodiff::{Joint, joint};
use phalanx_cost::{Hardware, reductions};
use phalanx_ir::{Axis, DType, Mesh, Model, Port, Program, Role, ValueId};

use super::Strategy;
use crate::annotate::{Annotations, Annotator};
use crate::cost::Costs;
use crate::error::SpmdError;
use crate::mask::{Grid, State};
use crate::partition::Problem;
use crate::plan::{Known, Plan};

/// The layouts that a search chose for a model.
#[derive(Clone, Debug)]
pub struct Automatic {
    /// For each segment: for each parameter and boundary value, what every axis does to it.
    segments: BTreeMap<String, Vec<Chosen>>,
    /// Estimated seconds of a step's programs on each rank.
    pub seconds: f64,
    /// Bytes per rank of parameters and of what is kept for the backward.
    pub memory: f64,
}

/// What an axis does to a parameter or a port.
#[derive(Clone, Debug)]
struct Chosen {
    port: End,
    axis: Axis,
    read: Option<usize>,
    stored: Option<usize>,
}

/// A port of a segment. The evaluation program has the same ports as the training program, but
/// other value numbers.
#[derive(Clone, PartialEq, Eq, Debug)]
struct End {
    name: String,
    output: bool,
}

impl End {
    fn input(name: &str) -> Self {
        Self { name: name.to_owned(), output: false }
    }

    fn value(&self, program: &Program) -> Option<ValueId> {
        let port = match self.output {
            true => program.output_named(&self.name),
            false => program.input_named(&self.name),
        };
        port.map(|port| port.value)
    }
}

/// What an axis does to values between segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ends {
    Whole,
    Batch,
    /// Shards the residual stream by sequence; token ids are replicated.
    Stream,
    /// Shards token ids by sequence too.
    Sequence,
}

impl Automatic {
    /// Searches the layouts of a model; `costs.memory_limit` holds for all its instances together.
    pub fn search(model: &Model, mesh: &Mesh, costs: &Costs) -> Result<Self, SpmdError> {
        let joints = (model.segments().iter())
            .map(|forward| joint(forward, gradients(forward)))
            .collect::<Result<Vec<Joint>, _>>()?;
        let search = Search { model, mesh, costs, joints, grid: Grid::new(mesh)? };
        let mut best: Option<Automatic> = None;
        let mut refused = None;
        for ends in search.ends() {
            match search.try_ends(&ends) {
                Ok(found) if best.as_ref().is_none_or(|b| found.seconds < b.seconds) => {
                    best = Some(found);
                }
                Ok(_) => {}
                Err(error) => refused = Some(error),
            }
        }
        match (best, refused) {
            (Some(best), _) => Ok(best),
            (None, Some(error)) => Err(error),
            (None, None) => Err(SpmdError::Strategy {
                segment: model.name.clone(),
                what: "the model has no segments to partition".to_owned(),
            }),
        }
    }
}

/// Estimated seconds of a partitioned program, with the sums of gradients that it leaves to the script.
fn seconds(program: &Program, hardware: &Hardware) -> f64 {
    let reduced: f64 = reductions(program).map(|t| hardware.transfer_seconds(t)).sum();
    phalanx_cost::seconds(program, hardware) + reduced
}

/// The element type that gradients have while layouts are searched: that of the parameters.
fn gradients(forward: &Program) -> DType {
    match forward.inputs_with(Role::Param).next() {
        Some(param) => forward.ty(param.value).dtype,
        // There are no gradients.
        None => DType::F32,
    }
}

struct Search<'a> {
    model: &'a Model,
    mesh: &'a Mesh,
    costs: &'a Costs,
    joints: Vec<Joint>,
    grid: Grid,
}

impl Search<'_> {
    /// Every combination of ends, one for each axis.
    fn ends(&self) -> Vec<Vec<Ends>> {
        let each = [Ends::Whole, Ends::Batch, Ends::Stream, Ends::Sequence];
        (0..self.grid.len()).fold(vec![Vec::new()], |all, _| {
            let longer = |ends: &Vec<Ends>| each.map(|e| [ends.as_slice(), &[e]].concat());
            all.iter().flat_map(longer).collect()
        })
    }

    fn try_ends(&self, ends: &[Ends]) -> Result<Automatic, SpmdError> {
        let limit = self.costs.memory_limit.map_or(f64::INFINITY, |l| l as f64);
        // The price starts above zero: weights that cost nothing would take any layout.
        let link = self.costs.hardware.link_bytes_per_s;
        let (mut price, mut least) = (1e-9 / link, f64::INFINITY);
        while price < 1e-6 {
            let found = self.try_price(ends, price)?;
            if found.memory <= limit {
                return Ok(found);
            }
            least = least.min(found.memory);
            price = (price * 4.0).max(1e-3 / link);
        }
        let (segment, needed) = (self.model.name.clone(), least.ceil() as usize);
        Err(SpmdError::Memory { segment, needed, limit: limit as usize })
    }

    fn try_price(&self, ends: &[Ends], price: f64) -> Result<Automatic, SpmdError> {
        let mut found = Automatic { segments: BTreeMap::new(), seconds: 0.0, memory: 0.0 };
        let mut tied: BTreeMap<usize, Vec<Chosen>> = BTreeMap::new();
        let costs = Costs { memory_limit: None, ..*self.costs };
        for (segment, program) in self.model.segments().iter().enumerate() {
            let users = self.model.instances().iter().filter(|i| i.segment == segment);
            let count = users.clone().count() as f64;
            let params = users.clone().next().map(|i| &i.params);
            let bound =
                || params.into_iter().flatten().map(|(name, &param)| (End::input(name), param));
            let mut known = Vec::new();
            for (port, param) in bound() {
                let here = |c: &Chosen| Chosen { port: port.clone(), ..c.clone() };
                known.extend(tied.get(&param).into_iter().flatten().map(here));
            }
            let annotations = self.annotations(program, ends, &known)?;
            let problem = Problem::new(&self.joints[segment], self.mesh, &annotations, &costs)?;
            let chosen = self.chosen(program, &problem.plan(price)?);
            // The cost is that of what will run: only the layouts of parameters and boundary values
            // are fixed.
            let annotations = self.annotations(program, ends, &chosen)?;
            let problem = Problem::new(&self.joints[segment], self.mesh, &annotations, &costs)?;
            let plan = problem.plan(0.0)?;
            for (port, param) in bound() {
                let of = chosen.iter().filter(|c| c.port == port).cloned();
                tied.entry(param).or_insert_with(|| of.collect());
            }
            found.memory += count * plan.memory();
            found.seconds += count * seconds(&problem.emit(plan)?.program, &costs.hardware);
            let lay = |axis: usize| self.laid(program, axis, ends[axis]);
            let chosen = chosen.into_iter().chain((0..self.grid.len()).flat_map(lay)).collect();
            found.segments.insert(signature(program), chosen);
        }
        Ok(found)
    }

    fn annotations(
        &self,
        program: &Program,
        ends: &[Ends],
        known: &[Chosen],
    ) -> Result<Annotations, SpmdError> {
        let mut ctx = Annotator::new(program, self.mesh)?;
        ctx.by("automatic");
        for (axis, &ends) in ends.iter().enumerate() {
            lay_ends(&mut ctx, self.grid.name(axis), ends)?;
        }
        known.iter().try_for_each(|c| replay(&mut ctx, c))?;
        Ok(ctx.finish())
    }

    /// What an axis does to the ends of a segment.
    fn laid(&self, program: &Program, axis: usize, ends: Ends) -> Vec<Chosen> {
        let lay = |(port, output): (&Port, bool)| {
            let read = end_dim(port.role, ends);
            let port = End { name: port.name.clone(), output };
            Chosen { port, axis: self.grid.name(axis), read, stored: read }
        };
        ports(program).map(lay).collect()
    }

    /// The layouts that a plan gave to the parameters of a segment.
    fn chosen(&self, program: &Program, plan: &Plan<'_>) -> Vec<Chosen> {
        let dim = |state: State| match state {
            State::Sharded(dim) => Some(dim),
            _ => None,
        };
        // The inputs of a joint graph start with those of the forward.
        let mut all = Vec::new();
        for axis in 0..self.grid.len() {
            for port in program.inputs_with(Role::Param) {
                let value = port.value.index();
                let Known::Is(read) = plan.state(value, axis) else {
                    panic!("`{}` of {} is left open", port.name, program.name)
                };
                let (read, stored) = (dim(read), dim(plan.stored_state(value, axis)));
                let (port, axis) = (End::input(&port.name), self.grid.name(axis));
                all.push(Chosen { port, axis, read, stored });
            }
        }
        all
    }
}

/// Data and boundaries, and whether each is an output.
fn ports(program: &Program) -> impl Iterator<Item = (&Port, bool)> {
    let inputs = program.inputs().iter().filter(|p| matches!(p.role, Role::Data | Role::Boundary));
    let outputs = program.outputs_with(Role::Boundary);
    inputs.map(|port| (port, false)).chain(outputs.map(|port| (port, true)))
}

/// What tells a segment from others, in training and in evaluation: names and types of its parameters,
/// data and boundaries.
fn signature(program: &Program) -> String {
    let known = |p: &&Port| matches!(p.role, Role::Param | Role::Data | Role::Boundary);
    let ports = program.inputs().iter().chain(program.outputs()).filter(known);
    let ports = ports.map(|p| format!(" {} {}", p.name, program.ty(p.value)));
    [program.name.clone()].into_iter().chain(ports).collect()
}

/// The dim that an axis shards at an end.
fn end_dim(role: Role, ends: Ends) -> Option<usize> {
    match (role, ends) {
        (_, Ends::Whole) | (Role::Data, Ends::Stream) => None,
        (_, Ends::Batch) => Some(0),
        (_, Ends::Stream | Ends::Sequence) => Some(1),
    }
}

fn lay_ends(ctx: &mut Annotator<'_>, axis: Axis, ends: Ends) -> Result<(), SpmdError> {
    for (port, _) in ports(ctx.program()) {
        let Some(dim) = end_dim(port.role, ends) else { continue };
        let ty = ctx.program().ty(port.value);
        let Some(size) = ty.shape.get(dim) else {
            return Err(ctx.refuse(format!("`{}` is {ty} and has no dim {dim}", port.name)));
        };
        let shards = ctx.shards(port.value, dim) * ctx.degree(axis.name());
        if !ctx.is_decided(port.value, axis.name())? && !size.is_multiple_of(shards) {
            return Err(ctx.refuse(format!("{size} elements do not divide into {shards} shards")));
        }
        ctx.shard(port.value, dim, axis.name())?;
    }
    Ok(())
}

fn replay(ctx: &mut Annotator<'_>, chosen: &Chosen) -> Result<(), SpmdError> {
    let axis = chosen.axis.name();
    let Some(value) = chosen.port.value(ctx.program()) else {
        return Err(ctx.refuse(format!("the search found no port `{}`", chosen.port.name)));
    };
    match (chosen.read, chosen.stored) {
        (Some(dim), _) => ctx.shard(value, dim, axis),
        (None, Some(dim)) => ctx.store(value, dim, axis),
        (None, None) => ctx.replicate(value, axis),
    }
}

impl Strategy for Automatic {
    fn name(&self) -> &'static str {
        "automatic"
    }

    fn annotate(&self, ctx: &mut Annotator<'_>) -> Result<(), SpmdError> {
        let Some(chosen) = self.segments.get(&signature(ctx.program())) else {
            return Err(ctx.refuse("the search did not see this segment".to_owned()));
        };
        chosen.iter().try_for_each(|c| replay(ctx, c))
    }
}
