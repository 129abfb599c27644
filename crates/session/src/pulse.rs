//! What a rank says of itself while it runs a script, in memory that outlives its process: the action
//! it is at, the phase of the step, and whether the state is between two steps or inside an update.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use phalanx_comm::{Did, FlightRecorder, RankWords};
use phalanx_engine::{Engine, StepWatch};
use phalanx_error::Result;
use phalanx_runtime::{Executor, ScriptId};
use phalanx_script::{Action, BufferKey, Kind, Part, Script, Source, StateKind, Tier};

use super::fault::Faults;
use super::job;

/// The pulse of a rank.
pub(crate) struct Pulse {
    watched: Arc<Watched>,
    scripts: Vec<ScriptId>,
}

/// What is known of a call before it is issued.
struct Doing {
    label: String,
    phase: &'static str,
    /// Whether it changes what lasts beyond the step.
    lasts: bool,
}

struct Watched {
    recorder: Arc<FlightRecorder>,
    rank: usize,
    /// The calls of each script.
    scripts: Vec<Vec<Doing>>,
    now: AtomicUsize,
    step: AtomicU64,
    entered: AtomicBool,
    faults: Faults,
}

impl Pulse {
    /// Lets a rank of the job's own world record what it does, if the job has a recorder.
    pub(crate) fn start<E: Engine>(
        executor: &mut Executor<E>,
        scripts: impl Iterator<Item = ScriptId>,
        (rank, ranks): (usize, usize),
    ) -> Result<Option<Self>> {
        let Some(recorder) = job::recorder() else { return Ok(None) };
        // Sessions of another size, such as the reference of a comparison, are not the job's.
        let own = job::joined().map_or((0, 1), |job| (job.rank(), job.ranks()));
        if own != (rank, ranks) {
            return Ok(None);
        }
        let scripts: Vec<ScriptId> = scripts.collect();
        let calls = |id: &ScriptId| {
            let script = executor.script(*id);
            let parts: HashMap<usize, Part> =
                script.turns.iter().map(|(at, turn)| (*at, turn.part)).collect();
            let issued = executor.issued(*id);
            issued.map(|(at, own)| Doing::of(script, own, parts.get(&at).copied())).collect()
        };
        let watched = Arc::new(Watched {
            recorder: recorder.clone(),
            rank,
            scripts: scripts.iter().map(calls).collect(),
            now: AtomicUsize::new(0),
            step: AtomicU64::new(0),
            entered: AtomicBool::new(true),
            faults: Faults::asked(rank, recorder.job().epoch())?,
        });
        executor.engine_mut().watch(Some(watched.clone()));
        Ok(Some(Self { watched, scripts }))
    }

    /// The state after this step lies in memory.
    pub(crate) fn ready(&self, step: u64) {
        self.watched.words().ready(step);
    }

    /// A script that changes no state is about to run.
    pub(crate) fn look(&self, script: ScriptId) {
        let at = self.scripts.iter().position(|own| *own == script).unwrap_or(usize::MAX);
        self.watched.now.store(at, Ordering::Relaxed);
    }

    /// A script of a step is about to run.
    pub(crate) fn begin(&self, script: ScriptId, step: u64) {
        self.look(script);
        self.watched.step.store(step, Ordering::Relaxed);
        self.watched.entered.store(false, Ordering::Relaxed);
        self.watched.words().begin_step(step);
    }

    /// All scripts of a step have ended.
    pub(crate) fn end(&self, step: u64) {
        self.watched.entered.store(true, Ordering::Relaxed);
        let words = self.watched.words();
        words.end_step(step);
        words.set_phase("");
    }
}

impl Doing {
    fn of(script: &Script, action: &Action, part: Option<Part>) -> Self {
        let lasting = |buffer: &phalanx_script::BufferId| {
            let buffer = &script.buffers[buffer.0];
            let gradient =
                matches!(&buffer.key, BufferKey::State(key) if key.kind == StateKind::Gradient);
            buffer.source == Source::State && !gradient
        };
        let lasts = action.writes().iter().any(lasting);
        let phase = match (&action.kind, part) {
            (Kind::Copy { into, .. }, _) if script.buffers[into.0].tier == Tier::Disk => "save",
            _ if lasts => "update",
            (_, Some(Part::F | Part::R)) => "F",
            (_, Some(Part::B | Part::W | Part::BW | Part::FBW)) => "B",
            (Kind::Reduce { .. }, None) => "reduce",
            (Kind::Gather(_), None) => "gather",
            (Kind::Send { .. } | Kind::Receive { .. }, None) => "message",
            _ => "other",
        };
        Self { label: action.label.clone(), phase, lasts }
    }
}

impl Watched {
    fn words(&self) -> &RankWords {
        self.recorder.rank(self.rank)
    }

    fn doing(&self, call: usize) -> Option<&Doing> {
        self.scripts.get(self.now.load(Ordering::Relaxed))?.get(call)
    }
}

impl StepWatch for Watched {
    fn issuing(&self, call: usize) {
        let Some(doing) = self.doing(call) else { return };
        let (words, step) = (self.words(), self.step.load(Ordering::Relaxed));
        words.set_phase(doing.phase);
        words.note_action(Did::Began, &doing.label);
        // Said before the first byte changes, so that nobody takes half an update for a whole one.
        if doing.lasts && !self.entered.swap(true, Ordering::SeqCst) {
            words.enter(step);
        }
        self.faults.at(step, doing.phase);
    }

    fn issued(&self, call: usize) {
        if let Some(doing) = self.doing(call) {
            self.words().note_action(Did::Ended, &doing.label);
        }
    }
}
