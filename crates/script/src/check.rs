//! The checker: what a gradient buffer holds is typed, so no contribution is lost, doubled or
//! forgotten, and every read finds something written.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::Axis;

use crate::action::{Action, BufferId, Contribution, Kind, Run, Script, Source, Write};
use crate::error::ScriptError;
use crate::order::HappensBefore;

/// Checks a whole script.
pub fn check(script: &Script) -> Result<(), ScriptError> {
    HappensBefore::of(script)?;
    let mut written: BTreeSet<BufferId> = (script.buffers.iter().enumerate())
        .filter(|(_, b)| matches!(b.source, Source::State | Source::Host))
        .map(|(i, _)| BufferId(i))
        .collect();
    let mut gradients = Gradients::new(script);
    // Accumulators persist, but what they hold from the step before is not a contribution.
    for (buffer, _) in &script.complete {
        written.remove(buffer);
    }
    for (index, action) in script.actions.iter().enumerate() {
        let unwritten = action.reads().into_iter().find(|b| !written.contains(b));
        if let Some(run) = action.run() {
            sizes(script, index, action, run)?;
        }
        gradients.apply(index, action)?;
        if let Some(buffer) = unwritten {
            return Err(ScriptError::Unwritten {
                action: index,
                what: action.label.clone(),
                buffer: script.buffers[buffer.0].name.clone(),
            });
        }
        written.extend(action.writes());
    }
    gradients.all_used()
}

fn sizes(script: &Script, index: usize, action: &Action, run: &Run) -> Result<(), ScriptError> {
    let program = &script.programs[run.program.0].program;
    let inputs = program.inputs().iter().zip(&run.inputs);
    let outputs = program.outputs().iter().zip(run.outputs.iter().map(|(view, _)| view));
    for (port, view) in inputs.chain(outputs) {
        let needed = program.ty(port.value).local_bytes(program.mesh());
        let buffer = &script.buffers[view.buffer.0];
        let found = buffer.bytes.saturating_sub(view.offset);
        if found < needed {
            return Err(ScriptError::TooSmall {
                action: index,
                what: action.label.clone(),
                port: port.name.clone(),
                buffer: buffer.name.clone(),
                needed,
                found,
            });
        }
    }
    Ok(())
}

/// The type of each gradient buffer: the contributions it holds, and over which axes it is
/// still a partial sum.
struct Gradients<'a> {
    script: &'a Script,
    complete: BTreeMap<BufferId, BTreeSet<Contribution>>,
    holds: BTreeMap<BufferId, BTreeSet<Contribution>>,
    partial: BTreeMap<BufferId, BTreeSet<Axis>>,
    reduced: BTreeSet<BufferId>,
    updated: BTreeSet<BufferId>,
}

impl<'a> Gradients<'a> {
    fn new(script: &'a Script) -> Self {
        Self {
            script,
            complete: (script.complete.iter())
                .map(|(b, all)| (*b, all.iter().copied().collect()))
                .collect(),
            holds: BTreeMap::new(),
            partial: (script.partial.iter())
                .map(|(b, axes)| (*b, axes.iter().copied().collect()))
                .collect(),
            reduced: BTreeSet::new(),
            updated: BTreeSet::new(),
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
            Kind::Run(run) => {
                for view in &run.inputs {
                    if self.complete.contains_key(&view.buffer) {
                        self.ready(view.buffer, &bad)?;
                    }
                }
                self.written_silently(run, &bad)?;
                for &(output, contribution) in &run.contributes {
                    let (view, write) = run.outputs[output];
                    self.contribute(view.buffer, write, contribution, &bad)?;
                }
                Ok(())
            }
            Kind::Reduce { gradient, axes } => {
                self.reduced.insert(*gradient);
                let partial = self.partial.entry(*gradient).or_default();
                for axis in axes {
                    if !partial.remove(axis) {
                        let name = &self.script.buffers[gradient.0].name;
                        return Err(bad(
                            format!("`{name}` is not a partial sum over `{axis}`"),
                            "summing it again would multiply it by the axis's size",
                        ));
                    }
                }
                Ok(())
            }
            Kind::Update { gradient, .. } => {
                self.ready(*gradient, &bad)?;
                self.updated.insert(*gradient);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn contribute(
        &mut self,
        buffer: BufferId,
        write: Write,
        new: Contribution,
        bad: &dyn Fn(String, &str) -> ScriptError,
    ) -> Result<(), ScriptError> {
        let name = &self.script.buffers[buffer.0].name;
        let describe = |c: &Contribution| {
            format!(
                "parameter {} of instance {}, micro-batch {}",
                c.param, c.instance, c.microbatch
            )
        };
        if self.updated.contains(&buffer) {
            return Err(bad(
                format!("`{name}` was already used for an update"),
                "the contribution would be lost; update after the last micro-batch",
            ));
        }
        if self.reduced.contains(&buffer) {
            return Err(bad(
                format!("`{name}` was already summed over ranks"),
                "the contribution would stay on this rank; reduce after the last micro-batch",
            ));
        }
        let holds = self.holds.entry(buffer).or_default();
        let same: Vec<Contribution> =
            holds.iter().filter(|c| c.param == new.param).copied().collect();
        match (write, same.first()) {
            (Write::Overwrite, Some(lost)) => Err(bad(
                format!("overwriting `{name}` loses the contribution of {}", describe(lost)),
                "only the first contribution of a step overwrites; later ones add",
            )),
            (Write::Add, None) => Err(bad(
                format!("adding to `{name}` before anything was written there"),
                "the first contribution of a step overwrites",
            )),
            _ if !holds.insert(new) => Err(bad(
                format!("`{name}` already holds {}", describe(&new)),
                "each instance contributes once per micro-batch",
            )),
            _ => Ok(()),
        }
    }

    /// A run that writes into a gradient buffer must say what it contributes.
    fn written_silently(
        &self,
        run: &Run,
        bad: &dyn Fn(String, &str) -> ScriptError,
    ) -> Result<(), ScriptError> {
        let said = |output: usize| run.contributes.iter().any(|(o, _)| *o == output);
        let silent = (run.outputs.iter().enumerate())
            .find(|(i, (view, _))| self.complete.contains_key(&view.buffer) && !said(*i));
        match silent {
            None => Ok(()),
            Some((_, (view, _))) => Err(bad(
                format!(
                    "it writes to `{}` without saying what it contributes",
                    self.script.buffers[view.buffer.0].name
                ),
                "a gradient buffer holds gradients alone; bind another buffer",
            )),
        }
    }

    /// Whoever reads a gradient, to update by it or for its norm, reads all of it.
    fn ready(
        &self,
        buffer: BufferId,
        bad: &dyn Fn(String, &str) -> ScriptError,
    ) -> Result<(), ScriptError> {
        let name = &self.script.buffers[buffer.0].name;
        let empty = BTreeSet::new();
        let holds = self.holds.get(&buffer).unwrap_or(&empty);
        let complete = self.complete.get(&buffer).unwrap_or(&empty);
        if let Some(missing) = complete.difference(holds).next() {
            return Err(bad(
                format!(
                    "`{name}` lacks the contribution of parameter {} of instance {}, micro-batch \
                     {} ({} of {} are there)",
                    missing.param,
                    missing.instance,
                    missing.microbatch,
                    holds.len(),
                    complete.len()
                ),
                "read it after every user of the parameter has added its gradient",
            ));
        }
        if let Some(axis) = self.partial.get(&buffer).and_then(|p| p.iter().next()) {
            return Err(bad(
                format!("`{name}` is still a partial sum over `{axis}`"),
                "reduce it before it is read",
            ));
        }
        Ok(())
    }

    /// A gradient that was formed and never used is a parameter that silently does not train.
    fn all_used(&self) -> Result<(), ScriptError> {
        let end = self.script.actions.len();
        match self.holds.keys().find(|b| !self.updated.contains(b)) {
            Some(buffer) if !self.complete.is_empty() => Err(ScriptError::Gradient {
                action: end,
                what: "the end of the script".to_owned(),
                why: format!("`{}` was formed, but nothing is updated by it", {
                    &self.script.buffers[buffer.0].name
                }),
                help: "add its update".to_owned(),
            }),
            _ => Ok(()),
        }
    }
}
