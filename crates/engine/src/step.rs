//! Steps that are issued call by call, for engines that do not prepare whole steps.

use std::sync::Arc;

use phalanx_call::Lane;

use crate::{Args, CallTimes, Engine, EngineError, Event, Span, Target};

/// One call of a step.
#[derive(Debug)]
pub struct KernelCall<K> {
    /// What is called; scripts run the same kernel on other places.
    pub kernel: Arc<K>,
    /// For each input.
    pub inputs: Vec<Span>,
    /// For each output.
    pub outputs: Vec<Target>,
    /// The workspace.
    pub workspace: Span,
    /// Where it is issued.
    pub lane: Lane,
    /// The numbers of earlier calls of the step that it waits for.
    pub after: Vec<usize>,
}

impl<K> KernelCall<K> {
    /// What it works on.
    pub fn args(&self) -> Args<'_> {
        Args { inputs: &self.inputs, outputs: &self.outputs, workspace: self.workspace }
    }
}

/// Receives the numbers of the calls that an engine issues in a step. It must not allocate.
pub trait StepWatch: Send + Sync {
    /// The call is about to be issued.
    fn issuing(&self, call: usize);

    /// The call was issued; on the lane `Compute` of an engine that runs calls at once, it has ended.
    fn issued(&self, call: usize);
}

/// The calls of a step, shared by the executor and the engine.
pub type Calls<K> = Arc<[KernelCall<K>]>;

/// A step whose calls are launched one by one, each after the events of those that it waits for.
#[derive(Debug)]
pub struct SequentialStep<K> {
    calls: Calls<K>,
    /// By call, since the step was begun. Kept from run to run, so that running allocates nothing.
    events: Vec<Event>,
    after: Vec<Event>,
    /// Whether it is in flight: begun, and its end was not waited for yet.
    in_flight: bool,
}

impl<K> SequentialStep<K> {
    /// A step of these calls; each may wait only for earlier ones.
    pub fn new(calls: Calls<K>) -> Result<Self, EngineError> {
        in_order(&calls)?;
        let most = calls.iter().map(|call| call.after.len()).max().unwrap_or(0);
        let (events, after) = (Vec::with_capacity(calls.len()), Vec::with_capacity(most));
        Ok(Self { calls, events, after, in_flight: false })
    }

    /// Launches every call.
    pub fn begin<E: Engine<Kernel = K>>(&mut self, engine: &mut E) -> Result<(), EngineError> {
        if self.in_flight {
            return Err(already_in_flight());
        }
        self.events.clear();
        self.in_flight = true;
        let watch = engine.watcher();
        for (number, call) in self.calls.iter().enumerate() {
            watch.iter().for_each(|watch| watch.issuing(number));
            self.after.clear();
            self.after.extend(call.after.iter().map(|&before| self.events[before]));
            match engine.launch(&call.kernel, &call.args(), call.lane, &self.after) {
                Ok(event) => {
                    self.events.push(event);
                    watch.iter().for_each(|watch| watch.issued(number));
                }
                Err(error) => {
                    // Calls already launched still use memory that the caller may free, so wait for
                    // them. The launch error is returned, because it says more than later errors.
                    let _ = self.end(engine);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits for every call that was launched, also if one of them failed; the first failure is returned.
    pub fn end<E: Engine<Kernel = K>>(&mut self, engine: &mut E) -> Result<(), EngineError> {
        self.in_flight = false;
        let mut ended = Ok(());
        for &event in &self.events {
            let call = engine.wait(event);
            ended = ended.and(call);
        }
        ended
    }

    /// Says that what was begun will never run, as if it had ended: it was captured instead.
    pub fn forget(&mut self) {
        self.in_flight = false;
        self.events.clear();
    }

    /// The events of its calls in the last run, in the order of issue.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// When every call happened.
    pub fn times<E: Engine<Kernel = K>>(&self, engine: &E) -> Result<Vec<CallTimes>, EngineError> {
        let times = self.events.iter().map(|&event| engine.happened(event));
        times.collect::<Option<_>>().ok_or_else(|| untimed(engine.name()))
    }
}

/// Fails unless every call of a step waits only for earlier ones.
pub fn in_order<K>(calls: &[KernelCall<K>]) -> Result<(), EngineError> {
    let late = |(number, call): (usize, &KernelCall<K>)| call.after.iter().any(|&on| on >= number);
    match calls.iter().enumerate().position(late) {
        None => Ok(()),
        Some(number) => Err(EngineError::Failed {
            program: "step".to_owned(),
            why: format!("call {number} waits for one that is not issued before it"),
        }),
    }
}

/// The error of a step that is begun while it is in flight.
pub fn already_in_flight() -> EngineError {
    EngineError::Failed {
        program: "step".to_owned(),
        why: "it is begun again before it has ended; prepare two of them".to_owned(),
    }
}

/// The error for times of calls that were not timed.
pub fn untimed(engine: &str) -> EngineError {
    EngineError::Failed {
        program: "step".to_owned(),
        why: format!(
            "the {engine} engine was not timing when it ran; turn timing on before the run"
        ),
    }
}
