//! Turns actions into calls: every buffer gets its address in an arena.

use std::sync::Arc;

use phalanx_engine::{Engine, EngineError, KernelCall, Span, Target, Way};
use phalanx_script::{Action, BufferId, Kind, Lane, MemoryPlan, Message, Run, Script, View, Write};

/// The place of a whole buffer.
pub(crate) fn span_of(script: &Script, plan: &MemoryPlan, id: BufferId) -> Span {
    let buffer = &script.buffers[id.0];
    Span { tier: buffer.tier, offset: plan.offsets[id.0], bytes: buffer.bytes }
}

/// A script with its memory plan, and the engine that will run it.
pub(crate) struct Binder<'a, E: Engine> {
    pub(crate) engine: &'a mut E,
    pub(crate) script: &'a Script,
    pub(crate) plan: &'a MemoryPlan,
}

impl<E: Engine> Binder<'_, E> {
    /// The call of an action, if it makes one. What it waits for is set later.
    pub(crate) fn call(
        &mut self,
        index: usize,
        kernels: &[Arc<E::Kernel>],
    ) -> Result<Option<KernelCall<E::Kernel>>, EngineError> {
        let script = self.script;
        let action = &script.actions[index];
        match (&action.kind, action.run()) {
            (_, Some(run)) => {
                let kernel = kernels[run.program.0].clone();
                Ok(Some(self.run(index, run, kernel)))
            }
            (Kind::Send { buffer, messages }, _) => {
                self.message(*buffer, messages, Way::Send, action).map(Some)
            }
            (Kind::Receive { buffer, messages }, _) => {
                self.message(*buffer, messages, Way::Receive, action).map(Some)
            }
            (Kind::Copy { from, into }, _) => {
                self.copy(*from, *into, action.lane, &action.label).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// A run with every view resolved to a piece of the arena.
    fn run(&self, index: usize, run: &Run, kernel: Arc<E::Kernel>) -> KernelCall<E::Kernel> {
        let entry = &self.script.programs[run.program.0];
        let piece = |view: &View, value| Span {
            tier: self.script.buffers[view.buffer.0].tier,
            offset: self.plan.offsets[view.buffer.0] + view.offset,
            bytes: entry.program().ty(value).local_bytes(entry.program().mesh()),
        };
        let inputs = (entry.program().inputs().iter().zip(&run.inputs))
            .map(|(port, view)| piece(view, port.value))
            .collect();
        let outputs = (entry.program().outputs().iter().zip(&run.outputs))
            .map(|(port, (view, write))| Target {
                span: piece(view, port.value),
                add: *write == Write::Add,
            })
            .collect();
        let offset = self.plan.workspaces[index].unwrap_or(0);
        let workspace = Span::device(offset, entry.slots().extent);
        let lane = self.script.actions[index].lane;
        KernelCall { kernel, inputs, outputs, workspace, lane, after: Vec::new() }
    }

    /// A message: its buffer is the only input or output of a kernel.
    fn message(
        &mut self,
        buffer: BufferId,
        messages: &[Message],
        way: Way,
        action: &Action,
    ) -> Result<KernelCall<E::Kernel>, EngineError> {
        let kernel = Arc::new(self.engine.connect(messages, way, &action.label)?);
        let span = span_of(self.script, self.plan, buffer);
        let (inputs, outputs) = match way {
            Way::Send => (vec![span], vec![]),
            Way::Receive => (vec![], vec![Target { span, add: false }]),
        };
        let (workspace, lane) = (Span::default(), action.lane);
        Ok(KernelCall { kernel, inputs, outputs, workspace, lane, after: Vec::new() })
    }

    fn copy(
        &mut self,
        from: BufferId,
        into: BufferId,
        lane: Lane,
        label: &str,
    ) -> Result<KernelCall<E::Kernel>, EngineError> {
        let [from, span] = [from, into].map(|id| span_of(self.script, self.plan, id));
        let kernel = Arc::new(self.engine.copy(from.tier, span.tier, span.bytes, label)?);
        let outputs = vec![Target { span, add: false }];
        let workspace = Span::default();
        Ok(KernelCall { kernel, inputs: vec![from], outputs, workspace, lane, after: Vec::new() })
    }
}
