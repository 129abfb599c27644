//! Steps that are captured as graphs: the second run of a step is captured, and every later one is issued
//! by one call. The first is not, because libraries prepare themselves in it.

use std::sync::Arc;

use phalanx_engine::{Calls, EngineError, Event, SequentialStep};

use super::compile::What;
use super::{CudaEngine, CudaKernel};
use crate::device::CapturedWork;
use crate::tasks::Task;

/// A step of a GPU.
pub struct CudaStep {
    calls: SequentialStep<CudaKernel>,
    /// Whether all of it can be captured: ranks do not wait for each other in it, nor for a disk.
    is_capturable: bool,
    runs: u64,
    graph: Option<CapturedWork>,
    /// The calls that the graph issues, by their numbers.
    captured: Vec<(u32, Arc<str>)>,
    /// What the end of a run that was issued as a graph waits for.
    event: Option<Event>,
}

impl CudaStep {
    pub(super) fn new(calls: Calls<CudaKernel>) -> Result<Self, EngineError> {
        let on = std::env::var_os("PHALANX_GRAPHS").is_none_or(|value| value != "off");
        let is_capturable = on && calls.iter().all(|call| is_capturable(&call.kernel));
        let calls = SequentialStep::new(calls)?;
        Ok(Self { calls, is_capturable, runs: 0, graph: None, captured: Vec::new(), event: None })
    }

    /// Its calls, as they were last issued one by one.
    pub(super) fn calls(&self) -> &SequentialStep<CudaKernel> {
        &self.calls
    }

    pub(super) fn begin(&mut self, engine: &mut CudaEngine) -> Result<(), EngineError> {
        self.runs += 1;
        if !self.is_capturable || self.runs == 1 || engine.timing.is_on() {
            return self.calls.begin(engine);
        }
        engine.device.enter()?;
        if self.graph.is_none() {
            let (stream, device) = (engine.stream.clone(), engine.device.clone());
            let issue = || engine.with_both_queues(|engine| self.calls.begin(engine));
            // What other engines do on the same GPU meanwhile would break the capture.
            let Some(graph) = device.alone(|| CapturedWork::of(&stream, issue)) else {
                return self.calls.begin(engine);
            };
            self.graph = Some(graph?);
            self.captured = engine.issued.take();
            self.calls.forget();
        }
        engine.events += 1;
        self.event = Some(Event(engine.events));
        engine.issued.again(&engine.stream, &self.captured)?;
        let graph = self.graph.as_ref();
        // SAFETY: the arenas and workspaces outlive the steps that were prepared on them, and the caller
        // waited for what uses this step's memory.
        graph.map_or(Ok(()), |graph| unsafe { graph.launch(&engine.stream) })?;
        Ok(())
    }

    pub(super) fn end(&mut self, engine: &mut CudaEngine) -> Result<(), EngineError> {
        use phalanx_engine::Engine;
        match self.event.take() {
            Some(event) => engine.wait(event),
            None => self.calls.end(engine),
        }
    }
}

fn is_capturable(kernel: &CudaKernel) -> bool {
    use Task::{Attention, Clear, Copy, Kernel, Product};
    let stays = |task: &Task| {
        matches!(task, Kernel(_) | Product(_) | Attention(_) | Copy { .. } | Clear { .. })
    };
    match &kernel.what {
        What::Program(tasks) => tasks.iter().all(|(_, task)| stays(task)),
        What::Task(task) => stays(task),
        What::Copy => false,
    }
}
