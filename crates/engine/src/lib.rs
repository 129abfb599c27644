//! The seam between scripts and the machines that run them.
//!
//! An [`Engine`] owns one arena of memory, compiles programs to kernels over it, and runs them in
//! the order that events ask for. Nothing above this trait knows what a device is; nothing below it
//! knows what a strategy is. [`Late`] wraps any engine and runs calls as late and as out of order as
//! their events allow, to prove that what is above asks for enough.
#![forbid(unsafe_code)]

mod late;

use phalanx_call::{Lane, Message, Slots};
use phalanx_ir::Program;

pub use late::Late;

/// A piece of the arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// The first byte.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
}

impl Span {
    /// Whether two pieces share a byte.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
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

/// A machine that runs compiled programs over one arena.
pub trait Engine {
    /// A compiled program.
    type Kernel;

    /// The name in messages.
    fn name(&self) -> &'static str;

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

    /// Allocates the arena, zeroed. It is called once, after compiling.
    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError>;

    /// Issues a call on a lane. It may run at any time after `after` and before it is waited for.
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

    /// Copies bytes into the arena at once; the caller has waited for what uses that place.
    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError>;

    /// Copies bytes out of the arena at once; the caller has waited for what writes that place.
    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError>;

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
