//! What a rank does in a step, as data.
//!
//! A [`Script`] is a list of [`Action`]s over typed programs and keyed buffers. Each action is
//! issued in order on a [`Lane`] and starts when its lane is free and its inputs are ready:
//! dependencies are the reads and writes of buffers plus explicit edges ([`order`]). The runtime
//! executes a script, the planner ([`memory`]) sizes it, and later the simulator times it and the
//! pictures draw it: they all read this one description and use this one rule.
//!
//! The checker ([`check()`]) types gradient buffers by the contributions they hold, so a script
//! that would lose, double or forget one is refused before it runs. The scripts of all ranks are
//! also checked together, one for each class of ranks that do the same ([`check_classes`]):
//! messages and collectives match, and no rank waits forever.
#![forbid(unsafe_code)]

pub mod action;
mod alike;
pub mod build;
pub mod check;
mod commits;
pub mod compile;
mod cycle;
pub mod edge;
mod error;
mod experts;
mod factored;
mod fit;
mod hash;
mod key;
mod library;
pub mod memory;
mod message;
mod names;
mod optimizer;
pub mod order;
mod over;
mod parked;
pub mod plan;
mod rolling;
mod scaling;
pub mod schedule;
pub mod stage_group;
mod tiers;
pub mod together;
pub mod traffic;
pub mod unit;
mod updates;
mod versions;

pub use phalanx_call::{Block, Lane, Message, Moved, Route, Slot, Slots, Tier, Value};

pub use action::{
    Accumulator, Action, Buffer, BufferId, Category, Contribution, Entry, Kind, ProgramId, Run,
    Script, Source, VersionedBuffer, View, Write,
};
pub use build::{
    AheadPart, Compiled, HeldRange, Inference, Precision, RankOnMesh, RankPlace, ReplicaRanks,
    State, StateScalar, TrainingScript, UnitBuffers, World, ahead_script, average_script,
    eval_script, saving_script, train_script,
};
pub use check::check;
pub use compile::Lowering;
pub use cycle::cycle;
pub use edge::{EdgePiece, edge};
pub use error::ScriptError;
pub use experts::{AnyLayout, ExpertPolicy, ExpertRecord, ReadLayout, Tutel};
pub use factored::StateOf;
pub use key::{BufferKey, Number, Scalar, StateKey, StateKind};
pub use library::{Library, Placed, ProgramHash};
pub use memory::{MemoryPlan, plan, plan_with_state};
pub use names::Names;
pub use optimizer::Optimizer;
pub use order::HappensBefore;
pub use parked::ParkedMove;
pub use plan::{
    Choice, Controller, EveryStep, Outcome, Plan, PlannedScript, Record, ScriptBuilder, ScriptKey,
};
pub use rolling::{RollPart, RollingTurns, RowWindow};
pub use scaling::{LossScaling, ScaleRule};
pub use schedule::{Part, ScheduledRun, accumulate, forward, merge_adjacent};
pub use stage_group::StageGroup;
pub use together::{ActionAt, Class, ClassMember, check_classes, check_together, meetings};
pub use traffic::{RowBytes, TurnRows, traffic, traffic_of_class};
pub use unit::{Member, Unit};
pub use updates::Updates;
