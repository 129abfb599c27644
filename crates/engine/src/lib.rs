//! The interface between scripts and the machines that run them.
//!
//! An [`Engine`] owns an arena of memory in every tier that it has, compiles programs to kernels
//! over it, and runs the calls of a step in the order that they ask for. It gets a whole step
//! before the step runs for the first time ([`Engine::prepare`]), so that it can prepare it in the
//! best way for its machine; engines that issue calls one by one share [`SequentialStep`]. Code above this
//! trait does not know devices; code below it does not know strategies. [`Late`] wraps any engine
//! and runs calls as late and as out of order as their events allow, to test that scripts name all
//! dependencies.
#![forbid(unsafe_code)]

mod counters;
mod disk;
mod late;
mod place;
mod stamps;
mod step;

use std::sync::Arc;
use std::time::Instant;

use phalanx_call::{Lane, MemoryKind, Message, Requirements, Slots, Tier};
use phalanx_ir::{Draw, Program, Stored};

pub use counters::Counters;
pub use disk::DiskStore;
pub use late::Late;
pub use place::place_in_mesh;
pub use stamps::{CallPart, CallTimes, PartKind, Stamps};
pub use step::{
    Calls, KernelCall, SequentialStep, StepWatch, already_in_flight, in_order, untimed,
};

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
    /// A piece of the arena in the tier `Device`.
    pub const fn device(offset: usize, bytes: usize) -> Self {
        Self { tier: Tier::Device, offset, bytes }
    }

    /// The byte after the last one.
    pub const fn end(&self) -> usize {
        self.offset + self.bytes
    }

    /// Whether two pieces share a byte.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.tier == other.tier && self.offset < other.end() && other.offset < self.end()
    }

    /// Fails unless this piece has this many bytes, for copies by hand.
    pub fn holds(&self, bytes: usize) -> Result<(), EngineError> {
        if self.bytes == bytes {
            return Ok(());
        }
        Err(EngineError::Failed {
            program: "copy by hand".to_owned(),
            why: format!("{bytes} bytes do not fit a piece of {}", self.bytes),
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

/// Whether a rank sends or receives messages.
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
    /// A program that this engine cannot run.
    #[error("the {engine} engine cannot run {op} in program `{program}`: {why}")]
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
    /// The arena could not be allocated.
    #[error("no memory for an arena of {bytes} bytes: {why}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        why: String,
    },
    /// The threads of an engine could not be started.
    #[error("{threads} threads of a rank cannot be started: {why}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The reason.
        why: String,
    },
    /// A copy to the disk that failed.
    #[error("{why}")]
    Disk {
        /// The file, and what happened.
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

/// A block of zeros.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// A machine that runs compiled programs on its own arenas.
pub trait Engine {
    /// A compiled program, or something else that can be called.
    type Kernel: Send + Sync;

    /// A prepared step.
    type Step: Send;

    /// The name in messages.
    fn name(&self) -> &'static str;

    /// The kind of memory that the arena of [`Tier::Device`] is.
    fn memory(&self) -> MemoryKind;

    /// The memory that programs need besides their values, for the placement of slots. It is known
    /// before anything is compiled.
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
    /// buffer. Its event happens when the messages have arrived. Engines of a single rank have no
    /// messages.
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
            why: "it has no other rank to communicate with".to_owned(),
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

    /// Sets what the tier `Disk` is from now on, between steps: what scripts copy there goes to this
    /// store.
    fn mount(&mut self, store: Option<Arc<dyn DiskStore>>) -> Result<(), EngineError> {
        let _ = store;
        Err(EngineError::Unsupported {
            engine: self.name(),
            program: "saving".to_owned(),
            op: format!("the tier `{}`", Tier::Disk),
            why: "it cannot copy to a disk".to_owned(),
        })
    }

    /// Takes the calls of a whole step, once its memory is reserved. The step may run many times.
    fn prepare(&mut self, calls: Calls<Self::Kernel>) -> Result<Self::Step, EngineError>;

    /// Issues a step. On each lane, earlier calls come first; lanes do not wait for each other. So
    /// another step may be begun before the first has ended, if the caller knows that they do not
    /// touch the same memory; the same one may not.
    fn begin(&mut self, step: &mut Self::Step) -> Result<(), EngineError>;

    /// Returns when all calls of a step that was begun have ended.
    fn end(&mut self, step: &mut Self::Step) -> Result<(), EngineError>;

    /// Turns timing on, with times counted from an origin, or off. Calls are issued in the same way
    /// as without timing.
    fn time(&mut self, origin: Option<Instant>);

    /// From now on reports the calls of every step to `watch`, if this engine issues them one by one.
    fn watch(&mut self, watch: Option<Arc<dyn StepWatch>>) {
        let _ = watch;
    }

    /// What calls are reported to.
    fn watcher(&self) -> Option<Arc<dyn StepWatch>> {
        None
    }

    /// When each call of a step happened, in its last run, that was begun and ended while timing was
    /// on.
    fn times(&mut self, step: &mut Self::Step) -> Result<Vec<CallTimes>, EngineError>;

    /// By call, what each call of a step consisted of in the run that [`Engine::times`] tells of; nothing
    /// from engines that do not time parts of calls.
    fn parts(&mut self, step: &mut Self::Step) -> Result<Vec<Vec<CallPart>>, EngineError> {
        let _ = step;
        Ok(Vec::new())
    }

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

    /// Whether an event has happened, as far as is known without waiting. After `false`, only
    /// waiting gives a sure answer.
    fn is_over(&mut self, event: Event) -> Result<bool, EngineError> {
        let _ = event;
        Ok(false)
    }

    /// When a single call happened, that was launched and waited for while timing was on.
    fn happened(&self, event: Event) -> Option<CallTimes>;

    /// Copies bytes into an arena at once; the caller has waited for what uses that place.
    fn upload(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError>;

    /// Tells that these bytes will be uploaded to this place after the steps that run now. An engine
    /// may bring them near meanwhile; nothing else depends on it.
    fn expect(&mut self, into: Span, bytes: &[u8]) -> Result<(), EngineError> {
        let _ = (into, bytes);
        Ok(())
    }

    /// Fills a piece of an arena with zeros; the caller has waited for what uses that place.
    fn clear(&mut self, span: Span) -> Result<(), EngineError> {
        for at in (0..span.bytes).step_by(ZEROS.len()) {
            let bytes = ZEROS.len().min(span.bytes - at);
            let piece = Span { offset: span.offset + at, bytes, ..span };
            self.upload(piece, &ZEROS[..bytes])?;
        }
        Ok(())
    }

    /// Fills a piece of an arena with drawn values, from that of `first` on, with the bits of
    /// [`Draw::at`]; the caller has waited for what uses that place. `false` from engines that do not draw: the
    /// caller uploads the values.
    fn draw(
        &mut self,
        into: Span,
        stored: Stored,
        draw: Draw,
        first: u64,
    ) -> Result<bool, EngineError> {
        let _ = (into, stored, draw, first);
        Ok(false)
    }

    /// Copies bytes out of an arena at once; the caller has waited for what writes that place.
    fn download(&mut self, from: Span, out: &mut [u8]) -> Result<(), EngineError>;

    /// Runs a call alone and reports which bytes of its workspace it wrote: each block is filled
    /// with `pattern` at the start of its live range and read at the end. Returns, for every block
    /// of the slots in order, which bytes no longer hold the pattern, or nothing if the engine has
    /// no workspace in its arena.
    fn launch_observed(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError>;
}
