//! The executor: it issues the actions of scripts.

use std::sync::Arc;

use phalanx_engine::{Calls, Engine, EngineError, KernelCall, Span};
use phalanx_ir::{Draw, Stored};
use phalanx_script::{
    Action, BufferId, BufferKey, Entry, HappensBefore, MemoryPlan, PlannedScript, Script,
    ScriptError, Source, Tier,
};

use crate::bind::{Binder, span_of};

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
    /// The memory is not reserved yet.
    #[error("the script has no memory yet; reserve it after all scripts are loaded")]
    Unprepared,
    /// A script that was loaded after the memory was reserved, and needs more.
    #[error(
        "the script needs {needed} bytes, but only {reserved} are reserved\n  load it before \
        memory is reserved"
    )]
    Late {
        /// Bytes of its arena.
        needed: usize,
        /// Bytes that are reserved.
        reserved: usize,
    },
    /// The host gave a buffer the wrong number of bytes.
    #[error("buffer `{buffer}` has {expected} bytes, got {found}")]
    Bytes {
        /// The buffer's name.
        buffer: String,
        /// Its bytes.
        expected: usize,
        /// The bytes that were given.
        found: usize,
    },
}

/// Identifies a script of an executor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScriptId(usize);

impl ScriptId {
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

/// One rank's engine with the scripts it can run; they share its arenas, and the state in them.
pub struct Executor<E: Engine> {
    pub(crate) engine: E,
    pub(crate) scripts: Vec<LoadedScript<E>>,
    arenas: [usize; Tier::ALL.len()],
    reserved: bool,
}

pub(crate) struct LoadedScript<E: Engine> {
    pub(crate) planned: Arc<PlannedScript>,
    /// The kernel of each program.
    kernels: Vec<Arc<E::Kernel>>,
    /// The calls, in order of issue.
    pub(crate) calls: Calls<E::Kernel>,
    /// For each call: its action. The end of a live range makes no call.
    pub(crate) actions: Vec<usize>,
    /// The engine's step for these calls, once memory was reserved.
    pub(crate) step: Option<E::Step>,
}

impl<E: Engine> Executor<E> {
    /// An executor with nothing to run yet.
    pub fn new(engine: E) -> Self {
        let arenas = [0; Tier::ALL.len()];
        Self { engine, scripts: Vec::new(), arenas, reserved: false }
    }

    /// Compiles a script. Scripts that were planned on the same state share it. Once memory is
    /// reserved, only scripts that need no more of it can be loaded.
    pub fn load(&mut self, planned: Arc<PlannedScript>) -> Result<ScriptId, RuntimeError> {
        let PlannedScript { script, order, memory: plan } = &*planned;
        let kernels = (script.programs.iter())
            .map(|entry| self.kernel(entry))
            .collect::<Result<Vec<_>, _>>()?;
        let (mut calls, mut actions) = (Vec::new(), Vec::new());
        let mut binder = Binder { engine: &mut self.engine, script, plan };
        for action in 0..script.actions.len() {
            if let Some(call) = binder.call(action, &kernels)? {
                calls.push(call);
                actions.push(action);
            }
        }
        // The planner lets buffers share memory only where this order separates their uses, so
        // waiting in this order is also enough for reused memory.
        wait(&mut calls, &actions, script.actions.len(), order);
        for (most, arena) in self.arenas.iter_mut().zip(plan.arenas) {
            if self.reserved && arena > *most {
                return Err(RuntimeError::Late { needed: arena, reserved: *most });
            }
            *most = (*most).max(arena);
        }
        let calls: Calls<E::Kernel> = calls.into();
        let step = match self.reserved {
            false => None,
            true => Some(self.engine.prepare(calls.clone())?),
        };
        self.scripts.push(LoadedScript { planned, kernels, calls, actions, step });
        Ok(ScriptId(self.scripts.len() - 1))
    }

    /// The kernel of a program; a program of several scripts is compiled once.
    fn kernel(&mut self, entry: &Entry) -> Result<Arc<E::Kernel>, RuntimeError> {
        for loaded in &self.scripts {
            let known = loaded.planned.script.programs.iter().position(|known| known == entry);
            if let Some(at) = known {
                return Ok(loaded.kernels[at].clone());
            }
        }
        Ok(Arc::new(self.engine.compile(entry.program(), entry.slots(), &entry.ranks)?))
    }

    /// Allocates the arenas and hands the engine every step; called once, when all scripts are loaded.
    pub fn reserve(&mut self) -> Result<(), RuntimeError> {
        if self.reserved {
            return Ok(());
        }
        for (tier, bytes) in Tier::ALL.into_iter().zip(self.arenas) {
            if bytes > 0 || tier == Tier::Device {
                self.engine.reserve(tier, bytes)?;
            }
        }
        for loaded in &mut self.scripts {
            loaded.step = Some(self.engine.prepare(loaded.calls.clone())?);
        }
        self.reserved = true;
        Ok(())
    }

    /// Bytes of the arena in the tier `Device`.
    pub fn arena(&self) -> usize {
        self.arenas[Tier::Device.index()]
    }

    /// Bytes of the arena of each tier, in the order of [`Tier::ALL`].
    pub fn arenas(&self) -> [usize; Tier::ALL.len()] {
        self.arenas
    }

    /// A loaded script.
    pub fn script(&self, id: ScriptId) -> &Script {
        &self.scripts[id.0].planned.script
    }

    /// The action of each call of a loaded script, with its number, in order of issue.
    pub fn issued(&self, id: ScriptId) -> impl Iterator<Item = (usize, &Action)> {
        let LoadedScript { planned, actions, .. } = &self.scripts[id.0];
        actions.iter().map(|&action| (action, &planned.script.actions[action]))
    }

    /// A loaded script's memory plan.
    pub fn plan(&self, id: ScriptId) -> &MemoryPlan {
        &self.scripts[id.0].planned.memory
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine, to ask what it counted.
    pub fn engine_mut(&mut self) -> &mut E {
        &mut self.engine
    }

    /// Runs a script once and returns when all its actions have ended.
    pub fn run(&mut self, id: ScriptId) -> Result<(), RuntimeError> {
        self.begin(id)?;
        self.end(id)
    }

    /// Issues a script's actions. Another script may be begun before this one has ended, if no action
    /// of one touches what the other uses, or all that do are on one lane that ends in order.
    pub fn begin(&mut self, id: ScriptId) -> Result<(), RuntimeError> {
        let step = step(&mut self.scripts[id.0])?;
        Ok(self.engine.begin(step)?)
    }

    /// Returns when all actions of a script that was begun have ended.
    pub fn end(&mut self, id: ScriptId) -> Result<(), RuntimeError> {
        let step = step(&mut self.scripts[id.0])?;
        Ok(self.engine.end(step)?)
    }

    /// Fills a buffer from the host.
    pub fn write(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let span = self.span(id, buffer, bytes.len())?;
        Ok(self.engine.upload(span, bytes)?)
    }

    /// Tells the engine what [`Executor::write`] will fill a buffer with after the steps that run now.
    pub fn expect(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let span = self.span(id, buffer, bytes.len())?;
        Ok(self.engine.expect(span, bytes)?)
    }

    /// Fills a buffer with zeros.
    pub fn clear(&mut self, id: ScriptId, buffer: BufferId) -> Result<(), RuntimeError> {
        let PlannedScript { script, memory, .. } = &*self.scripts[id.0].planned;
        let span = span_of(script, memory, buffer);
        Ok(self.engine.clear(span)?)
    }

    /// Reads a buffer to the host.
    pub fn read(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        out: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let span = self.span(id, buffer, out.len())?;
        Ok(self.engine.download(span, out)?)
    }

    /// Fills a part of a buffer from the host, starting at a byte offset.
    pub fn write_at(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        from: usize,
        bytes: &[u8],
    ) -> Result<(), RuntimeError> {
        let span = self.part(id, buffer, from, bytes.len())?;
        Ok(self.engine.upload(span, bytes)?)
    }

    /// Fills a part of a buffer, of so many elements from a byte offset on, with drawn values from that of
    /// `first` on; `false` if the engine does not draw.
    pub fn draw_at(
        &mut self,
        id: ScriptId,
        (buffer, from): (BufferId, usize),
        (stored, count): (Stored, usize),
        (draw, first): (Draw, u64),
    ) -> Result<bool, RuntimeError> {
        let span = self.part(id, buffer, from, count * stored.dtype().size())?;
        Ok(self.engine.draw(span, stored, draw, first)?)
    }

    /// Reads a part of a buffer to the host, starting at a byte offset.
    pub fn read_at(
        &mut self,
        id: ScriptId,
        buffer: BufferId,
        from: usize,
        out: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let span = self.part(id, buffer, from, out.len())?;
        Ok(self.engine.download(span, out)?)
    }

    fn part(
        &self,
        id: ScriptId,
        buffer: BufferId,
        from: usize,
        bytes: usize,
    ) -> Result<Span, RuntimeError> {
        let PlannedScript { script, memory, .. } = &*self.scripts[id.0].planned;
        let whole = span_of(script, memory, buffer);
        match from.checked_add(bytes).is_some_and(|end| end <= whole.bytes) {
            true => Ok(Span { offset: whole.offset + from, bytes, ..whole }),
            false => Err(RuntimeError::Bytes {
                buffer: script.name(buffer),
                expected: whole.bytes,
                found: from.saturating_add(bytes),
            }),
        }
    }

    fn span(&self, id: ScriptId, buffer: BufferId, found: usize) -> Result<Span, RuntimeError> {
        let PlannedScript { script, memory, .. } = &*self.scripts[id.0].planned;
        let spec = &script.buffers[buffer.0];
        if spec.bytes != found {
            return Err(RuntimeError::Bytes {
                buffer: script.name(buffer),
                expected: spec.bytes,
                found,
            });
        }
        Ok(span_of(script, memory, buffer))
    }
}

/// The engine's step for a script.
pub(crate) fn step<E: Engine>(loaded: &mut LoadedScript<E>) -> Result<&mut E::Step, RuntimeError> {
    loaded.step.as_mut().ok_or(RuntimeError::Unprepared)
}

/// Sets what each call waits for: instead of an action that makes no call, what that action waits
/// for.
fn wait<K>(calls: &mut [KernelCall<K>], actions: &[usize], count: usize, order: &HappensBefore) {
    // For each action: its call, or the calls that replace it.
    let mut waits: Vec<Result<usize, Vec<usize>>> = Vec::with_capacity(count);
    let mut numbers = actions.iter().enumerate().peekable();
    for action in 0..count {
        let mut own = Vec::new();
        for before in order.direct(action) {
            match &waits[before] {
                Ok(call) => own.push(*call),
                Err(instead) => own.extend_from_slice(instead),
            }
        }
        own.sort_unstable();
        own.dedup();
        waits.push(match numbers.next_if(|(_, of)| **of == action) {
            Some((call, _)) => {
                calls[call].after = own;
                Ok(call)
            }
            None => Err(own),
        });
    }
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
