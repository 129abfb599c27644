//! The script of a training step, or of several: the schedule's runs, with gathers and reductions where units are
//! shared, the norm, and the updates.

use super::ahead::{Ahead, AheadPart};
use super::bind::{Binder, Places};
use super::collect::Collector;
use super::messages::Messenger;
use super::moves::Mover;
use super::reduce::Reducer;
use super::rounds::Rounds;
use super::versions::VersionPlaces;
use super::{
    Part, ScheduledRun, Script, ScriptError, State, TrainingScript, UnitUpdate, finish, norm,
    rescale,
};

/// The script of one training step.
pub fn train_script(training: &TrainingScript<'_>, state: &State) -> Result<Script, ScriptError> {
    Training::new(training, state, state.script(), None)?.script()
}

/// The same; before it, and beside it, the state is saved.
pub fn saving_script(training: &TrainingScript<'_>, state: &State) -> Result<Script, ScriptError> {
    Training::new(training, state, state.save_script(), None)?.script()
}

/// The script of one of several steps that do not wait for each other's norm.
pub fn ahead_script(
    training: &TrainingScript<'_>,
    state: &State,
    part: AheadPart,
) -> Result<Script, ScriptError> {
    Training::new(training, state, state.script(), Some(part))?.script()
}

/// What puts actions around the turns of a stage group.
struct Training<'a> {
    training: TrainingScript<'a>,
    state: &'a State,
    binder: Binder<'a>,
    versions: VersionPlaces<'a>,
    messenger: Messenger<'a>,
    mover: Mover<'a>,
    collector: Collector<'a>,
    reducer: Reducer<'a>,
    rounds: Rounds<'a>,
    /// Updates whose sums over holders may still be on their way.
    pending: Vec<UnitUpdate>,
    /// Where steps go on before the norm of the step before is known.
    ahead: Option<Ahead<'a>>,
}

impl<'a> Training<'a> {
    /// Begins with the actions of `script`.
    fn new(
        training: &TrainingScript<'a>,
        state: &'a State,
        script: Script,
        part: Option<AheadPart>,
    ) -> Result<Self, ScriptError> {
        let TrainingScript { world, at, precision, .. } = *training;
        let waits = world.updates.is_none() && part.is_none();
        if world.counts_lacking() && !waits {
            let why = "rows of experts have bounds, but updates do not wait for all ranks to say that they had room";
            return Err(ScriptError::Schedule(why.to_owned()));
        }
        let State { units, buffers, .. } = state;
        let commits = part.is_some_and(AheadPart::commits);
        let mut binder = Binder::new(world, at.stage_group, script);
        binder.script.window = world.rolling.map(|rolling| rolling.window);
        binder.weights = Places::new(world.model, units, &state.weights(), precision.weights);
        let versions = VersionPlaces::new(world, at.stage_group, state)?.previewed(commits);
        versions.declare(&mut binder.script);
        let ahead = part.map(|part| Ahead::start(training, state, part, &mut binder.script));
        let ahead = ahead.transpose()?;
        let rounds = Rounds::start(training, &mut binder.script)?;
        let reducer = Reducer::new(training, units, buffers, &mut binder)?;
        binder.script.accumulators.iter_mut().for_each(|own| own.left = commits);
        Ok(Self {
            training: *training,
            state,
            messenger: Messenger::new(world, at.stage_group, binder.script.rank),
            mover: Mover::new(world, at),
            collector: Collector::new(world, at.stage_group, units, precision.weights),
            binder,
            versions,
            reducer,
            rounds,
            pending: Vec::new(),
            ahead,
        })
    }

    fn script(mut self) -> Result<Script, ScriptError> {
        for index in 0..self.training.stage_group().turns.len() {
            self.turn(index)?;
        }
        self.messenger.after_last(&mut self.binder);
        self.mover.finish(&mut self.binder)?;
        match self.training.world.updates.is_some() {
            true => {
                let mut script = self.binder.script;
                self.rounds.finish(&mut script)?;
                self.messenger.finish(&mut script);
                Ok(script)
            }
            false => self.one_update(),
        }
    }

    /// One turn, with what comes before and after it.
    fn turn(&mut self, index: usize) -> Result<(), ScriptError> {
        let turn = self.training.stage_group().turns[index];
        let due = self.due(turn);
        self.update(&due)?;
        let Self { training, binder, versions, .. } = self;
        if let Some(ahead) = &mut self.ahead {
            ahead.before(turn, &mut binder.script, versions)?;
        }
        self.mover.before(index, binder)?;
        self.messenger.before(index, binder)?;
        versions.bind(turn, binder, training.precision.weights);
        self.collector.before(index, versions, binder)?;
        self.reducer.before(turn, binder)?;
        binder.turn(turn)?;
        self.messenger.after(index, binder)?;
        self.collector.after(index, binder);
        self.reducer.after(index, binder)?;
        self.rounds.ends(index).map_or(Ok(()), |round| self.end_round(round))
    }

    /// The end of a round: its sums, and the updates that it completes. Those of holders that take turns are put off
    /// until a turn needs them, because the others are not as far; after the last round of a step all are made.
    fn end_round(&mut self, round: usize) -> Result<(), ScriptError> {
        self.pending.extend(self.rounds.complete(round, &self.versions));
        let all = self.rounds.ends_step(round);
        let in_turn = |own: &UnitUpdate| {
            let shared = self.state.units[own.unit].stage_groups.len() > 1;
            shared && self.versions.timing(own.unit).holders > 1
        };
        let now: Vec<UnitUpdate> =
            self.pending.iter().copied().filter(|own| all || !in_turn(own)).collect();
        self.reducer.end_updates(&now, &mut self.binder)?;
        self.rounds.end(&mut self.binder.script, self.state, round)?;
        self.update(&now)
    }

    /// The updates that were put off and that a turn needs: it reads the version that they make, or contributes to the
    /// next update.
    fn due(&self, turn: ScheduledRun) -> Vec<UnitUpdate> {
        let params = &self.training.world.model.instances()[turn.instance].params;
        let reads = |unit: usize| {
            let members = &self.state.units[unit].members;
            members.iter().any(|member| params.values().any(|param| *param == member.param))
        };
        let backward = !matches!(turn.part, Part::F | Part::R);
        let due = |own: &&UnitUpdate| {
            reads(own.unit) && (backward || !self.versions.exists(own.unit, turn))
        };
        self.pending.iter().filter(due).copied().collect()
    }

    /// Makes these updates.
    fn update(&mut self, these: &[UnitUpdate]) -> Result<(), ScriptError> {
        let Self { training, state, binder, versions, reducer, rounds, pending, .. } = self;
        reducer.end_updates(these, binder)?;
        pending.retain(|own| !these.contains(own));
        for own in these {
            let holders = versions.timing(own.unit).holders;
            let numbers = rounds.numbers(&mut binder.script, holders)?;
            let of = (*state, own.unit);
            finish::append_of(&mut binder.script, of, training, numbers, versions, None)?;
        }
        Ok(())
    }

    /// The end of a script with one update: the norm, then the update. Or what the next script needs for both.
    fn one_update(mut self) -> Result<Script, ScriptError> {
        let (training, state) = (&self.training, self.state);
        let all: Vec<UnitUpdate> =
            (0..state.units.len()).map(|unit| UnitUpdate { unit, update: 0 }).collect();
        self.reducer.end_updates(&all, &mut self.binder)?;
        let mut script = self.binder.script;
        if let Some(ahead) = self.ahead.as_ref().filter(|ahead| ahead.part.previews()) {
            ahead.preview(&mut script)?;
            self.messenger.finish(&mut script);
            return Ok(script);
        }
        let mut numbers = norm::append(&mut script, state, training)?;
        self.messenger.finish(&mut script);
        numbers.go = numbers.go.or(self.ahead.and_then(|ahead| ahead.valid()));
        if let (Some(scaling), Some(go)) = (training.scaling, numbers.go) {
            let told = (go, numbers.lacks);
            rescale::append(&mut script, &state.scalars, training, scaling, told)?;
        }
        finish::append(&mut script, state, training, numbers, &mut self.versions, None)?;
        Ok(script)
    }
}
