//! Binding the ports of runs to buffers.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_autodiff::boundary_name;
use phalanx_call::Lane;
use phalanx_ir::{DType, Model, Port, Program, Role};

use super::Compiled;
use super::links::{differentiated, producer};
use crate::action::{
    Action, Buffer, BufferId, Category, Contribution, Kind, Run, Script, Source, View, Write,
};
use crate::device::Device;
use crate::error::ScriptError;
use crate::schedule::{Part, Turn};
use crate::unit::Unit;

/// By parameter: the view that holds it in its unit's buffer.
pub(super) struct Places(Vec<Option<View>>);

impl Places {
    /// Places in one buffer for each unit, whose elements have this type.
    pub(super) fn new(model: &Model, units: &[Unit], buffers: &[BufferId], dtype: DType) -> Self {
        let mut places = Self(vec![None; model.params().len()]);
        for (unit, &buffer) in units.iter().zip(buffers) {
            places.set(unit, buffer, dtype);
        }
        places
    }

    /// Places the members of a unit in another buffer.
    pub(super) fn set(&mut self, unit: &Unit, buffer: BufferId, dtype: DType) {
        for member in &unit.members {
            self.0[member.param] = Some(View { buffer, offset: member.offset * dtype.size() });
        }
    }
}

pub(super) struct Binder<'a> {
    model: &'a Model,
    compiled: &'a Compiled,
    pub(super) script: Script,
    names: BTreeMap<String, BufferId>,
    /// Where the next run finds its parameters.
    pub(super) weights: Places,
    /// Where it forms their gradients; none in scripts that only run forward.
    pub(super) gradients: Option<Places>,
    /// Views that something was already written to, by buffer and offset.
    pub(super) begun: BTreeSet<(BufferId, usize)>,
    /// Forwards of an instance for a micro-batch that are done twice, and whether the second is over.
    twice: BTreeMap<(usize, usize), bool>,
}

impl<'a> Binder<'a> {
    pub(super) fn new(model: &'a Model, device: Device<'a>, script: Script) -> Self {
        let names = (script.buffers.iter().enumerate())
            .map(|(i, b)| (b.name.clone(), BufferId(i)))
            .collect();
        let weights = Places::new(model, &[], &[], DType::F32);
        let again = device.turns.iter().filter(|turn| turn.part == Part::R);
        Self {
            model,
            compiled: device.compiled,
            script,
            names,
            weights,
            gradients: None,
            begun: BTreeSet::new(),
            twice: again.map(|turn| ((turn.instance, turn.microbatch), false)).collect(),
        }
    }

    /// Appends the run of one turn of the schedule.
    pub(super) fn turn(&mut self, turn: Turn) -> Result<(), ScriptError> {
        let instance = &self.model.instances()[turn.instance];
        let compiled = self.compiled;
        let program = compiled.program(instance.segment, turn.part);
        let mut run = Run {
            program: self.script.program(program),
            inputs: Vec::new(),
            outputs: Vec::new(),
            contributes: Vec::new(),
        };
        for port in program.inputs() {
            let view = self.input(turn, program, port)?;
            if port.role == Role::Boundary && self.keeps(turn, &port.name)? {
                self.script.buffers[view.buffer.0].category = Category::Residuals;
            }
            run.inputs.push(view);
        }
        if turn.part == Part::R {
            self.twice.insert((turn.instance, turn.microbatch), true);
        }
        for (index, port) in program.outputs().iter().enumerate() {
            let view = self.output(turn, program, port)?;
            let summed = matches!(port.role, Role::Gradient | Role::Cotangent);
            let first = self.begun.insert((view.buffer, view.offset));
            let write = if summed && !first { Write::Add } else { Write::Overwrite };
            run.outputs.push((view, write));
            if port.role == Role::Gradient {
                let (instance, microbatch) = (turn.instance, turn.microbatch);
                let param = self.param(turn.instance, &port.name)?;
                run.contributes.push((index, Contribution { param, instance, microbatch }));
            }
        }
        let label = format!("{} {} mb {}", instance.name, turn.part, turn.microbatch);
        let kind = Kind::Run(run);
        self.script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
        Ok(())
    }

    fn input(&mut self, turn: Turn, program: &Program, port: &Port) -> Result<View, ScriptError> {
        let mb = turn.microbatch;
        let own = &self.model.instances()[turn.instance].name;
        let bytes = program.ty(port.value).local_bytes(program.mesh());
        let (name, category, source) = match port.role {
            Role::Param => {
                return self.place(Some(&self.weights), turn.instance, &port.name);
            }
            Role::Data => (format!("{}@mb{mb}", port.name), Category::Inputs, Source::Host),
            // A random key tells instances and micro-batches apart; other numbers are the step's.
            Role::Scalar if port.name == "key" => {
                (format!("{own}/key@mb{mb}"), Category::Inputs, Source::Host)
            }
            Role::Scalar => (port.name.clone(), Category::Inputs, Source::Host),
            Role::Boundary => {
                let producer = self.producer(turn.instance, &port.name)?;
                let name = self.forward_name(producer, &port.name, mb);
                (name, Category::Workspace, Source::Script)
            }
            Role::Residual => {
                let name = self.forward_name(turn.instance, &port.name, mb);
                (name, Category::Residuals, Source::Script)
            }
            Role::Cotangent => {
                self.is_differentiated(turn.instance, boundary_of(port)?)?;
                (format!("{own}/{}@mb{mb}", port.name), Category::Workspace, Source::Script)
            }
            Role::Gradient | Role::State | Role::Loss | Role::Probe => {
                return Err(ScriptError::Schedule(format!(
                    "`{own}` reads `{}`, which a segment can't read ({})",
                    port.name,
                    port.role.name()
                )));
            }
        };
        Ok(self.whole(name, category, bytes, source))
    }

    fn output(&mut self, turn: Turn, program: &Program, port: &Port) -> Result<View, ScriptError> {
        let mb = turn.microbatch;
        let own = &self.model.instances()[turn.instance].name;
        let bytes = program.ty(port.value).local_bytes(program.mesh());
        let (name, category, source) = match port.role {
            Role::Gradient => {
                return self.place(self.gradients.as_ref(), turn.instance, &port.name);
            }
            Role::Cotangent => {
                let producer = self.producer(turn.instance, boundary_of(port)?)?;
                let producer = &self.model.instances()[producer].name;
                let name = format!("{producer}/{}@mb{mb}", port.name);
                (name, Category::Workspace, Source::Script)
            }
            Role::Residual => {
                let name = self.forward_name(turn.instance, &port.name, mb);
                // Of what is made a second time nothing stays the first time.
                let kept = self.twice.get(&(turn.instance, mb)) != Some(&false);
                let category = if kept { Category::Residuals } else { Category::Workspace };
                (name, category, Source::Script)
            }
            Role::Boundary => {
                let name = self.forward_name(turn.instance, &port.name, mb);
                (name, Category::Workspace, Source::Script)
            }
            Role::Probe => {
                (format!("{own}/{}@mb{mb}", port.name), Category::Workspace, Source::Result)
            }
            _ => (format!("{own}/{}@mb{mb}", port.name), Category::Workspace, Source::Script),
        };
        Ok(self.whole(name, category, bytes, source))
    }

    /// The buffer of what an instance's forward gives: after its second forward, what that one gave.
    fn forward_name(&self, instance: usize, port: &str, microbatch: usize) -> String {
        let again = match self.twice.get(&(instance, microbatch)) {
            Some(true) => " again",
            _ => "",
        };
        format!("{}/{port}@mb{microbatch}{again}", self.model.instances()[instance].name)
    }

    /// Whether a boundary value that a turn reads was kept for it since the forward: what a backward
    /// reads was, and what a second forward reads of a first one.
    fn keeps(&self, turn: Turn, boundary: &str) -> Result<bool, ScriptError> {
        let producer = self.producer(turn.instance, boundary)?;
        let made_again = self.twice.get(&(producer, turn.microbatch)) == Some(&true);
        Ok(match turn.part {
            Part::F | Part::FBW => false,
            Part::R => !made_again,
            Part::B | Part::W | Part::BW => true,
        })
    }

    fn whole(&mut self, name: String, category: Category, bytes: usize, source: Source) -> View {
        let buffer = match self.names.get(&name) {
            Some(&found) => found,
            None => {
                let id = self.script.buffer(Buffer {
                    name: name.clone(),
                    category,
                    bytes,
                    source,
                    tier: Default::default(),
                    padding: vec![],
                });
                self.names.insert(name, id);
                id
            }
        };
        View { buffer, offset: 0 }
    }

    fn param(&self, instance: usize, local: &str) -> Result<usize, ScriptError> {
        let instance = &self.model.instances()[instance];
        instance.params.get(local).copied().ok_or_else(|| {
            ScriptError::Schedule(format!("`{}` binds no parameter `{local}`", instance.name))
        })
    }

    fn place(
        &self,
        places: Option<&Places>,
        instance: usize,
        local: &str,
    ) -> Result<View, ScriptError> {
        let param = self.param(instance, local)?;
        places.and_then(|p| p.0[param]).ok_or_else(|| {
            ScriptError::Schedule(format!(
                "`{}` uses `{}`, which no unit of this script holds",
                self.model.instances()[instance].name,
                self.model.params()[param].name
            ))
        })
    }

    /// A place for what another device sends.
    pub(super) fn received(&mut self, name: &str, bytes: usize) -> BufferId {
        self.whole(name.to_owned(), Category::Communication, bytes, Source::Script).buffer
    }

    /// The buffer of what is sent to another device.
    pub(super) fn sent(&mut self, name: &str) -> Result<BufferId, ScriptError> {
        let Some(&buffer) = self.names.get(name) else {
            return Err(ScriptError::Schedule(format!("`{name}` is sent, but nothing makes it")));
        };
        let category = &mut self.script.buffers[buffer.0].category;
        if *category == Category::Workspace {
            *category = Category::Communication;
        }
        Ok(buffer)
    }

    /// Whether some later instance gives the cotangent of a boundary value that this one gives.
    fn is_differentiated(&self, instance: usize, boundary: &str) -> Result<(), ScriptError> {
        match differentiated(self.model, self.compiled, instance, boundary).is_empty() {
            false => Ok(()),
            true => Err(ScriptError::NotDifferentiated {
                instance: self.model.instances()[instance].name.clone(),
                boundary: boundary.to_owned(),
            }),
        }
    }

    /// The last instance before this one that gives the boundary value.
    fn producer(&self, instance: usize, name: &str) -> Result<usize, ScriptError> {
        producer(self.model, self.compiled, instance, name).ok_or_else(|| {
            ScriptError::Schedule(format!(
                "`{}` reads `{name}`, which no instance before it gives",
                self.model.instances()[instance].name
            ))
        })
    }
}

/// The boundary value that a cotangent's port belongs to.
fn boundary_of(port: &Port) -> Result<&str, ScriptError> {
    boundary_name(&port.name).ok_or_else(|| {
        ScriptError::Schedule(format!("`{}` is not the name of a cotangent", port.name))
    })
}
