//! Binding the ports of runs to buffers.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_call::{Lane, Tier, Value};
use phalanx_ir::{DType, Model, Port, Role};

use super::wiring::Wiring;
use super::{Compiled, World, programs};
use crate::action::{
    Action, Buffer, BufferId, Category, Contribution, Kind, ProgramId, Run, Script, Source, View,
    Write,
};
use crate::error::ScriptError;
use crate::hash::{QuickMap, QuickSet};
use crate::key::{BufferKey, Scalar};
use crate::rolling::RollingTurns;
use crate::schedule::{Part, ScheduledRun};
use crate::stage_group::StageGroup;
use crate::unit::Unit;

/// For each parameter: the view that holds it in its unit's buffer.
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
    world: &'a World<'a>,
    compiled: &'a Compiled,
    wiring: &'a Wiring,
    pub(super) script: Script,
    known: QuickMap<BufferKey, BufferId>,
    /// For each segment and part: the program in the script.
    programs: HashMap<(usize, Part), Arc<Known>>,
    /// Where the next run finds its parameters.
    pub(super) weights: Places,
    /// Where it writes their gradients; none in scripts that only run forward.
    pub(super) gradients: Option<Places>,
    /// Views that were already written, by buffer and offset.
    pub(super) begun: QuickSet<(BufferId, usize)>,
    /// Forwards (instance, micro-batch) that are run twice, and whether the second run is over.
    twice: QuickMap<(usize, usize), bool>,
}

/// A program of the script, and what its many runs need to know of it.
struct Known {
    id: ProgramId,
    /// By input, then by output: its name, and its bytes on a rank.
    ports: [Vec<(Arc<str>, usize)>; 2],
}

impl<'a> Binder<'a> {
    pub(super) fn new(world: &'a World<'a>, stage_group: usize, script: Script) -> Self {
        let known = (script.buffers.iter().enumerate())
            .map(|(i, b)| (b.key.clone(), BufferId(i)))
            .collect();
        let weights = Places::new(world.model, &[], &[], DType::F32);
        let StageGroup { turns, compiled, .. } = world.stage_groups[stage_group];
        let again = turns.iter().filter(|turn| turn.part == Part::R);
        Self {
            world,
            compiled,
            wiring: world.wiring(stage_group),
            script,
            known,
            programs: HashMap::new(),
            weights,
            gradients: None,
            begun: QuickSet::default(),
            twice: again.map(|turn| ((turn.instance, turn.microbatch), false)).collect(),
        }
    }

    /// Appends the run of one turn of the schedule.
    pub(super) fn turn(&mut self, turn: ScheduledRun) -> Result<(), ScriptError> {
        let instance = &self.world.model.instances()[turn.instance];
        let compiled = self.compiled;
        let program = compiled.program(instance.segment, turn.part);
        let known = self.program(instance.segment, turn.part);
        let [inputs, outputs] = &known.ports;
        let mut run = Run {
            program: known.id,
            inputs: Vec::with_capacity(program.inputs().len()),
            outputs: Vec::with_capacity(program.outputs().len()),
            contributes: Vec::new(),
        };
        for (port, (name, bytes)) in program.inputs().iter().zip(inputs) {
            let known = self.script.buffers.len();
            let view = self.input(turn, port, name, *bytes)?;
            // Nothing has produced what an empty micro-batch reads first: it is zero, not what happens to lie there.
            if view.buffer.0 >= known
                && self.world.is_empty(turn.microbatch)
                && matches!(port.role, Role::Boundary | Role::Cotangent)
            {
                let label = format!("clear {}", self.script.name(view.buffer));
                let dtype = program.ty(port.value).dtype;
                let (script, all) = (&mut self.script, 0..*bytes);
                programs::clear(self.world, script, &label, view.buffer, dtype, &[all])?;
            }
            if port.role == Role::Boundary && self.keeps(turn, &port.name)? {
                self.script.buffers[view.buffer.0].category = Category::Residuals;
            }
            run.inputs.push(view);
        }
        if turn.part == Part::R {
            self.twice.insert((turn.instance, turn.microbatch), true);
        }
        for (index, (port, (name, bytes))) in program.outputs().iter().zip(outputs).enumerate() {
            let view = self.output(turn, port, name, *bytes)?;
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
        self.script.turns.push((self.script.actions.len(), turn));
        self.script.actions.push(Action { label, lane: Lane::Compute, kind, after: vec![] });
        Ok(())
    }

    /// The program of a segment's part, which the script has once.
    fn program(&mut self, segment: usize, part: Part) -> Arc<Known> {
        if let Some(known) = self.programs.get(&(segment, part)) {
            return known.clone();
        }
        let program = self.compiled.program(segment, part);
        let id = self.script.program(self.world.library.placed(program));
        let bytes = |port: &Port| program.ty(port.value).local_bytes(program.mesh());
        let ports = [program.inputs(), program.outputs()]
            .map(|ports| ports.iter().map(|p| (p.name.as_str().into(), bytes(p))).collect());
        let known = Arc::new(Known { id, ports });
        self.programs.insert((segment, part), known.clone());
        known
    }

    fn input(
        &mut self,
        turn: ScheduledRun,
        port: &Port,
        name: &Arc<str>,
        bytes: usize,
    ) -> Result<View, ScriptError> {
        let ScheduledRun { instance, microbatch, .. } = turn;
        // Empty micro-batches have no data and no keys of their own.
        let given = if self.world.is_empty(microbatch) { 0 } else { microbatch };
        let (key, category, source) = match port.role {
            Role::Param => {
                return self.place(Some(&self.weights), instance, &port.name);
            }
            Role::Data => {
                let port = name.clone();
                (BufferKey::Data { port, microbatch: given }, Category::Inputs, Source::Host)
            }
            Role::Random => {
                let key = BufferKey::Random { instance, microbatch: given };
                (key, Category::Inputs, Source::Host)
            }
            Role::Scalar => {
                let scalar = Scalar::of_port(&port.name);
                let round = self.world.round_of(microbatch);
                (self.world.scalar_key(scalar, round, 1), Category::Inputs, Source::Host)
            }
            Role::Boundary => {
                let key = self.read_key(instance, name, microbatch)?;
                let producer = self.producer(instance, &port.name)?;
                (key, Category::Workspace, self.made(producer, microbatch))
            }
            Role::Residual => {
                let key = self.forward_key(instance, name, microbatch);
                (key, Category::Residuals, self.made(instance, microbatch))
            }
            Role::Cotangent => {
                self.is_differentiated(instance, boundary_of(port)?)?;
                (value(instance, name, microbatch), Category::Workspace, Source::Script)
            }
            Role::Gradient | Role::State | Role::Loss | Role::Probe => {
                return Err(ScriptError::Schedule(format!(
                    "`{}` reads `{}`, which a segment cannot read ({})",
                    self.world.model.instances()[instance].name,
                    port.name,
                    port.role.name()
                )));
            }
        };
        Ok(self.whole(key, category, bytes, source))
    }

    fn output(
        &mut self,
        turn: ScheduledRun,
        port: &Port,
        name: &Arc<str>,
        bytes: usize,
    ) -> Result<View, ScriptError> {
        let ScheduledRun { instance, microbatch, .. } = turn;
        let (key, category, source) = match port.role {
            Role::Gradient => {
                return self.place(self.gradients.as_ref(), instance, &port.name);
            }
            Role::Cotangent => {
                let boundary = boundary_of(port)?;
                let [_, holder] = self.held(instance, boundary, microbatch)?;
                (value(holder, name, microbatch), Category::Workspace, Source::Script)
            }
            Role::Residual => {
                let key = self.forward_key(instance, name, microbatch);
                // Values that are recomputed later are not kept now.
                let kept = self.twice.get(&(instance, microbatch)) != Some(&false);
                let category = if kept { Category::Residuals } else { Category::Workspace };
                (key, category, Source::Script)
            }
            Role::Boundary => {
                let key = self.forward_key(instance, name, microbatch);
                (key, Category::Workspace, Source::Script)
            }
            Role::Probe => (value(instance, name, microbatch), Category::Workspace, Source::Result),
            _ => (value(instance, name, microbatch), Category::Workspace, Source::Script),
        };
        Ok(self.whole(key, category, bytes, source))
    }

    /// The output of an instance's forward: that of its second run, once there was one.
    fn forward_key(&self, instance: usize, port: &Arc<str>, microbatch: usize) -> BufferKey {
        let again = self.twice.get(&(instance, microbatch)) == Some(&true);
        self.own_key(Value { instance, port: port.clone(), microbatch, again })
    }

    /// The key of a value. Those of the next script's micro-batches lie where that script looks for them.
    fn own_key(&self, value: Value) -> BufferKey {
        let rolling = self.world.rolling;
        let earlier = rolling.and_then(|r| value.microbatch.checked_sub(r.window.microbatches));
        BufferKey::Value(Value { microbatch: earlier.unwrap_or(value.microbatch), ..value })
    }

    /// Where an instance's forward left its values: the script before ran it, unless it is run again.
    fn made(&self, instance: usize, microbatch: usize) -> Source {
        let again = self.twice.get(&(instance, microbatch)) == Some(&true);
        let flies =
            |r: &RollingTurns| r.in_flight.iter().any(|own| own.contains(&(instance, microbatch)));
        match !again && self.world.rolling.is_some_and(flies) {
            true => Source::Carried,
            false => Source::Script,
        }
    }

    /// A boundary value, as the stage group holds it.
    fn read_key(
        &self,
        instance: usize,
        name: &Arc<str>,
        microbatch: usize,
    ) -> Result<BufferKey, ScriptError> {
        let [producer, holder] = self.held(instance, name, microbatch)?;
        Ok(match producer == holder {
            true => self.forward_key(producer, name, microbatch),
            false => self.own_key(Value {
                instance: holder,
                port: name.clone(),
                microbatch,
                again: false,
            }),
        })
    }

    /// The producer of a boundary value that an instance reads, and under whose name the value is held.
    fn held(&self, instance: usize, name: &str, mb: usize) -> Result<[usize; 2], ScriptError> {
        let producer = self.producer(instance, name)?;
        let flow = &self.world.links.flow;
        Ok([producer, flow.holder(self.wiring, [producer, instance], name, mb)])
    }

    /// Whether a boundary value that a turn reads was kept since the forward: true for what a
    /// backward reads, and for what a recomputed forward reads from a first one.
    fn keeps(&self, turn: ScheduledRun, boundary: &str) -> Result<bool, ScriptError> {
        let [producer, holder] = self.held(turn.instance, boundary, turn.microbatch)?;
        let made_again =
            producer == holder && self.twice.get(&(producer, turn.microbatch)) == Some(&true);
        Ok(match turn.part {
            Part::F | Part::FBW => false,
            Part::R => !made_again,
            Part::B | Part::W | Part::BW => true,
        })
    }

    fn whole(&mut self, key: BufferKey, category: Category, bytes: usize, source: Source) -> View {
        let buffer = match self.known.get(&key) {
            Some(&found) => found,
            None => {
                let (tier, padding) = (Tier::Device, vec![]);
                let own = Buffer { key: key.clone(), category, bytes, source, tier, padding };
                let id = self.script.buffer(own);
                self.known.insert(key, id);
                id
            }
        };
        View { buffer, offset: 0 }
    }

    fn param(&self, instance: usize, local: &str) -> Result<usize, ScriptError> {
        let instance = &self.world.model.instances()[instance];
        instance.params.get(local).copied().ok_or_else(|| {
            ScriptError::Schedule(format!(
                "`{}` does not bind the parameter `{local}`",
                instance.name
            ))
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
                self.world.model.instances()[instance].name,
                self.world.model.params()[param].name
            ))
        })
    }

    /// A buffer for what another stage group sends. Runs add to what it holds then.
    pub(super) fn received(&mut self, key: BufferKey, bytes: usize) -> BufferId {
        let key = match key {
            BufferKey::Value(value) => self.own_key(value),
            other => other,
        };
        let view = self.whole(key, Category::Communication, bytes, Source::Script);
        self.begun.insert((view.buffer, view.offset));
        view.buffer
    }

    /// A buffer for what this stage group keeps for another one; the same for the same key.
    pub(super) fn kept(&mut self, key: BufferKey, bytes: usize) -> BufferId {
        self.whole(key, Category::Residuals, bytes, Source::Script).buffer
    }

    /// A buffer for a value that another stage group kept: from now on it is the value's.
    pub(super) fn returned(&mut self, value: &Value, bytes: usize) -> BufferId {
        let buffer = self.kept(BufferKey::Back(value.clone()), bytes);
        self.known.insert(BufferKey::Value(value.clone()), buffer);
        buffer
    }

    /// The buffer of a value that is sent to another stage group.
    pub(super) fn sent(&mut self, value: &Value) -> Result<BufferId, ScriptError> {
        let Some(&buffer) = self.known.get(&self.own_key(value.clone())) else {
            let name = self.script.names.value(value);
            return Err(ScriptError::Schedule(format!(
                "`{name}` is sent, but nothing produces it"
            )));
        };
        let category = &mut self.script.buffers[buffer.0].category;
        if *category == Category::Workspace {
            *category = Category::Communication;
        }
        Ok(buffer)
    }

    /// Checks that a later instance produces the cotangent of a boundary value of this instance.
    fn is_differentiated(&self, instance: usize, boundary: &str) -> Result<(), ScriptError> {
        match self.wiring.differentiated(instance, boundary).is_empty() {
            false => Ok(()),
            true => Err(ScriptError::NotDifferentiated {
                instance: self.world.model.instances()[instance].name.clone(),
                boundary: boundary.to_owned(),
            }),
        }
    }

    /// The last instance before this one that produces the boundary value.
    fn producer(&self, instance: usize, name: &str) -> Result<usize, ScriptError> {
        self.wiring.producer(instance, name).ok_or_else(|| {
            ScriptError::Schedule(format!(
                "`{}` reads `{name}`, which no earlier instance produces",
                self.world.model.instances()[instance].name
            ))
        })
    }
}

/// A value that an instance produces for a micro-batch, in a run that is done only once.
fn value(instance: usize, port: &Arc<str>, microbatch: usize) -> BufferKey {
    BufferKey::Value(Value { instance, port: port.clone(), microbatch, again: false })
}

/// The boundary value that a cotangent's port belongs to.
fn boundary_of(port: &Port) -> Result<&str, ScriptError> {
    port.of.as_deref().ok_or_else(|| {
        ScriptError::Schedule(format!(
            "the cotangent `{}` does not name its boundary value",
            port.name
        ))
    })
}
