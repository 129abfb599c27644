//! A rank's plan: several scripts over one table of state, and the rule that says which of them a step
//! runs.
//!
//! Training and evaluation are two scripts on the same weights; averaging replicas from time to
//! time, saving, or the first and last steps of a pipeline that never drains are others. State
//! lies at the same place for all of them, and what is carried for all scripts of a row. A script is built when it is first asked for, by one
//! pure builder, and checked before it runs. Which one comes next is decided by a [`Controller`], a
//! pure function of the step's number and of the outcomes of earlier steps.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::action::Script;
use crate::build::{AheadPart, State};
use crate::check::contents;
use crate::error::ScriptError;
use crate::memory::{MemoryPlan, Settled, plan, plan_in_order};
use crate::order::HappensBefore;
use crate::rolling::RollPart;

/// Names one script of a plan.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum ScriptKey {
    /// One optimizer step.
    Train,
    /// One of an endless row of scripts without a flush between them.
    Roll(RollPart),
    /// One of several optimizer steps that do not wait for each other's norm.
    Ahead(AheadPart),
    /// One optimizer step, with more room for the rows of experts than [`ScriptKey::Train`] has: which one of the larger
    /// bounds, counted from 1.
    Roomier(u8),
    /// One optimizer step in which every rank reads the weights of all experts ([`ReadLayout::All`](crate::ReadLayout)).
    Gathered,
    /// One optimizer step, beside which the state from before it is saved.
    SaveAndTrain,
    /// Saves the state.
    Save,
    /// The loss of a batch with the current weights.
    Evaluate,
    /// What the model predicts for a batch with the current weights.
    Predict,
    /// Averages the state of replicas, on all of them.
    Average,
}

impl ScriptKey {
    /// Every key.
    pub const ALL: [ScriptKey; 20] = [
        ScriptKey::Train,
        ScriptKey::Roll(RollPart::First),
        ScriptKey::Roll(RollPart::Middle),
        ScriptKey::Roll(RollPart::Last),
        ScriptKey::Ahead(AheadPart::First),
        ScriptKey::Ahead(AheadPart::Middle),
        ScriptKey::Ahead(AheadPart::Last),
        ScriptKey::Roomier(1),
        ScriptKey::Roomier(2),
        ScriptKey::Roomier(3),
        ScriptKey::Roomier(4),
        ScriptKey::Roomier(5),
        ScriptKey::Roomier(6),
        ScriptKey::Roomier(7),
        ScriptKey::Gathered,
        ScriptKey::SaveAndTrain,
        ScriptKey::Save,
        ScriptKey::Evaluate,
        ScriptKey::Predict,
        ScriptKey::Average,
    ];

    /// How many larger bounds there may be.
    pub const BOUNDS: u8 = 7;

    /// The script that says where this one finds what is carried.
    fn carries_as(self) -> Option<ScriptKey> {
        match self {
            ScriptKey::Roll(RollPart::First | RollPart::Last) => {
                Some(ScriptKey::Roll(RollPart::Middle))
            }
            _ => None,
        }
    }
}

/// A checked script with its order and its memory plan, ready to run.
#[derive(Clone, Debug)]
pub struct PlannedScript {
    /// The script.
    pub script: Script,
    /// The order of its actions.
    pub order: HappensBefore,
    /// Where its buffers lie, and what they cost.
    pub memory: MemoryPlan,
}

impl PlannedScript {
    /// Checks a script and plans its memory; its order is computed once. State stays where `base`
    /// has it.
    pub fn new(script: Script, base: Option<&MemoryPlan>) -> Result<Self, ScriptError> {
        Self::settled(script, Settled { state: base, row: None })
    }

    /// The same for a script of an endless row: what it carries lies where another script of the row has it.
    fn in_row(mut script: Script, base: &MemoryPlan, other: &Self) -> Result<Self, ScriptError> {
        script.carry_as(&other.script)?;
        let row = Some((&other.script, &other.memory));
        Self::settled(script, Settled { state: Some(base), row })
    }

    fn settled(script: Script, settled: Settled<'_>) -> Result<Self, ScriptError> {
        let order = HappensBefore::of(&script)?;
        contents(&script)?;
        let memory = plan_in_order(&script, &order, settled);
        Ok(Self { script, order, memory })
    }

    /// The plan of a script that differs from this one only in its messages and its place in shared
    /// units: order and memory plan are the same.
    pub fn like(&self, script: Script) -> Result<Self, ScriptError> {
        if !self.script.same_except_messages(&script) {
            return Err(ScriptError::Apart {
                rank: script.rank,
                why: format!(
                    "its script differs from that of rank {}, which represents it",
                    self.script.rank
                ),
                help: "plan ranks with different scripts separately".to_owned(),
            });
        }
        Ok(Self { script, order: self.order.clone(), memory: self.memory.clone() })
    }
}

/// The pure builder of a plan's scripts.
pub trait ScriptBuilder {
    /// The script of this key, on this state.
    fn build(&self, key: ScriptKey, state: &State) -> Result<Script, ScriptError>;
}

/// The scripts of one rank, over one table of state.
#[derive(Clone, Debug)]
pub struct Plan {
    state: State,
    /// Where the state lies.
    base: MemoryPlan,
    scripts: BTreeMap<ScriptKey, Arc<PlannedScript>>,
}

impl Plan {
    /// A plan with this state, and no script yet.
    pub fn new(state: State) -> Result<Self, ScriptError> {
        let base = plan(&state.script())?;
        Ok(Self { state, base, scripts: BTreeMap::new() })
    }

    /// The plan of another rank that does the same, with its own state and scripts: order and
    /// memory plans are the same.
    pub fn like(&self, state: State, builder: &dyn ScriptBuilder) -> Result<Self, ScriptError> {
        let mut scripts = BTreeMap::new();
        for (key, planned) in &self.scripts {
            let mut script = builder.build(*key, &state)?;
            if planned.script.window.is_some() {
                script.carry_as(&planned.script)?;
            }
            scripts.insert(*key, Arc::new(planned.like(script)?));
        }
        Ok(Self { state, base: self.base.clone(), scripts })
    }

    /// The state that all scripts share.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Where the state lies, in all scripts.
    pub fn base(&self) -> &MemoryPlan {
        &self.base
    }

    /// A script, built and checked when it is first asked for.
    pub fn script(
        &mut self,
        key: ScriptKey,
        builder: &dyn ScriptBuilder,
    ) -> Result<Arc<PlannedScript>, ScriptError> {
        if let Some(known) = self.scripts.get(&key) {
            return Ok(known.clone());
        }
        let script = builder.build(key, &self.state)?;
        let planned = match key.carries_as() {
            None => PlannedScript::new(script, Some(&self.base))?,
            Some(other) => {
                let other = self.script(other, builder)?;
                PlannedScript::in_row(script, &self.base, &other)?
            }
        };
        let planned = Arc::new(planned);
        self.scripts.insert(key, planned.clone());
        Ok(planned)
    }

    /// The script of a training step.
    ///
    /// # Panics
    /// If it was not built yet.
    pub fn train_script(&self) -> &Script {
        &self.scripts.get(&ScriptKey::Train).expect("the plan trains").script
    }

    /// Takes a script out of the plan, if it was built.
    pub fn take(&mut self, key: ScriptKey) -> Option<PlannedScript> {
        self.scripts.remove(&key).map(Arc::unwrap_or_clone)
    }

    /// The scripts that were built so far.
    pub fn scripts(&self) -> impl Iterator<Item = (ScriptKey, &Arc<PlannedScript>)> {
        self.scripts.iter().map(|(key, planned)| (*key, planned))
    }

    /// Bytes of the arena that all these scripts share.
    pub fn arena(&self) -> usize {
        let arenas = self.scripts.values().map(|planned| planned.memory.arena);
        arenas.fold(self.base.arena, usize::max)
    }
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Its updates are done.
    Applied,
    /// Its gradients were not finite; nothing was updated, and the batch is consumed.
    Skipped,
    /// It must be done again, by this script.
    Repeat(ScriptKey),
}

/// The record of a finished step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The step, counted from 1.
    pub step: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// The scripts of a step, in the order in which they run. A rule with few results need not allocate
/// one for each step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice(pub Cow<'static, [ScriptKey]>);

/// The rule from steps to scripts. It is pure, so every rank decides the same.
pub trait Controller: fmt::Debug + Send + Sync {
    /// The scripts of a step, counted from 1; fixed rules ignore the records of earlier steps.
    fn next(&self, step: u64, records: &[Record]) -> Choice;
}

/// Every step trains, and nothing else happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EveryStep;

impl Controller for EveryStep {
    fn next(&self, _step: u64, _records: &[Record]) -> Choice {
        Choice(Cow::Borrowed(&[ScriptKey::Train]))
    }
}
