//! What a layout is compared with: the same training on one rank; or, for replicas that train by
//! themselves, one rank for each and a host that takes the mean, by the equations of their papers.

use phalanx_config::DeviceKind;
use phalanx_error::Result;
use phalanx_models::hf::WeightTensor;
use phalanx_script::{EveryStep, StateKind, Updates};
use phalanx_session::network::Network;
use phalanx_session::{
    BatchShare, MemoryLimit, Models, Prepared, Replicas, Session, Settings, StateRange, StepData,
    StepResult,
};

/// Training on one rank for each replica.
pub(crate) struct Alone {
    sessions: Vec<Session>,
    replicas: Option<Replicas>,
    /// The states of the optimizer.
    states: usize,
    /// When weights are updated, if not once at the end of a step.
    updates: Option<Updates>,
}

impl Alone {
    /// The same training as these settings', without their layout.
    pub(crate) fn new(network: &Network, models: &Models, settings: &Settings) -> Result<Self> {
        let of = settings.parallel.replica_count();
        let parallel = settings.on_one_rank(&models.train)?;
        let updates = parallel.pipeline.delayed.clone();
        let start = |index: usize| {
            let alone = Settings {
                parallel: parallel.clone(),
                // A memory limit for each of many ranks does not apply to one rank that holds
                // everything.
                memory_limit: MemoryLimit::of_machine(),
                // Whatever the ranks compute on, they are compared with one that computes on the
                // cores.
                device: DeviceKind::Cpu,
                controller: std::sync::Arc::new(EveryStep),
                share: BatchShare { index, of },
                ..settings.clone()
            };
            Prepared::new(models, alone)?.start(&*network.start())
        };
        let sessions = (0..of).map(start).collect::<Result<_>>()?;
        let (replicas, states) = (settings.parallel.replicas, settings.optimizer.states());
        Ok(Self { sessions, replicas, states, updates })
    }

    /// Whether a step has several updates.
    pub(crate) fn updates_within_steps(&self) -> bool {
        self.updates.as_ref().is_some_and(|updates| updates.per_step() > 1)
    }

    /// In words.
    pub(crate) fn describe(&self, device: DeviceKind) -> &'static str {
        match (self.replicas, device) {
            _ if self.updates.is_some() => "one rank that updates by the same delayed equations",
            (None, DeviceKind::Cpu) => "one rank, same micro-batches",
            (None, DeviceKind::Cuda) => "one rank on the CPU, same micro-batches",
            (Some(_), _) => "one rank for each replica, and the mean of them by the same rule",
        }
    }

    /// Takes a step, and gives the mean of the replicas' results.
    pub(crate) fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        let step = self.sessions[0].steps() + 1;
        let taken = self.sessions.iter_mut().map(|one| one.step(data, lr));
        let taken: Vec<StepResult> = taken.collect::<Result<_>>()?;
        if self.replicas.is_some_and(|replicas| replicas.averages(step)) {
            self.average()?;
        }
        let mean =
            |of: fn(&StepResult) -> f64| taken.iter().map(of).sum::<f64>() / taken.len() as f64;
        let (loss, grad_norm) = (mean(|one| one.loss), mean(|one| one.grad_norm));
        Ok(StepResult { loss, grad_norm, ..taken[0] })
    }

    /// Gives every replica the mean of all.
    fn average(&mut self) -> Result<()> {
        let states = if self.replicas.is_some_and(|own| own.states) { self.states } else { 0 };
        for param in 0..self.sessions[0].parameters().len() {
            let full = self.sessions[0].full_kind();
            let weights = self.mean(param, full)?;
            for session in &mut self.sessions {
                session.set_param(param, &weights)?;
            }
            for kind in (0..states).map(StateKind::Optimizer) {
                let state = self.mean(param, kind)?;
                let all = 0..state.len();
                for session in &mut self.sessions {
                    let (dtype, _) = session.read(param, kind, 0..all.len().min(1))?;
                    let bytes = state.to_bytes(all.clone(), dtype).unwrap_or_default();
                    session.write(param, kind, all.clone(), &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn mean(&mut self, param: usize, kind: StateKind) -> Result<WeightTensor> {
        let all = self.values(param, kind)?;
        let shape = self.sessions[0].state_shape(param, kind);
        let elements = all.len() / self.sessions.len();
        let count = self.sessions.len() as f64;
        let mean = |i: usize| all.iter().skip(i).step_by(elements).sum::<f64>() / count;
        let bytes: Vec<u8> = (0..elements).flat_map(|i| mean(i).to_ne_bytes()).collect();
        Ok(WeightTensor::from_bytes(shape, phalanx_ir::DType::F64, &bytes))
    }

    /// A state of a parameter in all replicas, one after the other.
    pub(crate) fn values(&mut self, param: usize, kind: StateKind) -> Result<Vec<f64>> {
        let mut all = Vec::new();
        for session in &mut self.sessions {
            all.extend(in_replicas(session, param, kind)?);
        }
        Ok(all)
    }

    /// The same, to read what it exposes.
    pub(crate) fn first_mut(&mut self) -> &mut Session {
        &mut self.sessions[0]
    }

    /// The session of the first replica.
    pub(crate) fn first(&self) -> &Session {
        &self.sessions[0]
    }
}

/// A state of a parameter in all replicas of a session, one after the other.
pub(crate) fn in_replicas(
    session: &mut Session,
    param: usize,
    kind: StateKind,
) -> Result<Vec<f64>> {
    let shape = session.state_shape(param, kind);
    let elements = 0..shape.iter().product();
    let replicas = session.read_replicas(&StateRange { param, kind, elements })?;
    let values = replicas
        .into_iter()
        .flat_map(|(dtype, bytes)| WeightTensor::from_bytes(shape.clone(), dtype, &bytes).to_f64());
    Ok(values.collect())
}
