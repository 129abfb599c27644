//! One rank of a session: its scripts, and the engine that runs them.

mod block;
mod counted;
mod expected;
mod kept;
mod load;
mod results;
mod room;
mod step;
mod validated;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use phalanx_engine::{Counters, Engine};
use phalanx_ir::Mesh;
use phalanx_runtime::{Executor, Observed, ScriptId};
use phalanx_script::{
    BufferKey, Controller, MemoryPlan, Number, Outcome, ReadLayout, Record, Script, ScriptKey,
    State, StateKind,
};

use self::kept::Kept;
use self::load::LoadCounter;
use self::room::Ladder;
use super::command::{
    BatchSource, Command, Exposed, Given, Reply, StatePiece, StateRange, StepReply,
};
use super::feed::{Feed, Scalars, StepData};
use super::forward::{read_scalar, shown};
use super::lowered::Lowered;
use super::planner::Planner;
use super::pulse::Pulse;
use super::replicas::BatchShare;
use super::restore::{NewRun, StateSource};
use super::save::{SaveTargets, Saves};
use super::store::{ReadParam, Store};
use super::{Models, Settings, StepResult};
use phalanx_error::{Error, Problem, Result};

/// One rank of a model in training: it executes commands and gives answers. It may also be the only
/// rank.
pub struct RankWorker<E: Engine> {
    executor: Executor<E>,
    settings: Settings,
    state: State,
    store: Store,
    scripts: BTreeMap<ScriptKey, Loaded>,
    /// Which scripts a step runs.
    controller: Arc<dyn Controller>,
    records: Vec<Record>,
    /// Its part of checkpoints, if the session can be saved.
    saves: Option<Saves>,
    /// The mesh of its stage group, and its place there.
    at: (Mesh, usize),
    /// Where it records what it does, if it is watched.
    pulse: Option<Pulse>,
    /// How many tokens of the last step chose which expert.
    load: LoadCounter,
    /// Predictions of the last step that would be lost.
    kept: Kept,
    /// Whether the gradients of the last step of a block were clipped.
    clipped: bool,
    /// How much room steps have for rows of experts.
    ladder: Ladder,
    /// How the steps that it was asked for read experts.
    reads: ReadLayout,
    /// The script of the last step.
    last: ScriptKey,
}

/// The controller sees at least this many of the latest steps.
const RECORDS: usize = 1 << 10;

/// A script that the executor has, and what fills its inputs.
struct Loaded {
    id: ScriptId,
    feed: Feed,
    /// How many times it was run.
    runs: u64,
}

impl<E: Engine> RankWorker<E> {
    /// The only rank of a session: plans, compiles and loads everything; `read` gives the weights
    /// to start from.
    pub fn alone(
        engine: E,
        models: &Models,
        settings: Settings,
        read: &ReadParam<'_>,
    ) -> Result<Self> {
        let lowered = Lowered::for_engine(models, settings, engine.requirements())?;
        let mut worker = Self::load(engine, &Planner::new(&lowered)?, 0)?;
        worker.start(read)?;
        Ok(worker)
    }

    /// One rank of several: plans, compiles and loads what it does. It allocates no memory yet.
    pub fn load(engine: E, planner: &Planner<'_>, rank: usize) -> Result<Self> {
        let lowered = planner.lowered;
        let plan = planner.plan(rank)?;
        let ranks = lowered.at(rank);
        let share = match lowered.replicas() {
            1 => lowered.settings.share,
            of => BatchShare { index: lowered.replica(rank), of },
        };
        let mut executor = Executor::new(engine);
        let mut scripts = BTreeMap::new();
        for (key, planned) in plan.scripts() {
            let id = executor.load(planned.clone())?;
            let parts = (lowered.microbatches(key), share);
            let feed = Feed::new(&executor, id, planner.model(key), ranks, parts)?;
            scripts.insert(key, Loaded { id, feed, runs: 0 });
        }
        let state = plan.state().clone();
        let types = lowered.param_types(rank);
        let split = lowered.settings.precision.split;
        let store =
            Store::new(&lowered.model, types, &state, ranks, (lowered.replica(rank), split));
        let settings = lowered.settings.clone();
        let controller = settings.controller.clone();
        let records = Vec::with_capacity(2 * RECORDS);
        let saves = settings.saves && lowered.trains;
        let saves = saves.then(|| Saves::new(planner, rank, &state, plan.scripts())).transpose()?;
        let at = (ranks.mesh.clone(), ranks.rank);
        let ids = scripts.values().map(|loaded| loaded.id);
        let pulse = Pulse::start(&mut executor, ids, (rank, lowered.ranks()))?;
        Ok(Self {
            executor,
            settings,
            state,
            store,
            scripts,
            controller,
            records,
            saves,
            at,
            pulse,
            load: LoadCounter::default(),
            kept: Kept::default(),
            clipped: false,
            ladder: Ladder::default(),
            reads: ReadLayout::Own,
            last: ScriptKey::Train,
        })
    }

    /// Allocates memory and initialises all state: this rank's part of the weights from `read`, and
    /// zeros elsewhere.
    pub fn start(&mut self, read: &ReadParam<'_>) -> Result<()> {
        self.start_from(&NewRun(read), 0)
    }

    /// The same with this rank's part of what `source` has. So many steps were already taken.
    pub fn start_from(&mut self, source: &dyn StateSource, steps: u64) -> Result<()> {
        self.reserve(steps)?;
        let script = self.any();
        self.store.start(&mut self.executor, script, &self.state, source)?;
        self.pulse.iter().for_each(|pulse| pulse.ready(steps));
        Ok(())
    }

    /// Allocates memory; so many steps were already taken.
    fn reserve(&mut self, steps: u64) -> Result<()> {
        self.executor.reserve()?;
        if steps > 0 {
            self.records.push(Record { step: steps, outcome: Outcome::Applied });
        }
        Ok(())
    }

    /// Saves this rank's part of the state: now, or beside the next step.
    fn save(&mut self, to: SaveTargets<'_>, now: bool) -> Result<()> {
        // Beside steps with a larger bound, or another way to read experts, nothing is saved: that would be one more script for each of them.
        let chooses = self.settings.parallel.experts.is_some();
        let now = now || chooses || self.ladder.bound > 0;
        let key = if now { ScriptKey::Save } else { ScriptKey::SaveAndTrain };
        let script = self.scripts.get(&key).ok_or_else(|| without(key))?.id;
        let saves = self.saves.as_mut().ok_or_else(|| without(key))?;
        let file = saves.open(to, key)?;
        self.executor.engine_mut().mount(Some(file))?;
        if now {
            self.pulse.iter().for_each(|pulse| pulse.look(script));
            self.executor.run(script)?;
            self.end_save()?;
        }
        Ok(())
    }

    /// The copies have ended.
    fn end_save(&mut self) -> Result<()> {
        self.executor.engine_mut().mount(None)?;
        self.saves.iter_mut().for_each(Saves::finish);
        Ok(())
    }

    /// Runs steps and gives their results. Ends early at the first step that is not applied.
    pub fn steps(
        &mut self,
        from: u64,
        count: u64,
        batches: &dyn BatchSource,
        trace: Option<(u64, Instant)>,
    ) -> Result<Vec<StepReply>> {
        let mut taken = Vec::with_capacity(count as usize);
        while (taken.len() as u64) < count {
            let step = from + taken.len() as u64;
            let together = self.takes_together(step..from + count, trace.map(|(traced, _)| traced));
            if together > 0 {
                taken.extend(self.together(step..step + together, batches)?);
                continue;
            }
            let origin = trace.filter(|(traced, _)| *traced == step).map(|(_, origin)| origin);
            batches.with(step, &mut |data, lr| {
                taken.push(self.step_at(step, data, lr, origin, batches)?);
                Ok(())
            })?;
            if taken.last().is_none_or(|last| last.outcome != Outcome::Applied) {
                break;
            }
        }
        Ok(taken)
    }

    /// Takes the next optimizer step with this learning rate.
    pub fn step(&mut self, data: &StepData<'_>, lr: f64) -> Result<StepResult> {
        let only = Given { data, lr, next: None };
        Ok(self.step_at(self.steps_taken() + 1, data, lr, None, &only)?.result)
    }

    fn record(&mut self, step: u64, outcome: Outcome) {
        // Controllers look at the latest records only; and a step after warm-up must not allocate.
        if self.records.len() == 2 * RECORDS {
            self.records.drain(..RECORDS);
        }
        self.records.push(Record { step, outcome });
    }

    /// Fills the inputs of a script that is about to be run.
    fn fill(&mut self, key: ScriptKey, data: &StepData<'_>, scalars: Scalars) -> Result<ScriptId> {
        let loaded = self.scripts.get_mut(&key).ok_or_else(|| without(key))?;
        loaded.feed.write(&mut self.executor, data, scalars)?;
        loaded.runs += 1;
        Ok(loaded.id)
    }

    /// The mean loss of a batch with the current weights, which do not change.
    pub fn evaluate(&mut self, data: &StepData<'_>) -> Result<f64> {
        let id = self.forward(ScriptKey::Evaluate, data)?;
        let script = self.executor.script(id);
        let loss = script.find(&BufferKey::Number(Number::Loss));
        let loss = loss.expect("a script that runs forward sums losses");
        let bytes = script.buffers[loss.0].bytes;
        read_scalar(&mut self.executor, id, Number::Loss, bytes)
    }

    /// Runs a script that changes no state.
    fn forward(&mut self, key: ScriptKey, data: &StepData<'_>) -> Result<ScriptId> {
        let scalars = Scalars { lr: 0.0, step: self.steps_taken(), seed: self.settings.seed };
        let id = self.fill(key, data, scalars)?;
        self.pulse.iter().for_each(|pulse| pulse.look(id));
        self.executor.run(id)?;
        Ok(id)
    }

    /// What this rank holds of a value that the last run of a script exposes.
    fn shown(
        &mut self,
        key: ScriptKey,
        (port, instance, microbatch): (&str, Option<usize>, usize),
    ) -> Result<Option<Exposed>> {
        if let Some(kept) = self.kept.of(key, port, microbatch) {
            return Ok(kept);
        }
        let key = if key == ScriptKey::Train { self.last } else { key };
        let script = self.scripts.get(&key).ok_or_else(|| without(key))?.id;
        let (mesh, rank) = &self.at;
        shown(&mut self.executor, script, (mesh, *rank), (port, instance, microbatch))
    }

    /// Steps taken so far.
    pub fn steps_taken(&self) -> u64 {
        self.records.last().map_or(0, |record| record.step)
    }

    /// What this rank holds of some values of a state.
    pub fn read(&mut self, range: &StateRange) -> Result<Vec<StatePiece>> {
        let script = self.any();
        self.store.read(&mut self.executor, script, &self.state, range)
    }

    /// All that this rank holds of one kind of state, by parameter.
    pub fn pieces(&mut self, kind: StateKind) -> Result<Vec<(usize, StatePiece)>> {
        let mut all = Vec::new();
        for param in 0..self.store.params().len() {
            let elements = 0..self.store.params()[param].elements();
            let pieces = self.read(&StateRange { param, kind, elements })?;
            all.extend(pieces.into_iter().map(|piece| (param, piece)));
        }
        Ok(all)
    }

    /// Stores this rank's part of new values of a state.
    pub fn write(&mut self, range: &StateRange, bytes: &[u8]) -> Result<()> {
        let script = self.any();
        self.store.write(&mut self.executor, script, &self.state, range, bytes)
    }

    /// The script of a step.
    pub fn script(&self) -> &Script {
        let train = self.scripts.get(&ScriptKey::Train).expect("a session trains");
        self.executor.script(train.id)
    }

    /// Where the script's buffers lie, and what they cost.
    pub fn memory(&self) -> &MemoryPlan {
        let train = self.scripts.get(&ScriptKey::Train).expect("a session trains");
        self.executor.plan(train.id)
    }

    /// Bytes of the arena, which all scripts share.
    pub fn arena(&self) -> usize {
        self.executor.arena()
    }

    /// Runs a step twice, on the batch of the last step, and observes which bytes it writes.
    /// Weights and state are restored afterwards.
    pub fn observe(&mut self) -> Result<Observed> {
        let train = self.train()?;
        Ok(self.executor.observe(train)?)
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        self.executor.engine()
    }

    /// The engine, to ask what it counts.
    pub fn engine_mut(&mut self) -> &mut E {
        self.executor.engine_mut()
    }

    /// Any script: state lies at the same place in all of them.
    fn any(&self) -> ScriptId {
        self.scripts.values().next().expect("a rank has a script").id
    }

    /// The script of the last step.
    fn train(&self) -> Result<ScriptId> {
        let train = self.scripts.get(&self.last);
        train.map(|loaded| loaded.id).ok_or_else(|| without(self.last))
    }
}

impl<E: Engine + Counters> RankWorker<E> {
    /// Executes a command.
    pub fn answer(&mut self, command: Command<'_>) -> Result<Reply> {
        Ok(match command {
            Command::Start(source, steps) => {
                self.start_from(source, steps)?;
                Reply::Done
            }
            Command::TakeOver(steps) => {
                self.reserve(steps)?;
                self.pulse.iter().for_each(|pulse| pulse.ready(steps));
                Reply::Done
            }
            Command::Save { to, now } => {
                self.save(to, now)?;
                Reply::Done
            }
            Command::Saved => {
                let finished = self.saves.as_mut().map(Saves::finished).transpose()?;
                Reply::Saved(finished.unwrap_or_default())
            }
            Command::Steps { from, count, experts, batches, trace } => {
                self.reads = experts;
                Reply::Steps(self.steps(from, count, batches, trace)?)
            }
            Command::Evaluate(data) => Reply::Loss(self.evaluate(data)?),
            Command::Predict(data) => {
                self.forward(ScriptKey::Predict, data)?;
                Reply::Done
            }
            Command::Show { key, port, instance, microbatch } => {
                Reply::Shown(self.shown(key, (port, instance, microbatch))?)
            }
            Command::ExpertLoad => Reply::Pieces(self.load.pieces()),
            Command::Read(range) => Reply::Pieces(self.read(range)?),
            Command::Scalars => Reply::Scalars(self.scalars()?),
            Command::Write(range, bytes) => {
                self.write(range, bytes)?;
                Reply::Done
            }
            Command::Observe => Reply::Observed(Box::new((self.last_bound(), self.observe()?))),
            Command::Measure => Reply::Measured(Box::new(self.measure())),
        })
    }
}

fn without(key: ScriptKey) -> Error {
    let message = match key {
        ScriptKey::Evaluate => "the session was made without a model to evaluate".to_owned(),
        ScriptKey::Save | ScriptKey::SaveAndTrain => {
            "the session was made without saving".to_owned()
        }
        ScriptKey::Predict => "the session was made without a model that predicts".to_owned(),
        other => format!("the session has no script {other:?}"),
    };
    Error::refused(Problem::new(message))
}
