//! The seam between scripts and the machines that run them.
//!
//! An [`Engine`] owns an arena of memory in every tier that it has, compiles programs to kernels over
//! it, and runs the calls of a step in the order that they ask for. It is handed a whole step before
//! that runs for the first time ([`Engine::prepare`]), so that it may do with it what its machine
//! likes best; those that issue calls one by one share [`Listed`]. Nothing above this trait knows what
//! a device is; nothing below it knows what a strategy is. [`Late`] wraps any engine and runs calls as late and as out of order as
//! their events allow, to prove that what is above asks for enough.
#![forbid(unsafe_code)]

mod counters;
mod late;
mod stamps;
mod step;

use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slots, Tier};
use phalanx_ir::Program;

pub use counters::Counters;
pub use late::Late;
pub use stamps::{Stamps, Times};
pub use step::{Call, Calls, Listed, begun_twice, in_order, untimed};

/// A piece of a tier's arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// The tier.
    pub tier: Tier,
    /// The first byte.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
}

impl Span {
    /// A piece of the arena where programs run.
    pub const fn device(offset: usize, bytes: usize) -> Self {
        Self { tier: Tier::Device, offset, bytes }
    }

    /// The byte behind the last one.
    pub const fn end(&self) -> usize {
        self.offset + self.bytes
    }

    /// Whether two pieces share a byte.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.tier == other.tier && self.offset < other.end() && other.offset < self.end()
    }

    /// Fails unless this many bytes are this piece, for those who copy by hand.
    pub fn holds(&self, bytes: usize) -> Result<(), EngineError> {
        if self.bytes == bytes {
            return Ok(());
        }
        Err(EngineError::Failed {
            program: "copy by hand".to_owned(),
            why: format!("{bytes} bytes are no copy of a piece of {}", self.bytes),
        })
    }
}

/// A result's place, and whether it is added to what is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// Where.
    pub span: Span,
    /// Whether the result is added to what is there.
    pub add: bool,
}

/// What a call works on: a place for every port, and the workspace.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Args<'a> {
    /// For each input of the program.
    pub inputs: &'a [Span],
    /// For each output.
    pub outputs: &'a [Target],
    /// The workspace that the program's slots ask for.
    pub workspace: Span,
}

/// Which end of messages a rank is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Way {
    Send,
    Receive,
}

/// Something that a later call, or the host, can wait for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Event(pub u64);

/// What can go wrong in an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A program that this engine can't run.
    #[error("the {engine} engine can't run {op} in program `{program}`: {why}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// The program.
        program: String,
        /// The op.
        op: String,
        /// The reason, and what would work.
        why: String,
    },
    /// The arena could not be had.
    #[error("no memory for an arena of {bytes} bytes: {why}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        why: String,
    },
    /// A call that failed while it ran.
    #[error("program `{program}`: {why}")]
    Failed {
        /// The program.
        program: String,
        /// What happened.
        why: String,
    },
}

/// A machine that runs compiled programs over arenas of its own.
pub trait Engine {
    /// A compiled program, or another thing that can be called.
    type Kernel: Send + Sync;

    /// A prepared step.
    type Step: Send;

    /// The name in messages.
    fn name(&self) -> &'static str;

    /// The kind of memory that the arena of [`Tier::Device`] is.
    fn memory(&self) -> MemoryKind;

    /// What programs need beside their values, for whoever places them. It is known before anything is
    /// compiled.
    fn requirements(&self) -> Arc<dyn Requirements>;

    /// Compiles a program for the places that the planner chose. `ranks` are the ranks of the program's
    /// mesh, in its order; this engine's is one of them.
    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Self::Kernel, EngineError>;

    /// Makes messages ready to be sent or received, as a kernel with one input or one output: the
    /// buffer. Its event is over when the messages have arrived. Engines of a single rank have none.
    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        let _ = messages;
        Err(EngineError::Unsupported {
            engine: self.name(),
            program: label.to_owned(),
            op: format!("{way:?}"),
            why: "it has no other rank to talk to".to_owned(),
        })
    }

    /// Makes a copy of this many bytes from one tier to another ready, as a kernel with one input and
    /// one output.
    fn copy(
        &mut self,
        from: Tier,
        into: Tier,
        bytes: usize,
        label: &str,
    ) -> Result<Self::Kernel, EngineError>;

    /// Allocates the arena of a tier, zeroed. It is called once for each that is used, after compiling.
    fn reserve(&mut self, tier: Tier, bytes: usize) -> Result<(), EngineError>;

    /// Takes the calls of a whole step, once its memory is there. It may be run many times.
    fn prepare(&mut self, calls: Calls<Self::Kernel>) -> Result<Self::Step, EngineError>;

    /// Issues a step. Whatever was issued before it on a lane comes first there; other lanes do not
    /// wait. So another step may be begun before the first has ended, if the caller knows that they
    /// do not touch the same memory; the same one may not.
    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError>;

    /// Returns when all calls of a step that was begun have ended.
    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError>;

    /// From now on notes when calls are issued, start and end, counted from an origin; or no longer.
    /// Calls are issued as ever.
    fn time(&mut self, origin: Option<Instant>);

    /// When each call of a step happened, in its last run, that was begun and ended while timing was
    /// on.
    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<Times>, EngineError>;

    /// Issues a single call on a lane. It may run at any time after `after` and before it is waited
    /// for.
    fn launch(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError>;

    /// Returns once the event has happened.
    fn wait(&mut self, event: Event) -> Result<(), EngineError>;

    /// Whether an event has happened, as far as can be told without waiting for it. Who is told `false`
    /// finds out by waiting.
    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        let _ = event;
        Ok(false)
    }

    /// When a single call happened, that was launched and waited for while timing was on.
    fn happened(&self, event: Event) -> Option<Times>;

    /// Copies bytes into an arena at once; the caller has waited for what uses that place.
    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError>;

    /// Copies bytes out of an arena at once; the caller has waited for what writes that place.
    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError>;

    /// Runs a call by itself and reports what it wrote of its workspace: each block is filled with
    /// `pattern` at its birth and read at its death. Returns, for every block of the slots in
    /// order, which bytes no longer hold the pattern, or nothing if the engine has no workspace
    /// in its arena.
    fn launch_observed(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError>;
}
