//! A measured step: what every rank did, and when.

use std::ops::Range;
use std::sync::Arc;

use phalanx_engine::CallPart;
use phalanx_pipeline::Schedule;
use phalanx_runtime::TimedAction;
use phalanx_script::{
    Class, ClassMember, Kind, Lane, Message, PlannedScript, RankPlace, ScheduledRun, Script,
    ScriptKey, Value,
};

use super::Lowered;
use phalanx_error::Result;

/// A measured step, on one clock.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The step, counted from 1.
    pub step: u64,
    /// Which stage group runs what, and in which order.
    pub timetable: Timetable,
    /// By rank.
    pub ranks: Vec<Vec<Traced>>,
    /// What ran: one script for each class of ranks that do the same.
    pub scripts: Vec<RankScript>,
}

impl Trace {
    /// The scripts as checker and player take them.
    pub fn classes(&self) -> Vec<Class<'_>> {
        self.scripts.iter().map(RankScript::class).collect()
    }
}

/// The script of the first of several ranks that do the same, each on its part of the data.
#[derive(Clone, Debug)]
pub struct RankScript {
    /// What it does.
    pub planned: Arc<PlannedScript>,
    /// The other ranks.
    pub others: Vec<ClassMember>,
}

impl RankScript {
    /// The ranks as checker and player take them.
    pub fn class(&self) -> Class<'_> {
        let PlannedScript { script, order, .. } = &*self.planned;
        Class { script, order, others: self.others.clone() }
    }
}

/// The actions of a rank in a step.
#[derive(Clone, PartialEq, Debug)]
pub struct TracedStep {
    /// The script that ran.
    pub script: ScriptKey,
    /// Its actions that call something, in the order of issue.
    pub actions: Vec<Traced>,
}

/// The order of a step's work, which does not change from step to step.
#[derive(Clone, Debug)]
pub struct Timetable {
    /// The schedule; without a pipeline, one stage group runs forward and backward of each
    /// micro-batch.
    pub schedule: Schedule,
    /// For each stage of the schedule: the model's instances that it has.
    pub stages: Vec<Range<usize>>,
    /// For each rank: its stage group and its place there.
    pub places: Vec<RankPlace>,
    /// For each rank: its place in words, such as `stage group 1, dp 0, tp 1`.
    pub names: Vec<String>,
}

/// An action and when it happened.
#[derive(Clone, PartialEq, Debug)]
pub struct Traced {
    /// In words, such as `blocks.3 BW mb 0`.
    pub label: String,
    /// Its turn in the schedule, if it is one.
    pub turn: Option<ScheduledRun>,
    /// The ranks that a message goes to or comes from.
    pub peers: Vec<usize>,
    /// What a message carries: the same on both ends.
    pub value: Option<Value>,
    /// Bytes that a message carries, or that a collective leaves on this rank; 0 for all else.
    pub bytes: usize,
    /// When it happened.
    pub times: TimedAction,
    /// The kernels that it consisted of, if the engine times them.
    pub kernels: Vec<CallPart>,
}

impl Timetable {
    /// What a model's ranks do in a step.
    pub fn new(lowered: &Lowered) -> Result<Self> {
        Self::of_steps(lowered, 1)
    }

    /// The same in several steps, where a pipeline does not drain between them.
    pub fn of_steps(lowered: &Lowered, steps: usize) -> Result<Self> {
        let (pipeline, parts) =
            (&lowered.settings.parallel.pipeline, lowered.settings.microbatches);
        let (schedule, stages) =
            pipeline.timetable(&lowered.model, lowered.stage_groups().len(), parts, steps)?;
        let places: Vec<RankPlace> = (0..lowered.ranks()).map(|rank| lowered.place(rank)).collect();
        let name = |(rank, at): (usize, &RankPlace)| {
            let (mesh, place) = (lowered.at(rank).mesh, at.place);
            let stage_group =
                lowered.is_pipeline().then(|| format!("stage group {}", at.stage_group));
            let axes =
                mesh.axes().map(|(axis, _)| format!("{axis} {}", mesh.coordinate(place, axis)));
            let replica =
                (lowered.replicas() > 1).then(|| format!("replica {}", lowered.replica(rank)));
            let parts = replica.into_iter().chain(stage_group).chain(axes);
            parts.collect::<Vec<_>>().join(", ")
        };
        let names = places.iter().enumerate().map(name).collect();
        Ok(Self { schedule, stages, places, names })
    }
}

/// Describes timed actions, and their parts as far as known, by their script.
pub(super) fn describe(
    timed: Vec<TimedAction>,
    parts: Vec<Vec<CallPart>>,
    script: &Script,
) -> Vec<Traced> {
    let mut turns = script.turns.iter().peekable();
    let mut parts = parts.into_iter();
    let describe = |times: TimedAction| {
        let kernels = parts.next().unwrap_or_default();
        let action = &script.actions[times.action];
        let turn = turns.next_if(|(at, _)| *at == times.action).map(|(_, turn)| *turn);
        let left = || action.writes().iter().map(|b| script.buffers[b.0].bytes).sum();
        let messages: Option<&[Message]> = match &action.kind {
            Kind::Send { messages, .. } | Kind::Receive { messages, .. } => Some(messages),
            _ => None,
        };
        let bytes = match (messages, action.lane) {
            (Some(messages), _) => messages.iter().map(Message::bytes).sum(),
            (None, Lane::Compute) => 0,
            (None, _) => left(),
        };
        let messages = messages.unwrap_or_default();
        let peers = messages.iter().map(|message| message.peer).collect();
        let value = messages.first().map(|message| message.value.clone());
        Traced { label: action.label.clone(), turn, peers, value, bytes, times, kernels }
    };
    timed.into_iter().map(describe).collect()
}
