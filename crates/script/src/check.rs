//! The checker: what a gradient buffer holds is typed, so no contribution is lost, doubled or
//! forgotten, and every read finds something written. Weights that have versions are typed by them.

mod across;
mod complete;

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::{Axis, DType, TensorType};

use crate::action::{
    Accumulator, Action, BufferId, Contribution, Kind, Run, Script, Source, Write,
};
use crate::commits::Commits;
use crate::error::ScriptError;
use crate::fit::{Needs, messages, sizes};
use crate::order::HappensBefore;
use crate::over::over;
use crate::rolling::Carried;
use crate::tiers::tiers;
use crate::versions::Versions;

/// Checks a whole script.
pub fn check(script: &Script) -> Result<(), ScriptError> {
    HappensBefore::of(script)?;
    contents(script)
}

/// Checks what buffers hold, in a script whose order was already checked.
pub(crate) fn contents(script: &Script) -> Result<(), ScriptError> {
    let found = |source| match source {
        Source::State | Source::Host => true,
        Source::Carried => script.begins_in_flight(),
        Source::Script | Source::Result => false,
    };
    let mut written: Vec<bool> = script.buffers.iter().map(|b| found(b.source)).collect();
    let needs: Vec<Needs> =
        script.programs.iter().map(|entry| Needs::of(entry.program())).collect();
    let mut gradients = Gradients::new(script);
    let mut versions = Versions::new(script);
    let (mut carried, mut commits) = (Carried::new(script), Commits::new(script));
    // Accumulators persist, but what they hold from the step before is not a contribution, unless that step has left
    // its update to this script. One without contributions is zero and stays zero.
    let begins = |own: &&Accumulator| !own.left && own.complete.iter().any(|all| !all.is_empty());
    for accumulator in script.accumulators.iter().filter(begins) {
        written[accumulator.buffer.0] = false;
    }
    for (index, action) in script.actions.iter().enumerate() {
        let mut used = action.reads().into_iter().chain(action.ends());
        let unwritten = used.find(|b| !written[b.0]);
        if let Some(run) = action.run() {
            sizes(script, index, action, run, &needs[run.program.0])?;
        }
        messages(script, index, action)?;
        tiers(script, index, action)?;
        gradients.apply(index, action)?;
        versions.apply(index, action)?;
        carried.apply(index, action)?;
        commits.apply(index, action)?;
        if let Some(run) = action.run() {
            over(script, index, action, run)?;
        }
        if let Some(buffer) = unwritten {
            return Err(ScriptError::Unwritten {
                action: index,
                what: action.label.clone(),
                buffer: script.name(buffer),
            });
        }
        action.writes().into_iter().for_each(|buffer| written[buffer.0] = true);
        if let Some(ended) = action.ends() {
            written[ended.0] = false;
        }
    }
    versions.end()?;
    carried.end()?;
    gradients.all_used()
}

/// The type of each gradient buffer: the contributions it holds, and over which axes it is
/// still a partial sum.
struct Gradients<'a> {
    script: &'a Script,
    /// For each buffer: its type, and what each update of it needs.
    complete: BTreeMap<BufferId, (DType, Vec<BTreeSet<Contribution>>)>,
    /// Axes along which other stage groups add to a buffer.
    shared: BTreeMap<BufferId, BTreeSet<Axis>>,
    /// What each update of a buffer needs besides, which other stage groups add.
    brought: BTreeMap<BufferId, Vec<BTreeSet<Contribution>>>,
    /// What was sent to those, and comes back with theirs.
    sent: BTreeSet<BufferId>,
    holds: BTreeMap<BufferId, BTreeSet<Contribution>>,
    partial: BTreeMap<BufferId, BTreeSet<Axis>>,
    reduced: BTreeSet<BufferId>,
    /// For each update so far: the buffer that it used.
    updated: Vec<BufferId>,
}

/// Makes the error of an action, from what would go wrong and the usual fix.
type Bad<'b> = &'b dyn Fn(String, &str) -> ScriptError;

impl<'a> Gradients<'a> {
    fn new(script: &'a Script) -> Self {
        let accumulators = script.accumulators.iter();
        // What the script before has left needs nothing more.
        let each = |own: &Accumulator,
                    lists: &[Vec<Contribution>]|
         -> Vec<BTreeSet<Contribution>> {
            let left = own.left.then(BTreeSet::new);
            left.into_iter().chain(lists.iter().map(|all| all.iter().copied().collect())).collect()
        };
        Self {
            script,
            shared: accumulators.clone().map(|a| (a.buffer, a.shared.clone())).collect(),
            complete: accumulators
                .clone()
                .map(|a| (a.buffer, (a.dtype, each(a, &a.complete))))
                .collect(),
            brought: accumulators.map(|a| (a.buffer, each(a, &a.brought))).collect(),
            sent: BTreeSet::new(),
            holds: BTreeMap::new(),
            partial: BTreeMap::new(),
            reduced: BTreeSet::new(),
            updated: Vec::new(),
        }
    }

    fn apply(&mut self, index: usize, action: &Action) -> Result<(), ScriptError> {
        let bad = |why: String, help: &str| ScriptError::Gradient {
            action: index,
            what: action.label.clone(),
            why,
            help: help.to_owned(),
        };
        match &action.kind {
            Kind::Run(run) => self.run(run, &bad),
            Kind::Update { run, gradient } => {
                if !run.inputs.iter().any(|view| view.buffer == *gradient) {
                    return Err(bad(
                        format!("it does not read `{}`, the gradient that it must use", {
                            self.name(*gradient)
                        }),
                        "bind the unit's gradient to the update program",
                    ));
                }
                self.ready(*gradient, &bad)?;
                self.run(run, &bad)?;
                self.used(*gradient);
                Ok(())
            }
            Kind::Clear { run } => self.clear(run, &bad),
            Kind::Reduce { run, from, into } => self.reduce(run, *from, *into, &bad),
            Kind::Send { buffer, .. } => self.sends(*buffer, &bad),
            Kind::Receive { buffer, .. } => self.arrives(*buffer, &bad),
            _ => Ok(()),
        }
    }

    /// For every program: it reads complete gradients, and writes only what it declares.
    fn run(&mut self, run: &Run, bad: Bad<'_>) -> Result<(), ScriptError> {
        for view in &run.inputs {
            if self.complete.contains_key(&view.buffer) {
                self.ready(view.buffer, bad)?;
            }
        }
        self.undeclared_write(run, bad)?;
        let program = self.script.programs[run.program.0].program();
        for &(output, contribution) in &run.contributes {
            let (view, write) = run.outputs[output];
            let ty = program.ty(program.outputs()[output].value);
            self.contribute(view.buffer, write, &[contribution], bad)?;
            self.same_type(view.buffer, ty, contribution, bad)?;
        }
        Ok(())
    }

    /// After an update, the contributions of the next one begin.
    fn used(&mut self, gradient: BufferId) {
        self.updated.push(gradient);
        if self.has_next(gradient) {
            self.holds.remove(&gradient);
            self.reduced.remove(&gradient);
            self.sent.remove(&gradient);
            self.partial.remove(&gradient);
        }
    }

    /// How many updates used a buffer.
    fn updates(&self, buffer: BufferId) -> usize {
        self.updated.iter().filter(|own| **own == buffer).count()
    }

    /// Whether there is an update still to come that uses a buffer.
    fn has_next(&self, buffer: BufferId) -> bool {
        let done = self.updates(buffer);
        self.complete.get(&buffer).is_some_and(|(_, each)| done < each.len())
    }

    /// Zeros are written only where nothing was contributed yet.
    fn clear(&self, run: &Run, bad: Bad<'_>) -> Result<(), ScriptError> {
        let holding = |b: &BufferId| self.holds.get(b).is_some_and(|holds| !holds.is_empty());
        match run.outputs.iter().map(|(view, _)| view.buffer).find(holding) {
            None => Ok(()),
            Some(buffer) => Err(bad(
                format!("`{}` holds contributions already", self.name(buffer)),
                "clear it before the first contribution",
            )),
        }
    }

    /// A sum over ranks: the contents of one buffer move to another, or stay where they are.
    fn reduce(
        &mut self,
        run: &Run,
        from: BufferId,
        into: BufferId,
        bad: Bad<'_>,
    ) -> Result<(), ScriptError> {
        let program = self.script.programs[run.program.0].program();
        let (Some(input), Some(output)) = (program.inputs().first(), program.outputs().first())
        else {
            return Err(bad("its program has no operand".to_owned(), "bind a reduction"));
        };
        let (before, after) = (program.ty(input.value), program.ty(output.value));
        let sums = before.layout.partial().difference(after.layout.partial());
        // A buffer without contributions is not a partial sum.
        let nothing = BTreeSet::new();
        let found = self.partial.get(&from).unwrap_or(&nothing).clone();
        if let Some(axis) = sums.clone().find(|axis| !found.contains(axis)) {
            return Err(bad(
                format!("`{}` is not a partial sum over `{axis}`", self.name(from)),
                "summing it again would multiply it by the axis's size",
            ));
        }
        // A program does not sum over axes that its mesh does not have: their summands are still
        // missing.
        let (known, elsewhere): (BTreeSet<Axis>, BTreeSet<Axis>) =
            found.iter().partition(|axis| program.mesh().size(**axis).is_some());
        if known != *before.layout.partial() {
            return Err(bad(
                format!(
                    "`{}` is a partial sum over {found:?}, but the program reads it as {before}",
                    self.name(from)
                ),
                "declare the axes over which its contributions are partial",
            ));
        }
        self.is_complete(from, bad)?;
        let rest: BTreeSet<Axis> = after.layout.partial().union(&elsewhere).copied().collect();
        if from == into {
            self.reduced.insert(from);
            self.partial.insert(from, rest);
            // The rank that has the sum updates, and its own script is checked for that.
            if self.is_given(run) {
                self.used(from);
            }
            return Ok(());
        }
        let write = run.outputs.first().map_or(Write::Overwrite, |(_, write)| *write);
        let moved = std::mem::take(self.holds.entry(from).or_default());
        let moved: Vec<Contribution> = moved.into_iter().collect();
        // What other stage groups add is a sum over their ranks already.
        let summed = self.is_brought(from).then(|| self.reduced.take(&into)).flatten();
        self.contribute(into, write, &moved, bad)?;
        self.reduced.extend(summed);
        self.partial.remove(&from);
        self.same_partial(into, &rest, bad)
    }

    /// A contribution must have the accumulator's element type; if it is a partial sum, the
    /// accumulator becomes one too.
    fn same_type(
        &mut self,
        buffer: BufferId,
        ty: &TensorType,
        contribution: Contribution,
        bad: Bad<'_>,
    ) -> Result<(), ScriptError> {
        self.same_partial(buffer, ty.layout.partial(), bad)?;
        match self.complete.get(&buffer) {
            Some((dtype, _)) if *dtype != ty.dtype => Err(bad(
                format!(
                    "`{}` is accumulated in {dtype}, but {} is {}",
                    self.name(buffer),
                    self.script.names.describe(&contribution),
                    ty.dtype
                ),
                "compute gradients in the type in which they are accumulated",
            )),
            _ => Ok(()),
        }
    }

    /// All contributions to a buffer must be partial over the same axes: a sum of a partial and a
    /// complete value would count the complete one once per rank.
    fn same_partial(
        &mut self,
        buffer: BufferId,
        partial: &BTreeSet<Axis>,
        bad: Bad<'_>,
    ) -> Result<(), ScriptError> {
        let shared = self.shared.get(&buffer).into_iter().flatten();
        let partial = &partial.iter().chain(shared).copied().collect::<BTreeSet<Axis>>();
        let known = self.partial.entry(buffer).or_insert_with(|| partial.clone());
        if known == partial {
            return Ok(());
        }
        let why = format!(
            "`{}` holds partial sums over {known:?}; what is added is partial over {partial:?}",
            self.script.name(buffer)
        );
        Err(bad(why, "reduce both to the same axes before they are added"))
    }

    fn name(&self, buffer: BufferId) -> String {
        self.script.name(buffer)
    }

    fn contribute(
        &mut self,
        buffer: BufferId,
        write: Write,
        new: &[Contribution],
        bad: Bad<'_>,
    ) -> Result<(), ScriptError> {
        let script = self.script;
        let name = || script.name(buffer);
        let describe = |c: &Contribution| script.names.describe(c);
        if self.updated.contains(&buffer) && !self.has_next(buffer) {
            return Err(bad(
                format!("`{}` was already used for an update", name()),
                "the contribution would be lost; update after the last micro-batch",
            ));
        }
        if self.reduced.contains(&buffer) {
            return Err(bad(
                format!("`{}` was already summed over ranks", name()),
                "the contribution would stay on this rank; reduce after the last micro-batch",
            ));
        }
        if self.sent.contains(&buffer) {
            return Err(bad(
                format!("`{}` was already sent to the stage groups that share it", name()),
                "the contribution would be lost; send after the last micro-batch",
            ));
        }
        let holds = self.holds.entry(buffer).or_default();
        for added in new {
            // Contributions of one parameter lie together.
            let from = Contribution { instance: 0, microbatch: 0, ..*added };
            let same = holds.range(from..).next().filter(|c| c.param == added.param);
            let (why, help) = match (write, same) {
                (Write::Overwrite, Some(lost)) => (
                    format!(
                        "overwriting `{}` loses the contribution of {}",
                        name(),
                        describe(lost)
                    ),
                    "only the first contribution of a step overwrites; later ones add",
                ),
                (Write::Add, None) => (
                    format!("adding to `{}` before anything was written there", name()),
                    "the first contribution of a step overwrites",
                ),
                _ if holds.contains(added) => (
                    format!("`{}` already holds {}", name(), describe(added)),
                    "each instance contributes once per micro-batch",
                ),
                _ => continue,
            };
            return Err(bad(why, help));
        }
        holds.extend(new);
        Ok(())
    }

    /// A run that writes into a gradient buffer must say what it contributes.
    fn undeclared_write(&self, run: &Run, bad: Bad<'_>) -> Result<(), ScriptError> {
        let said = |output: usize| run.contributes.iter().any(|(o, _)| *o == output);
        let silent = (run.outputs.iter().enumerate())
            .find(|(i, (view, _))| self.complete.contains_key(&view.buffer) && !said(*i));
        match silent {
            None => Ok(()),
            Some((_, (view, _))) => Err(bad(
                format!(
                    "it writes to `{}` without saying what it contributes",
                    self.name(view.buffer)
                ),
                "a gradient buffer holds gradients alone; bind another buffer",
            )),
        }
    }

    /// A gradient that is computed but never used means a parameter that silently does not train.
    fn all_used(&self) -> Result<(), ScriptError> {
        let end = self.script.actions.len();
        let mut held = self.holds.iter().filter(|(_, holds)| !holds.is_empty()).map(|(b, _)| b);
        let unused = |b: &&BufferId| !self.updated.contains(b) || self.has_next(**b);
        match held.find(unused) {
            Some(buffer) if !self.complete.is_empty() => Err(ScriptError::Gradient {
                action: end,
                what: "the end of the script".to_owned(),
                why: format!("`{}` was computed, but no update uses it", self.name(*buffer)),
                help: "add its update".to_owned(),
            }),
            _ => Ok(()),
        }
    }
}
