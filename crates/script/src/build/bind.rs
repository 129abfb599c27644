//! Binding the ports of runs to buffers.

use super::{
    Action, BTreeMap, Buffer, BufferId, Category, Compiled, Contribution, Kind, Lane, Model, Part,
    Precision, Program, Role, Script, ScriptError, Source, Step, Unit, UnitBuffers, View, Write,
};
use crate::action::Run;
use phalanx_ir::Port;

pub(super) struct Binder<'a> {
    model: &'a Model,
    compiled: &'a Compiled,
    script: Script,
    names: BTreeMap<String, BufferId>,
    /// By parameter: the views of its weights and its gradient.
    params: Vec<(View, View)>,
    /// Views that something was already added to, by buffer and offset.
    begun: BTreeMap<(BufferId, usize), ()>,
}

impl<'a> Binder<'a> {
    pub(super) fn new(
        model: &'a Model,
        compiled: &'a Compiled,
        units: &[Unit],
        buffers: &[UnitBuffers],
        precision: Precision,
        script: Script,
    ) -> Self {
        let nowhere = View { buffer: BufferId(usize::MAX), offset: 0 };
        let mut params = vec![(nowhere, nowhere); model.params().len()];
        for (unit, buffers) in units.iter().zip(buffers) {
            for member in &unit.members {
                let at = |buffer, size| View { buffer, offset: member.offset * size };
                params[member.param] = (
                    at(buffers.weights, precision.weights.size()),
                    at(buffers.gradient, precision.grads.size()),
                );
            }
        }
        let names = (script.buffers.iter().enumerate())
            .map(|(i, b)| (b.name.clone(), BufferId(i)))
            .collect();
        Self { model, compiled, script, names, params, begun: BTreeMap::new() }
    }

    /// Appends the run of one step of the schedule.
    pub(super) fn step(&mut self, step: Step) -> Result<(), ScriptError> {
        let instance = &self.model.instances()[step.instance];
        let compiled = self.compiled;
        let program = compiled.program(instance.segment, step.part);
        let mut run = Run {
            program: self.script.program(program),
            inputs: Vec::new(),
            outputs: Vec::new(),
            contributes: Vec::new(),
        };
        for port in program.inputs() {
            let view = self.input(step, program, port)?;
            run.inputs.push(view);
        }
        for (index, port) in program.outputs().iter().enumerate() {
            let view = self.output(step, program, port)?;
            let summed = matches!(port.role, Role::Gradient | Role::Cotangent);
            let first = self.begun.insert((view.buffer, view.offset), ()).is_none();
            let write = if summed && !first { Write::Add } else { Write::Overwrite };
            run.outputs.push((view, write));
            if port.role == Role::Gradient {
                let (instance, microbatch) = (step.instance, step.microbatch);
                let param = self.param(step.instance, &port.name)?;
                run.contributes.push((index, Contribution { param, instance, microbatch }));
            }
        }
        let label = format!("{} {} mb {}", instance.name, step.part, step.microbatch);
        let kind = Kind::Run(run);
        self.script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
        Ok(())
    }

    /// The finished script. A boundary value that a backward reads counts as a residual.
    pub(super) fn finish(mut self, steps: &[Step]) -> Result<Script, ScriptError> {
        for (step, action) in steps.iter().zip(&self.script.actions) {
            let backward = matches!(step.part, Part::B | Part::W | Part::BW);
            let Some(run) = action.run() else { continue };
            let program = &self.script.programs[run.program.0].program;
            for (port, view) in program.inputs().iter().zip(&run.inputs) {
                if backward && port.role == Role::Boundary {
                    self.script.buffers[view.buffer.0].category = Category::Residuals;
                }
            }
        }
        Ok(self.script)
    }

    fn input(&mut self, step: Step, program: &Program, port: &Port) -> Result<View, ScriptError> {
        let mb = step.microbatch;
        let own = &self.model.instances()[step.instance].name;
        let bytes = program.ty(port.value).local_bytes(program.mesh());
        let (name, category, source) = match port.role {
            Role::Param => {
                let param = self.param(step.instance, &port.name)?;
                return Ok(self.params[param].0);
            }
            Role::Data => (format!("{}@mb{mb}", port.name), Category::Inputs, Source::Host),
            // A random key tells instances and micro-batches apart; other numbers are the step's.
            Role::Scalar if port.name == "key" => {
                (format!("{own}/key@mb{mb}"), Category::Inputs, Source::Host)
            }
            Role::Scalar => (port.name.clone(), Category::Inputs, Source::Host),
            Role::Boundary => {
                let producer = self.producer(step.instance, &port.name)?;
                let name = format!("{producer}/{}@mb{mb}", port.name);
                (name, Category::Workspace, Source::Script)
            }
            Role::Residual => {
                (format!("{own}/{}@mb{mb}", port.name), Category::Residuals, Source::Script)
            }
            Role::Cotangent => {
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

    fn output(&mut self, step: Step, program: &Program, port: &Port) -> Result<View, ScriptError> {
        let mb = step.microbatch;
        let own = &self.model.instances()[step.instance].name;
        let bytes = program.ty(port.value).local_bytes(program.mesh());
        let (name, category, source) = match port.role {
            Role::Gradient => {
                let param = self.param(step.instance, &port.name)?;
                return Ok(self.params[param].1);
            }
            Role::Cotangent => {
                let boundary = port.name.strip_prefix("d.").unwrap_or(&port.name);
                let producer = self.producer(step.instance, boundary)?;
                let name = format!("{producer}/{}@mb{mb}", port.name);
                (name, Category::Workspace, Source::Script)
            }
            Role::Residual => {
                (format!("{own}/{}@mb{mb}", port.name), Category::Residuals, Source::Script)
            }
            Role::Probe => {
                (format!("{own}/{}@mb{mb}", port.name), Category::Workspace, Source::Result)
            }
            _ => (format!("{own}/{}@mb{mb}", port.name), Category::Workspace, Source::Script),
        };
        Ok(self.whole(name, category, bytes, source))
    }

    fn whole(&mut self, name: String, category: Category, bytes: usize, source: Source) -> View {
        let buffer = match self.names.get(&name) {
            Some(&found) => found,
            None => {
                let id = self.script.buffer(Buffer { name: name.clone(), category, bytes, source });
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

    /// The last instance before this one that gives the boundary value.
    fn producer(&self, instance: usize, name: &str) -> Result<&'a str, ScriptError> {
        (0..instance)
            .rev()
            .find(|&i| {
                let segment = self.model.instances()[i].segment;
                let forward = self.compiled.program(segment, Part::F);
                forward.outputs_with(Role::Boundary).any(|p| p.name == name)
            })
            .map(|i| self.model.instances()[i].name.as_str())
            .ok_or_else(|| {
                ScriptError::Schedule(format!(
                    "`{}` reads `{name}`, which no instance before it gives",
                    self.model.instances()[instance].name
                ))
            })
    }
}
