//! Issuing actions.

use std::sync::Arc;

use phalanx_engine::{Args, Engine, EngineError, Event, Span, Target, Way};
use phalanx_script::{
    Action, BufferId, BufferKey, HappensBefore, Kind, Lane, MemoryPlan, Message, Planned, Run,
    Script, ScriptError, Source, View, Write,
};

/// Why a script could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The script is wrong.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The host gave a buffer the wrong number of bytes.
    #[error("buffer `{buffer}` has {expected} bytes, got {found}")]
    Bytes {
        /// The buffer's name.
        buffer: String,
        /// Its bytes.
        expected: usize,
        /// What was given.
        found: usize,
    },
}

/// Which of an executor's scripts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScriptId(usize);

impl ScriptId {
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// One rank's engine with the scripts it can run; they share one arena, and the state in it.
pub struct Executor<E: Engine> {
    pub(crate) engine: E,
    pub(crate) scripts: Vec<LoadedScript<E::Kernel>>,
    arena: usize,
    reserved: bool,
    /// Reused from step to step, so that running allocates nothing.
    events: Vec<Option<Event>>,
    after: Vec<Event>,
}

pub(crate) struct LoadedScript<K> {
    pub(crate) planned: Arc<Planned>,
    pub(crate) kernels: Vec<K>,
    /// By action; what does nothing at run time has no call.
    pub(crate) calls: Vec<Option<Call>>,
    /// What each call waits for.
    pub(crate) after: Vec<Vec<usize>>,
}

/// An action with every place resolved.
pub(crate) struct Call {
    pub(crate) kernel: usize,
    pub(crate) lane: Lane,
    /// Which end, of a message.
    pub(crate) message: Option<Way>,
    pub(crate) inputs: Vec<Span>,
    pub(crate) outputs: Vec<Target>,
    pub(crate) workspace: Span,
}

impl<E: Engine> Executor<E> {
    /// An executor with nothing to run yet.
    pub fn new(engine: E) -> Self {
        Self {
            engine,
            scripts: Vec::new(),
            arena: 0,
            reserved: false,
            events: Vec::new(),
            after: Vec::new(),
        }
    }

    /// Compiles a script. Scripts that were planned on the same state find it where it is.
    pub fn load(&mut self, planned: Arc<Planned>) -> Result<ScriptId, RuntimeError> {
        let Planned { script, order, memory: plan } = &*planned;
        let mut kernels = (script.programs.iter())
            .map(|entry| self.engine.compile(entry.program(), entry.slots(), &entry.ranks))
            .collect::<Result<Vec<_>, _>>()?;
        let mut calls = Vec::with_capacity(script.actions.len());
        for (index, action) in script.actions.iter().enumerate() {
            let call = match (action.run(), message(action)) {
                (Some(run), _) => Some(run_call(script, plan, index, run)),
                (None, Some((way, buffer, messages))) => {
                    kernels.push(self.engine.connect(messages, way, &action.label)?);
                    Some(message_call(script, plan, buffer, way, kernels.len() - 1))
                }
                // The end of a life is known to the plan, and nothing is done for it.
                (None, None) => None,
            };
            calls.push(call);
        }
        // The planner lets buffers share memory only where this order keeps their uses apart, so
        // waiting by it is enough for memory that is used again, too.
        let after = waits(&calls, order);
        self.arena = self.arena.max(plan.arena);
        self.events.reserve(script.actions.len());
        self.after.reserve(script.actions.len());
        self.scripts.push(LoadedScript { planned, kernels, calls, after });
        Ok(ScriptId(self.scripts.len() - 1))
    }

    /// Allocates the arena; called once, when all scripts are loaded.
    pub fn reserve(&mut self) -> Result<(), RuntimeError> {
        if !std::mem::replace(&mut self.reserved, true) {
            self.engine.reserve(self.arena)?;
        }
        Ok(())
    }

    /// Bytes of the arena.
    pub fn arena(&self) -> usize {
        self.arena
    }

    /// A loaded script.
    pub fn script(&self, id: ScriptId) -> &Script {
        &self.scripts[id.0].planned.script
    }

    /// A loaded script's memory plan.
    pub fn plan(&self, id: ScriptId) -> &MemoryPlan {
        &self.scripts[id.0].planned.memory
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine, to ask its communicator.
    pub fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    /// Runs a script once and returns when all its actions have ended.
    pub fn run(&mut self, id: ScriptId) -> Result<(), RuntimeError> {
        let loaded = &self.scripts[id.0];
        self.events.clear();
        for (call, after) in loaded.calls.iter().zip(&loaded.after) {
            let Some(call) = call else {
                self.events.push(None);
                continue;
            };
            self.after.clear();
            self.after.extend(after.iter().filter_map(|&b| self.events[b]));
            let Call { inputs, outputs, workspace, .. } = call;
            let args = Args { inputs, outputs, workspace: *workspace };
            let kernel = &loaded.kernels[call.kernel];
            self.events.push(Some(self.engine.launch(kernel, &args, call.lane, &self.after)?));
        }
        for &event in self.events.iter().flatten() {
            self.engine.wait(event)?;
        }
        Ok(())
    }

    /// Fills a buffer from the host.
    pub fn write(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let span = self.span(id, buffer, bytes.len())?;
        Ok(self.engine.upload(span.offset, bytes)?)
    }

    /// Reads a buffer to the host.
    pub fn read(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        out: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let span = self.span(id, buffer, out.len())?;
        Ok(self.engine.download(span.offset, out)?)
    }

    fn span(&self, id: ScriptId, buffer: BufferId, found: usize) -> Result<Span, RuntimeError> {
        let Planned { script, memory, .. } = &*self.scripts[id.0].planned;
        let spec = &script.buffers[buffer.0];
        if spec.bytes != found {
            return Err(RuntimeError::Bytes {
                buffer: script.name(buffer),
                expected: spec.bytes,
                found,
            });
        }
        Ok(Span { offset: memory.offsets[buffer.0], bytes: spec.bytes })
    }
}

/// A run with every view resolved to a piece of the arena.
fn run_call(script: &Script, plan: &MemoryPlan, index: usize, run: &Run) -> Call {
    let entry = &script.programs[run.program.0];
    let program = entry.program();
    let bytes = |value| program.ty(value).local_bytes(program.mesh());
    let at = |view: &View| plan.offsets[view.buffer.0] + view.offset;
    let inputs = (program.inputs().iter().zip(&run.inputs))
        .map(|(port, view)| Span { offset: at(view), bytes: bytes(port.value) })
        .collect();
    let outputs = (program.outputs().iter().zip(&run.outputs))
        .map(|(port, (view, write))| Target {
            span: Span { offset: at(view), bytes: bytes(port.value) },
            add: *write == Write::Add,
        })
        .collect();
    let offset = plan.workspaces[index].unwrap_or(0);
    let workspace = Span { offset, bytes: entry.slots().extent };
    let (kernel, lane) = (run.program.0, script.actions[index].lane);
    Call { kernel, lane, message: None, inputs, outputs, workspace }
}

/// What an action sends or receives, if it does.
fn message(action: &Action) -> Option<(Way, BufferId, &[Message])> {
    match &action.kind {
        Kind::Send { buffer, messages } => Some((Way::Send, *buffer, messages)),
        Kind::Receive { buffer, messages } => Some((Way::Receive, *buffer, messages)),
        _ => None,
    }
}

/// A message whose buffer is a kernel's one input or output.
fn message_call(
    script: &Script,
    plan: &MemoryPlan,
    buffer: BufferId,
    way: Way,
    kernel: usize,
) -> Call {
    let span = Span { offset: plan.offsets[buffer.0], bytes: script.buffers[buffer.0].bytes };
    let (inputs, outputs, lane) = match way {
        Way::Send => (vec![span], vec![], Lane::Send),
        Way::Receive => (vec![], vec![Target { span, add: false }], Lane::Receive),
    };
    Call { kernel, lane, message: Some(way), inputs, outputs, workspace: Span::default() }
}

/// What each call waits for: where the order names an action that makes no call, what that one
/// waits for instead.
fn waits(calls: &[Option<Call>], order: &HappensBefore) -> Vec<Vec<usize>> {
    let mut waits: Vec<Vec<usize>> = Vec::with_capacity(calls.len());
    for action in 0..calls.len() {
        let mut own = Vec::new();
        for before in order.direct(action) {
            match calls[before] {
                Some(_) => own.push(before),
                None => own.extend_from_slice(&waits[before]),
            }
        }
        own.sort_unstable();
        own.dedup();
        waits.push(own);
    }
    waits
}

/// Buffers that the host fills before each run.
impl<E: Engine> Executor<E> {
    /// The script's buffers that the host must fill.
    pub fn host_inputs(&self, id: ScriptId) -> impl Iterator<Item = (BufferId, &BufferKey)> {
        let script = &self.scripts[id.0].planned.script;
        (script.buffers.iter().enumerate())
            .filter(|(_, b)| b.source == Source::Host)
            .map(|(i, b)| (BufferId(i), &b.key))
    }
}
