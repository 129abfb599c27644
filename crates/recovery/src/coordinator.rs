//! The decisions after a failure: a state machine, `event -> actions`.
//!
//! The processes that run at the same time are an *epoch*. If one of them is lost, the others are
//! ended, and only when all of them have ended is the next epoch started: so two epochs never run at
//! once, and what an epoch has left can be looked at in peace. Every event carries the number of its
//! epoch, and events of earlier epochs change nothing: a process that was late cannot disturb its
//! successors.

use std::fmt;

/// How the process of a rank ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ProcessEnd {
    /// Its work is done.
    Well,
    /// With an error that it has reported, and this exit code: it would fail again.
    Failed(u8),
    /// By a signal, in words, that stops a process between two instructions: what it had in shared
    /// memory is as it left it.
    Killed(String),
    /// By a mistake of its own, in words: it may have written anywhere before.
    Broken(String),
    /// It could not be started.
    NotStarted(String),
}

impl ProcessEnd {
    /// Whether a new process may succeed where this one did not.
    fn is_loss(&self) -> bool {
        matches!(self, Self::Killed(_) | Self::Broken(_) | Self::NotStarted(_))
    }
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Well => f.write_str("has ended"),
            Self::Failed(code) => write!(f, "ended with exit code {code}"),
            Self::Killed(how) | Self::Broken(how) => write!(f, "was ended by {how}"),
            Self::NotStarted(why) => write!(f, "could not be started: {why}"),
        }
    }
}

/// How far a rank has come, by the words that it leaves in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankProgress {
    /// The last step whose first update has begun.
    pub entered: u64,
    /// The last step that is done.
    pub done: u64,
}

/// What a run allows, as it has said itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowed {
    /// The most times that its ranks are started again.
    pub restarts: u64,
    /// How many ranks the smaller layouts have that the run may go on with, the largest first; zeros
    /// follow.
    pub smaller: [usize; Allowed::LAYOUTS],
}

impl Allowed {
    /// The most smaller layouts that are known.
    pub const LAYOUTS: usize = 8;

    /// The ranks of the largest layout that is smaller, with at most this many.
    fn fitting(&self, room: usize) -> Option<usize> {
        self.smaller.into_iter().find(|&ranks| ranks > 0 && ranks <= room)
    }
}

/// What an epoch has left, once all its processes have ended.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Left {
    /// Nothing if the run has not come so far that it can be started again.
    pub allowed: Option<Allowed>,
    /// By rank.
    pub progress: Vec<RankProgress>,
    /// The furthest step that was reported, by whatever epoch.
    pub reported: u64,
    /// Whether the memory in which ranks kept their state is still there.
    pub memory: bool,
    /// The step of the newest whole checkpoint.
    pub checkpoint: Option<u64>,
    /// The step of the newest copy of the state that the hosts which are left have in memory.
    pub copies: Option<u64>,
    /// How many ranks those hosts can have; nothing if that is not limited.
    pub room: Option<usize>,
}

/// Where an epoch begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartPoint {
    /// Where the run itself began.
    Beginning,
    /// The newest whole checkpoint, after this step.
    Checkpoint(u64),
    /// What the last epoch left in shared memory, after this step.
    Memory(u64),
    /// Copies in the memory of hosts, after this step.
    Copies(u64),
}

impl StartPoint {
    /// Steps that are done there.
    pub fn step(self) -> u64 {
        match self {
            Self::Beginning => 0,
            Self::Checkpoint(step) | Self::Memory(step) | Self::Copies(step) => step,
        }
    }
}

/// What happens to a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JobEvent {
    /// A rank's process has ended and was waited for.
    Ended {
        /// Its epoch.
        epoch: u64,
        /// Its rank.
        rank: usize,
        /// How.
        end: ProcessEnd,
    },
    /// All ranks wait for one that does nothing, for longer than they may.
    Hangs {
        /// Its epoch.
        epoch: u64,
        /// The rank that the others wait for.
        rank: usize,
    },
    /// Ranks that were left to end by themselves have had time enough.
    Overdue {
        /// Their epoch.
        epoch: u64,
    },
    /// What an epoch left, after [`JobAction::Inspect`].
    Found {
        /// The epoch.
        epoch: u64,
        /// What was found.
        left: Left,
    },
    /// The user wants the job to stop.
    StopAsked,
}

/// What the launcher is to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JobAction {
    /// Starts all ranks of an epoch.
    Start {
        /// The epoch, from 0.
        epoch: u64,
        /// How many ranks.
        ranks: usize,
        /// Where they begin.
        from: StartPoint,
    },
    /// Ends all processes of an epoch that still run, at once.
    Kill {
        /// The epoch.
        epoch: u64,
    },
    /// Gives the processes of an epoch some time to end by themselves, then says
    /// [`JobEvent::Overdue`].
    Allow {
        /// The epoch.
        epoch: u64,
    },
    /// Finds out what an epoch has left, all of whose processes have ended.
    Inspect {
        /// The epoch.
        epoch: u64,
    },
    /// The job is over.
    Finish(JobEnd),
}

/// How a job ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JobEnd {
    /// All ranks have done their work.
    Done,
    /// A rank has reported an error; this is the job's exit code.
    Failed(u8),
    /// A rank was lost, and the run does not go on: why not, in words; empty if it never said that it could.
    Lost {
        /// The rank.
        rank: usize,
        /// How it ended.
        end: ProcessEnd,
        /// Why the run does not go on.
        why: String,
    },
}

/// So many restarts in a row without one new step are enough: what fails is not chance.
const FRUITLESS: u64 = 3;

/// A rank that is lost so many times in a row before a step is done cannot be started again.
const HOPELESS: u64 = 2;

/// The state of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Coordinator {
    epoch: u64,
    /// How each rank of the epoch ended; none while it runs.
    ends: Vec<Option<ProcessEnd>>,
    /// The rank whose end is the reason for that of the epoch.
    cause: Option<(usize, ProcessEnd)>,
    /// Whether the processes that still ran were ended.
    killed: bool,
    /// Whether the memory of the epoch may hold what no program meant to write.
    tainted: bool,
    inspecting: bool,
    stopping: bool,
    finished: bool,
    restarts: u64,
    /// The furthest step of any epoch.
    furthest: u64,
    /// Restarts since then.
    fruitless: u64,
    /// The rank that was lost last without a step between, and how many times in a row.
    hopeless: Option<(usize, u64)>,
}

impl Coordinator {
    /// A job of this many ranks, with what is done first.
    pub fn new(ranks: usize) -> (Self, Vec<JobAction>) {
        let start = JobAction::Start { epoch: 0, ranks, from: StartPoint::Beginning };
        let new = Self {
            epoch: 0,
            ends: vec![None; ranks],
            cause: None,
            killed: false,
            tainted: false,
            inspecting: false,
            stopping: false,
            finished: false,
            restarts: 0,
            furthest: 0,
            fruitless: 0,
            hopeless: None,
        };
        (new, vec![start])
    }

    /// The epoch that runs, or was the last one to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// How many times ranks were started again.
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// The rank whose end is the reason for that of the epoch, and how it ended.
    pub fn cause(&self) -> Option<(usize, &ProcessEnd)> {
        self.cause.as_ref().map(|(rank, end)| (*rank, end))
    }

    /// What is to be done after an event.
    pub fn on(&mut self, event: JobEvent) -> Vec<JobAction> {
        if self.finished {
            return Vec::new();
        }
        match event {
            JobEvent::Ended { epoch, rank, end } if epoch == self.epoch => self.ended(rank, end),
            JobEvent::Hangs { epoch, rank } if epoch == self.epoch => self.hangs(rank),
            JobEvent::Overdue { epoch } if epoch == self.epoch => self.kill(),
            JobEvent::Found { epoch, left } if epoch == self.epoch && self.inspecting => {
                self.inspecting = false;
                self.decide(&left)
            }
            JobEvent::StopAsked => {
                self.stopping = true;
                Vec::new()
            }
            // Of an epoch that is over, or said twice.
            JobEvent::Ended { .. }
            | JobEvent::Hangs { .. }
            | JobEvent::Overdue { .. }
            | JobEvent::Found { .. } => Vec::new(),
        }
    }

    fn ended(&mut self, rank: usize, end: ProcessEnd) -> Vec<JobAction> {
        match self.ends.get_mut(rank) {
            Some(known @ None) => *known = Some(end.clone()),
            _ => return Vec::new(),
        }
        // A rank that this job itself has ended is no reason; one that broke has broken by itself.
        let own = !self.killed || matches!(end, ProcessEnd::Broken(_));
        let worse = match &self.cause {
            None => end != ProcessEnd::Well,
            // Ranks that fail because another one was lost may be noticed first.
            Some((_, known)) => !known.is_loss() && end.is_loss(),
        };
        self.tainted |= matches!(end, ProcessEnd::Broken(_));
        let loss = end.is_loss();
        if own && worse {
            self.cause = Some((rank, end));
        }
        if self.ends.iter().all(Option::is_some) {
            return self.over();
        }
        match (&self.cause, self.killed) {
            (Some(_), false) if loss => self.kill(),
            (Some((first, _)), false) if *first == rank => {
                vec![JobAction::Allow { epoch: self.epoch }]
            }
            _ => Vec::new(),
        }
    }

    fn hangs(&mut self, rank: usize) -> Vec<JobAction> {
        if self.cause.is_none() && self.ends.get(rank).is_some_and(Option::is_none) {
            let how = "the launcher, because it did nothing while others waited for it".to_owned();
            self.cause = Some((rank, ProcessEnd::Killed(how)));
        }
        self.kill()
    }

    fn kill(&mut self) -> Vec<JobAction> {
        match std::mem::replace(&mut self.killed, true) {
            true => Vec::new(),
            false => vec![JobAction::Kill { epoch: self.epoch }],
        }
    }

    /// All processes of the epoch have ended.
    fn over(&mut self) -> Vec<JobAction> {
        match &self.cause {
            None => self.finish(JobEnd::Done),
            Some((_, ProcessEnd::Failed(code))) => {
                let code = *code;
                self.finish(JobEnd::Failed(code))
            }
            Some(_) => {
                self.inspecting = true;
                vec![JobAction::Inspect { epoch: self.epoch }]
            }
        }
    }

    fn decide(&mut self, left: &Left) -> Vec<JobAction> {
        let done = left.progress.iter().map(|rank| rank.done);
        let reached = done.chain([left.reported]).max().unwrap_or(0);
        let moved = reached > self.furthest;
        self.furthest = self.furthest.max(reached);
        self.fruitless = if moved { 0 } else { self.fruitless };
        let lost = self.cause.as_ref().map_or(0, |(rank, _)| *rank);
        self.hopeless = match self.hopeless {
            Some((rank, times)) if rank == lost && !moved => Some((rank, times + 1)),
            _ => Some((lost, 1)),
        };
        let Some(allowed) = left.allowed else { return self.lose(String::new()) };
        if self.stopping {
            return self.lose("it was asked to stop".to_owned());
        }
        if self.restarts >= allowed.restarts {
            let times = allowed.restarts;
            let why = match times {
                0 => "run.restarts = 0".to_owned(),
                _ => format!("its ranks were started again {times} times, as run.restarts allows"),
            };
            return self.lose(why);
        }
        let (ranks, room) = (self.ends.len(), left.room.unwrap_or(usize::MAX));
        let hopeless = self.hopeless.is_some_and(|(_, times)| times >= HOPELESS);
        let fewer = match hopeless || room < ranks {
            true => allowed.fitting(room.min(ranks - 1)),
            false => None,
        };
        if room < ranks && fewer.is_none() {
            return self.lose(format!(
                "the hosts that are left have room for {room} of {ranks} ranks, and run.min_ranks \
                 allows no layout that fits"
            ));
        }
        if self.fruitless >= FRUITLESS && fewer.is_none() {
            let step = self.furthest + 1;
            let why = format!("{FRUITLESS} restarts in a row did not get past step {step}");
            return self.lose(why);
        }
        let ranks = fewer.unwrap_or(ranks);
        let from = self.origin(left, fewer.is_some());
        self.next(ranks, from)
    }

    /// The latest state that can be trusted.
    fn origin(&self, left: &Left, other_layout: bool) -> StartPoint {
        let saved =
            [left.checkpoint.map(StartPoint::Checkpoint), left.copies.map(StartPoint::Copies)];
        // Of two after the same step the later one in this list: memory is faster than a disk.
        let saved = saved.into_iter().flatten().max_by_key(|saved| saved.step());
        let saved = saved.unwrap_or(StartPoint::Beginning);
        if other_layout || self.tainted || !left.memory {
            return saved;
        }
        match settled(&left.progress) {
            // A checkpoint that is further was written by another run in this folder.
            Some(step) if step >= saved.step() && step > 0 => StartPoint::Memory(step),
            _ => saved,
        }
    }

    fn next(&mut self, ranks: usize, from: StartPoint) -> Vec<JobAction> {
        self.epoch += 1;
        self.restarts += 1;
        self.fruitless += 1;
        if ranks != self.ends.len() {
            (self.hopeless, self.fruitless) = (None, 0);
        }
        self.ends = vec![None; ranks];
        (self.cause, self.killed, self.tainted) = (None, false, false);
        vec![JobAction::Start { epoch: self.epoch, ranks, from }]
    }

    fn lose(&mut self, why: String) -> Vec<JobAction> {
        let unknown = (0, ProcessEnd::Killed("an unknown cause".to_owned()));
        let (rank, end) = self.cause.clone().unwrap_or(unknown);
        self.finish(JobEnd::Lost { rank, end, why })
    }

    fn finish(&mut self, verdict: JobEnd) -> Vec<JobAction> {
        self.finished = true;
        vec![JobAction::Finish(verdict)]
    }
}

/// The step after which all ranks stand, if none of them is inside an update.
fn settled(progress: &[RankProgress]) -> Option<u64> {
    let step = progress.first()?.done;
    progress.iter().all(|rank| rank.done == step && rank.entered <= step).then_some(step)
}
