//! What a session asks of its ranks, and what they answer.
//!
//! Ranks are loaded when they are launched ([`Backend::launch`](super::Backend::launch)) and stop
//! when they are dropped; in between they execute commands. Commands are the interface of a process
//! to its own ranks. Every process of a run is the same program and gives its own ranks the same
//! commands, so commands never cross processes. Answers do, where ranks answer differently: so every
//! process has all of them.

use std::ops::Range;
use std::time::Instant;

use phalanx_call::MovedRows;
use phalanx_ir::DType;
use phalanx_runtime::Observed;
use phalanx_script::{Outcome, ReadLayout, ScriptKey, StateKind, TurnRows};

use super::StepResult;
use super::codec::{Code, fields};
use super::feed::{OwnedStep, StepData};
use super::restore::StateSource;
use super::save::{SaveTargets, SavedFiles};
use super::traced::TracedStep;
use phalanx_error::Result;

/// What a rank is asked to do.
#[derive(Clone, Copy)]
pub enum Command<'a> {
    /// Allocates its memory and initialises its state: its part of what the source has, and zeros
    /// elsewhere. So many steps were already taken.
    Start(&'a dyn StateSource, u64),
    /// Takes over the memory of an earlier process of this rank, with the state after so many steps.
    TakeOver(u64),
    /// Saves its part of the state: now, or beside the next step.
    Save {
        /// Where.
        to: SaveTargets<'a>,
        /// Whether it is saved now.
        now: bool,
    },
    /// Waits until what was saved outlives its process.
    Saved,
    /// Runs steps, starting with step `from`, counted from 1. Ends early at the first step that is
    /// not applied.
    Steps {
        /// The first step.
        from: u64,
        /// How many.
        count: u64,
        /// How they read experts.
        experts: ReadLayout,
        /// The batches that they read.
        batches: &'a dyn BatchSource,
        /// The step that is timed, and the time from which its clock counts.
        trace: Option<(u64, Instant)>,
    },
    /// Computes the loss of a batch with the current weights.
    Evaluate(&'a StepData<'a>),
    /// Computes what the model predicts for a batch with the current weights.
    Predict(&'a StepData<'a>),
    /// Reads a value that the last run of a script exposes for a micro-batch, such as its logits.
    Show {
        /// The script.
        key: ScriptKey,
        /// The port of the model.
        port: &'a str,
        /// The instance, if several may expose it.
        instance: Option<usize>,
        /// The micro-batch.
        microbatch: usize,
    },
    /// Reads how many tokens of the last step chose which expert.
    ExpertLoad,
    /// Reads values of a state.
    Read(&'a StateRange),
    /// Reads the numbers that are kept from step to step beside parameters.
    Scalars,
    /// Writes values of a state, in its element type.
    Write(&'a StateRange, &'a [u8]),
    /// Runs the last step twice and observes which bytes it writes.
    Observe,
    /// Reads what it has counted so far.
    Measure,
}

impl Command<'_> {
    /// Whether every process needs the answers of all ranks: where ranks answer alike, or not at
    /// all, its own are enough.
    pub(super) fn is_for_all(&self) -> bool {
        match self {
            Command::Start(..)
            | Command::TakeOver(_)
            | Command::Save { .. }
            | Command::Evaluate(_)
            | Command::Predict(_)
            | Command::Scalars
            | Command::Write(..) => false,
            Command::Steps { trace, .. } => trace.is_some(),
            Command::Show { .. }
            | Command::ExpertLoad
            | Command::Saved
            | Command::Read(_)
            | Command::Observe
            | Command::Measure => true,
        }
    }
}

/// Gives batches to ranks that ask for them.
pub trait BatchSource: Sync {
    /// Gives the data and the learning rate of a step to `run`, once. A rank that runs forwards ahead of a step asks for it
    /// twice.
    fn with(&self, step: u64, run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>) -> Result<()>;

    /// Gives the data and the learning rate of the step after `step` to `run`, if they are known while
    /// `step` runs. They may still change.
    fn with_next(
        &self,
        step: u64,
        run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>,
    ) -> Result<()> {
        let _ = (step, run);
        Ok(())
    }
}

/// One batch for one step.
pub(super) struct Given<'a> {
    pub(super) data: &'a StepData<'a>,
    pub(super) lr: f64,
    /// What the next step will probably get.
    pub(super) next: Option<(&'a OwnedStep, f64)>,
}

impl BatchSource for Given<'_> {
    fn with(
        &self,
        _step: u64,
        run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>,
    ) -> Result<()> {
        run(self.data, self.lr)
    }

    fn with_next(
        &self,
        _step: u64,
        run: &mut dyn FnMut(&StepData<'_>, f64) -> Result<()>,
    ) -> Result<()> {
        self.next.map_or(Ok(()), |(data, lr)| data.with(|data| run(data, lr)))
    }
}

/// Some values of one parameter's state, by their indices in the whole parameter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateRange {
    /// The parameter's index in the model.
    pub param: usize,
    /// Which state of it.
    pub kind: StateKind,
    /// Which values.
    pub elements: Range<usize>,
}

/// Values of a parameter that a rank holds.
#[derive(Clone, PartialEq, Debug)]
pub struct StatePiece {
    /// The index of the first value in the whole parameter.
    pub first: usize,
    /// Their element type.
    pub dtype: DType,
    /// The values, in the parameter's order.
    pub bytes: Vec<u8>,
}

/// What a rank holds of a value that a model exposes.
#[derive(Clone, PartialEq, Debug)]
pub struct Exposed {
    /// The shape of the whole value.
    pub shape: Vec<usize>,
    /// The parts.
    pub pieces: Vec<StatePiece>,
}

/// The answer to a step.
#[derive(Clone, PartialEq, Debug)]
pub struct StepReply {
    /// Its loss and gradient norm.
    pub result: StepResult,
    /// How it ended.
    pub outcome: Outcome,
    /// Its actions with their times, if it was timed.
    pub traced: Option<TracedStep>,
}

/// What a rank has counted since it was created.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Measured {
    /// What it moved, by op and axes.
    pub moved: std::collections::BTreeMap<phalanx_script::Route, phalanx_script::Moved>,
    /// What its scripts predicted that it would move, in all runs so far.
    pub predicted: std::collections::BTreeMap<phalanx_script::Route, phalanx_script::Moved>,
    /// Of these, rows that come from others in each run of the last step's script: as many as a value of the step says,
    /// where the prediction is what there is room for.
    pub rows: Vec<TurnRows>,
    /// Seconds inside matrix products.
    pub product_seconds: f64,
    /// Bytes outside the plan that kernels use while they run.
    pub scratch_bytes: usize,
    /// Processor seconds that its own thread worked, where that is counted.
    pub busy_seconds: Option<f64>,
}

fields! {
    TurnRows { turn, rows }
    MovedRows { route, row_bytes, bound, regions, from_others }
}

/// What a rank answers.
#[derive(Clone, Debug)]
pub enum Reply {
    /// It is done.
    Done,
    /// The steps that were taken.
    Steps(Vec<StepReply>),
    /// A loss.
    Loss(f64),
    /// A value, or the parts of it that the rank holds; none if it holds nothing of it.
    Shown(Option<Exposed>),
    /// The parts of a state that it holds.
    Pieces(Vec<StatePiece>),
    /// Numbers by name.
    Scalars(Vec<(String, f64)>),
    /// The files that it has written.
    Saved(SavedFiles),
    /// Which bytes were written in a step with this bound of the room for rows of experts.
    Observed(Box<(usize, Observed)>),
    /// What was counted.
    Measured(Box<Measured>),
}

/// The panic message for an answer of the wrong kind.
const OTHER: &str = "a rank gave an answer of the wrong kind";

impl Reply {
    pub(super) fn into_steps(self) -> Vec<StepReply> {
        let Reply::Steps(steps) = self else { panic!("{OTHER}: {self:?}") };
        steps
    }

    pub(super) fn into_loss(self) -> f64 {
        let Reply::Loss(loss) = self else { panic!("{OTHER}: {self:?}") };
        loss
    }

    pub(super) fn into_pieces(self) -> Vec<StatePiece> {
        let Reply::Pieces(pieces) = self else { panic!("{OTHER}: {self:?}") };
        pieces
    }

    pub(super) fn into_scalars(self) -> Vec<(String, f64)> {
        let Reply::Scalars(scalars) = self else { panic!("{OTHER}: {self:?}") };
        scalars
    }

    pub(super) fn into_saved(self) -> SavedFiles {
        let Reply::Saved(file) = self else { panic!("{OTHER}: {self:?}") };
        file
    }

    pub(super) fn into_observed(self) -> (usize, Observed) {
        let Reply::Observed(observed) = self else { panic!("{OTHER}: {self:?}") };
        *observed
    }

    pub(super) fn into_measured(self) -> Measured {
        let Reply::Measured(measured) = self else { panic!("{OTHER}: {self:?}") };
        *measured
    }
}

/// The ranks of a session that live in this process. They end when it is dropped.
pub trait LocalRanks: Send {
    /// How many ranks the world has.
    fn world(&self) -> usize;

    /// The ranks that live here, the lowest first.
    fn local(&self) -> &[usize];

    /// Gives every local rank a command; the answers, or the first failure. The answers are those of
    /// all ranks of the world, by rank, if ranks answer differently, and otherwise of local ranks.
    fn ask(&mut self, command: Command<'_>) -> Result<Vec<Reply>>;

    /// What the processes of all ranks give, by rank; nothing if all ranks are in this process. Every
    /// process must call it together.
    fn exchange(&mut self, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>>;
}

/// Rows of a turn, for tests of what answers are written as.
#[cfg(test)]
pub(super) fn some_rows(turn: phalanx_script::ScheduledRun) -> TurnRows {
    let route = phalanx_script::Route { op: "all_to_all", axes: Vec::new() };
    let (regions, from_others) = (vec![2, 4], vec![1, 5]);
    TurnRows { turn, rows: MovedRows { route, row_bytes: 32, bound: 640, regions, from_others } }
}
