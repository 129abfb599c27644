//! The recipe of a case, as data: sizes, steps, a mesh and requested annotations.
//!
//! Every step has its own dice, and a request names its value by the step that computes it. So each
//! can be removed without changing the others, which is how failures are made smaller.

use phalanx_ir::text::value_name;
use phalanx_ir::{Builder, DType, Mesh, Order, Program, Role, ValueId};
use phalanx_spmd::{Annotator, SpmdError};

use super::dice::Dice;
use super::steps::Maker;
use super::{Case, IDS};

/// The recipe of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The seed of everything that is drawn.
    pub seed: u64,
    /// Which dice make random choices; other values than 0 are tried when a case is made smaller.
    pub choices: u64,
    pub(super) mesh: Mesh,
    /// Batch, sequence and width of the first value.
    pub(super) sizes: [usize; 3],
    /// Whether it is embedded, in a vocabulary of this size.
    pub(super) vocabulary: Option<usize>,
    pub(super) steps: Vec<u64>,
    /// Whether it ends in a loss, where the last value can be logits.
    pub(super) loss: bool,
    pub(super) wishes: Vec<Request>,
    /// Axes that deal elements in other orders than by blocks.
    pub(super) orders: Vec<(String, Order)>,
}

/// A requested annotation of one value and one axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    /// The value: an index among those that a step computes, parameters included.
    pub(super) step: u64,
    pub(super) nth: usize,
    pub(super) axis: String,
    pub(super) what: Asked,
}

/// What an axis should do to the value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Asked {
    Sharded(usize),
    Stored(usize),
    Replicated,
}

/// The step that makes the first value, and the one that makes the loss.
const START: u64 = 0;
const END: u64 = u64::MAX;

impl Recipe {
    /// The recipe of a seed; some seeds ask for something impossible, and are refused.
    pub fn new(seed: u64) -> Result<Self, SpmdError> {
        let mut dice = Dice::new(seed);
        let batch = dice.pick(&[2, 4, 4, 6, 3]);
        let sizes = [batch, dice.pick(&[2, 4, 4, 8, 5]), dice.pick(&[4, 8, 8, 6])];
        let vocabulary = dice.percent(40).then(|| dice.pick(&[5, 7, 8, 6]));
        let steps = (1..=2 + dice.below(6) as u64).collect();
        let (loss, mesh) = (dice.percent(35), mesh(&mut dice));
        let (choices, wishes) = (0, Vec::new());
        let orders = orders(&mut Dice::named(seed, "orders"), &mesh);
        let mut recipe =
            Self { seed, choices, mesh, sizes, vocabulary, steps, loss, wishes, orders };
        let (program, origins) = recipe.program()?;
        recipe.wishes = wishes_for(&mut dice, &program, &origins, &recipe.mesh)?;
        Ok(recipe)
    }

    /// The case. A request for a value or an axis that does not exist is ignored.
    pub fn case(&self) -> Result<Case, SpmdError> {
        let (forward, origins) = self.program()?;
        let mut annotator = Annotator::new(&forward, &self.mesh)?;
        let mut asked = Vec::new();
        for wish in &self.wishes {
            let place = (wish.step, wish.nth);
            let Some(value) = origins.iter().position(|&o| o == place) else { continue };
            let value = ValueId(value as u32);
            let dims = forward.ty(value).shape.len();
            let (axis, name) = (wish.axis.as_str(), value_name(&forward, value));
            if self.mesh.expand(axis).is_err() {
                continue;
            }
            match wish.what {
                Asked::Sharded(dim) | Asked::Stored(dim) if dim >= dims => continue,
                Asked::Sharded(dim) => {
                    annotator.shard(value, dim, axis)?;
                    asked.push(format!("{name}: {axis} shards dim {dim}"));
                }
                Asked::Stored(dim) => {
                    annotator.store(value, dim, axis)?;
                    asked.push(format!("{name}: {axis} shards dim {dim} where it is stored"));
                }
                Asked::Replicated => {
                    annotator.replicate(value, axis)?;
                    asked.push(format!("{name}: {axis} replicates it"));
                }
            }
        }
        for (axis, order) in &self.orders {
            // A smaller mesh may not have it.
            if self.mesh.expand(axis).is_ok() {
                annotator.order(axis, *order)?;
                asked.push(format!("{axis} deals in {} order", order.name()));
            }
        }
        let annotations = annotator.finish();
        Ok(Case { forward, mesh: self.mesh.clone(), annotations, asked })
    }

    /// The forward program, and for each value the step that computes it and its index there.
    fn program(&self) -> Result<(Program, Vec<(u64, usize)>), SpmdError> {
        let b = Builder::new("case", DType::F64);
        let [batch, seq, width] = self.sizes;
        let first = match self.vocabulary {
            Some(size) => {
                let ids = b.data("ids", DType::I32, [batch, seq]);
                b.param("embed", [size, width]).embedding(ids)
            }
            None => b.boundary("x", [batch, seq, width]),
        };
        let mut pool = vec![first];
        // The last value of every step that made one.
        let mut ends = vec![(START, first.id())];
        for &step in &self.steps {
            let dice = Dice::named(self.seed, &format!("step {step}"));
            let made = Maker { b: &b, dice, step, params: 0 }.step(&pool);
            ends.extend(made.map(|value| (step, value.id())));
            pool.extend(made);
        }
        let last = pool[pool.len() - 1];
        if self.loss && last.shape().len() == 3 && last.shape()[2] >= IDS {
            let shape = last.shape();
            let targets = b.data("targets", DType::I32, [shape[0], shape[1]]);
            b.loss("loss", last.cross_entropy(targets).sum_all() * b.scalar("inv"));
        } else {
            b.output("y", last);
        }
        let program = b.finish()?;
        let origins = origins(&program, &ends);
        Ok((program, origins))
    }
}

/// For each value: the step that computes it and its index there. Results of one instruction stay
/// together.
fn origins(program: &Program, ends: &[(u64, ValueId)]) -> Vec<(u64, usize)> {
    let step = |value: ValueId| ends.iter().find(|(_, end)| value <= *end).map_or(END, |e| e.0);
    let mut found = vec![(END, 0); program.values().len()];
    for port in program.inputs() {
        found[port.value.index()].0 = step(port.value);
    }
    for instr in program.instrs() {
        for value in &instr.outputs {
            found[value.index()].0 = step(instr.outputs[0]);
        }
    }
    for at in 0..found.len() {
        found[at].1 = found[..at].iter().filter(|other| other.0 == found[at].0).count();
    }
    found
}

fn mesh(dice: &mut Dice) -> Mesh {
    const SIZES: [&[usize]; 10] =
        [&[2], &[4], &[3], &[8], &[2, 2], &[2, 3], &[4, 2], &[2, 2, 2], &[2, 4], &[3, 2]];
    let mesh =
        Mesh::new(["a", "b", "c"].into_iter().zip(dice.pick(&SIZES).iter().copied())).unwrap();
    let split = dice.percent(40).then(|| mesh.axes().find(|&(_, n)| n >= 4)).flatten();
    match split {
        Some((axis, n)) => mesh.split(axis.name(), &[2, n / 2]).unwrap(),
        None => mesh,
    }
}

/// Some axes distribute elements in other orders; of a sequence only one does, in front of all others.
fn orders(dice: &mut Dice, mesh: &Mesh) -> Vec<(String, Order)> {
    let axes: Vec<String> = mesh.axes().map(|(axis, _)| axis.name().to_owned()).collect();
    let axis = dice.below(axes.len());
    let order = dice.pick(&[Order::Zigzag, Order::Zigzag, Order::Striped]);
    if dice.percent(20) { vec![(axes[axis].clone(), order)] } else { Vec::new() }
}

fn wishes_for(
    dice: &mut Dice,
    program: &Program,
    origins: &[(u64, usize)],
    mesh: &Mesh,
) -> Result<Vec<Request>, SpmdError> {
    let mut annotator = Annotator::new(program, mesh)?;
    let inputs = program.inputs().iter().map(|p| (p.value, p.role));
    let results = program.instrs().iter().flat_map(|i| &i.outputs).map(|&v| (v, Role::Probe));
    let mut wishes = Vec::new();
    // In some cases an axis is for the sequence, as in context parallelism: then keys can go around.
    let axes: Vec<phalanx_ir::Axis> = mesh.axes().map(|(axis, _)| axis).collect();
    let sequence = dice.pick(&axes);
    let sequence = dice.percent(20).then_some(sequence);
    for (value, role) in inputs.chain(results) {
        let chance = match role {
            Role::Scalar | Role::Random => 0,
            Role::Probe => 15,
            _ => 75,
        };
        let long = program.ty(value).shape.len() > 2;
        let in_sequence = sequence.filter(|_| long && chance > 0);
        if !dice.percent(chance) && in_sequence.is_none() {
            continue;
        }
        let uneven = dice.percent(15);
        for (axis, _) in mesh.axes() {
            let (shape, of_sequence) = (&program.ty(value).shape, in_sequence == Some(axis));
            let axis = axis.name();
            let what = if of_sequence {
                let shards = annotator.shards(value, 1) * annotator.degree(axis);
                shape[1].is_multiple_of(shards).then_some(Asked::Sharded(1))
            } else if shape.is_empty() || !dice.percent(70) {
                dice.percent(50).then_some(Asked::Replicated)
            } else {
                let dim = dice.below(shape.len());
                let shards: usize = annotator.shards(value, dim) * annotator.degree(axis);
                let fits = shape[dim].is_multiple_of(shards) || (uneven && shape[dim] > 1);
                fits.then(|| match role == Role::Param && dice.percent(20) {
                    true => Asked::Stored(dim),
                    false => Asked::Sharded(dim),
                })
            };
            let Some(what) = what else { continue };
            match what {
                Asked::Sharded(dim) => annotator.shard(value, dim, axis)?,
                Asked::Stored(dim) => annotator.store(value, dim, axis)?,
                Asked::Replicated => annotator.replicate(value, axis)?,
            }
            let (step, nth) = origins[value.index()];
            wishes.push(Request { step, nth, axis: axis.to_owned(), what });
        }
    }
    Ok(wishes)
}
