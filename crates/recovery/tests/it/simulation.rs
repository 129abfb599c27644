//! Whole jobs with random losses, and events that come late, twice, or from epochs that are over.

use phalanx_recovery::{
    Allowed, Coordinator, JobAction, JobEnd, JobEvent, Left, ProcessEnd, RankProgress, StartPoint,
};

const STEPS: u64 = 30;
const JOBS: u64 = 3000;

pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % sides
    }

    pub(crate) fn once_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }
}

/// A process of the simulated job.
struct Process {
    progress: RankProgress,
    alive: bool,
    /// Hangs: it does nothing any more.
    stuck: bool,
}

struct Job {
    dice: Dice,
    coordinator: Coordinator,
    epoch: u64,
    processes: Vec<Process>,
    /// Events on their way, with the time they still need.
    coming: Vec<(u64, JobEvent)>,
    /// Events that were given, some of which come again.
    past: Vec<JobEvent>,
    checkpoint: Option<u64>,
    /// The newest copy in the memory of hosts, if there are several; and the ranks that those which
    /// are left can have.
    copies: Option<u64>,
    room: Option<usize>,
    allowed: Allowed,
    /// The rank that dies at once whenever it is started, if there is one.
    doomed: Option<usize>,
    /// Whether a process of this epoch has written anywhere.
    tainted: bool,
    starts: u64,
    losses: u64,
    verdict: Option<JobEnd>,
}

impl Job {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let ranks = 1 + dice.roll(5) as usize;
        let restarts = dice.roll(12);
        let fewer = if ranks > 1 && dice.once_in(3) { ranks - 1 } else { 0 };
        let smaller = [fewer, fewer / 2, 0, 0, 0, 0, 0, 0];
        let doomed = dice.once_in(5).then(|| dice.roll(ranks as u64) as usize);
        let room = dice.once_in(3).then_some(ranks);
        let (coordinator, first) = Coordinator::new(ranks);
        let mut job = Self {
            dice,
            coordinator,
            epoch: 0,
            processes: Vec::new(),
            coming: Vec::new(),
            past: Vec::new(),
            checkpoint: None,
            copies: None,
            room,
            allowed: Allowed { restarts, smaller },
            doomed,
            tainted: false,
            starts: 0,
            losses: 0,
            verdict: None,
        };
        first.into_iter().for_each(|action| job.act(action));
        job
    }

    fn send(&mut self, event: JobEvent) {
        let delay = self.dice.roll(6);
        if self.dice.once_in(8) {
            let again = delay + self.dice.roll(200);
            self.coming.push((again, event.clone()));
        }
        self.coming.push((delay, event));
    }

    fn act(&mut self, action: JobAction) {
        match action {
            JobAction::Start { epoch, ranks, from } => self.start(epoch, ranks, from),
            JobAction::Kill { epoch } => {
                assert_eq!(epoch, self.epoch, "only the epoch that runs is ended");
                for rank in 0..self.processes.len() {
                    self.end(rank, ProcessEnd::Killed("SIGKILL".into()));
                }
            }
            JobAction::Allow { epoch } => {
                // The others notice and fail, too, or are ended when their time is over.
                for rank in 0..self.processes.len() {
                    if self.dice.once_in(2) {
                        self.end(rank, ProcessEnd::Failed(1));
                    }
                }
                self.send(JobEvent::Overdue { epoch });
            }
            JobAction::Inspect { epoch } => {
                assert!(self.processes.iter().all(|process| !process.alive));
                let left = self.left();
                self.send(JobEvent::Found { epoch, left });
            }
            JobAction::Finish(verdict) => {
                assert!(self.verdict.is_none(), "a job ends once");
                assert!(self.processes.iter().all(|process| !process.alive), "{verdict:?}");
                self.verdict = Some(verdict);
            }
        }
    }

    fn left(&self) -> Left {
        Left {
            allowed: Some(self.allowed),
            progress: self.processes.iter().map(|process| process.progress).collect(),
            reported: 0,
            memory: self.room.is_none(),
            checkpoint: self.checkpoint,
            copies: self.copies,
            room: self.room,
        }
    }

    fn start(&mut self, epoch: u64, ranks: usize, from: StartPoint) {
        assert!(self.processes.iter().all(|p| !p.alive), "two epochs at once");
        assert_eq!(epoch, self.starts, "epochs have numbers one after the other");
        assert!(self.starts <= self.allowed.restarts, "more restarts than allowed");
        assert!(from.step() >= self.checkpoint.unwrap_or(0), "back to before a checkpoint");
        assert!(from.step() >= self.copies.unwrap_or(0), "back to before a copy");
        assert!(self.room.is_none_or(|room| ranks <= room), "more ranks than there is room for");
        match from {
            StartPoint::Copies(step) => assert_eq!(Some(step), self.copies),
            StartPoint::Memory(step) => {
                assert!(self.room.is_none(), "the memory of a host that may be lost");
                assert!(!self.tainted, "memory that cannot be trusted");
                assert_eq!(ranks, self.processes.len());
                let whole = |p: &Process| p.progress.done == step && p.progress.entered <= step;
                assert!(self.processes.iter().all(whole), "half an update");
            }
            StartPoint::Checkpoint(step) => assert_eq!(Some(step), self.checkpoint),
            StartPoint::Beginning => assert_eq!(self.checkpoint, None),
        }
        let step = from.step();
        let new = || Process {
            progress: RankProgress { entered: step, done: step },
            alive: true,
            stuck: false,
        };
        self.processes = (0..ranks).map(|_| new()).collect();
        (self.epoch, self.tainted, self.starts) = (epoch, false, self.starts + 1);
        if ranks < 1 + self.doomed.unwrap_or(0) {
            self.doomed = None;
        }
        if let Some(rank) = self.doomed {
            self.lose(rank, ProcessEnd::NotStarted("no memory".into()));
        }
    }

    fn end(&mut self, rank: usize, end: ProcessEnd) {
        if std::mem::replace(&mut self.processes[rank].alive, false) {
            self.send(JobEvent::Ended { epoch: self.epoch, rank, end });
        }
    }

    fn lose(&mut self, rank: usize, end: ProcessEnd) {
        if self.processes[rank].alive {
            self.losses += 1;
            self.tainted |= matches!(end, ProcessEnd::Broken(_));
            self.end(rank, end);
        }
    }

    /// One moment: an event arrives, or a rank does something.
    fn moment(&mut self) {
        self.coming.iter_mut().for_each(|(delay, _)| *delay = delay.saturating_sub(1));
        if let Some(at) = self.coming.iter().position(|(delay, _)| *delay == 0) {
            let (_, event) = self.coming.remove(at);
            self.past.push(event.clone());
            self.coordinator.on(event).into_iter().for_each(|action| self.act(action));
            return;
        }
        if self.dice.once_in(40) && !self.past.is_empty() {
            let old = self.past[self.dice.roll(self.past.len() as u64) as usize].clone();
            self.coming.push((1, old));
        }
        let rank = self.dice.roll(self.processes.len() as u64) as usize;
        if !self.processes[rank].alive || self.verdict.is_some() {
            return;
        }
        match self.dice.roll(900) {
            0..6 => self.lose(rank, ProcessEnd::Killed("SIGKILL".into())),
            6..9 => self.lose(rank, ProcessEnd::Broken("SIGSEGV".into())),
            9..12 => self.processes[rank].stuck = true,
            12 => self.end(rank, ProcessEnd::Failed(1)),
            // A host is lost: some ranks at once, and their place.
            13 if self.room.is_some() => {
                self.room = self.room.map(|room| room.saturating_sub(1).max(1));
                let count = self.processes.len();
                for rank in [rank, (rank + 1) % count] {
                    self.lose(rank, ProcessEnd::Killed("the loss of a host".into()));
                }
            }
            _ => self.work(rank),
        }
    }

    fn work(&mut self, rank: usize) {
        let RankProgress { entered, done } = self.processes[rank].progress;
        let all = |step: u64| self.processes.iter().all(|p| p.progress.done >= step);
        let whole = all(done) && self.processes.iter().all(|p| p.progress.entered <= done);
        if self.processes[rank].stuck {
            let epoch = self.epoch;
            self.send(JobEvent::Hangs { epoch, rank });
        } else if entered > done {
            self.processes[rank].progress.done = entered;
        } else if done == STEPS {
            self.end(rank, ProcessEnd::Well);
        } else if whole && self.dice.once_in(4) {
            let saved = Some(done).filter(|step| *step > 0);
            match self.room.is_some() && self.dice.once_in(2) {
                true => self.copies = self.copies.max(saved),
                false => self.checkpoint = self.checkpoint.max(saved),
            }
        } else if all(done) {
            // No rank enters the updates of a step before all have finished the one before.
            self.processes[rank].progress.entered = done + 1;
        }
    }
}

#[test]
fn jobs_end_and_every_loss_is_recovered_or_explained() {
    let (mut done, mut lost, mut failed, mut restarts, mut shrunk) = (0, 0, 0, 0, 0);
    for seed in 1..=JOBS {
        let mut job = Job::new(seed);
        let ranks = job.processes.len();
        let mut moments = 0;
        while job.verdict.is_none() {
            job.moment();
            moments += 1;
            assert!(moments < 200_000, "seed {seed} does not end");
        }
        let verdict = job.verdict.take().unwrap();
        match &verdict {
            JobEnd::Done => {
                let all = job.processes.iter().all(|p| p.progress.done == STEPS);
                assert!(all, "seed {seed}");
                done += 1;
            }
            JobEnd::Lost { why, .. } => {
                assert!(!why.is_empty(), "seed {seed}");
                lost += 1;
            }
            JobEnd::Failed(code) => {
                assert_eq!(*code, 1);
                failed += 1;
            }
        }
        assert_eq!(job.coordinator.restarts(), job.starts - 1, "seed {seed}");
        restarts += job.coordinator.restarts();
        shrunk += u64::from(job.processes.len() < ranks);
        // Nothing changes any more, whatever comes.
        let before = job.coordinator.clone();
        for (_, event) in std::mem::take(&mut job.coming) {
            assert_eq!(job.coordinator.on(event), []);
        }
        assert_eq!(job.coordinator, before, "seed {seed}");
    }
    // All kinds of ends happened, many times.
    assert!(done > 500 && lost > 300 && failed > 100, "{done} {lost} {failed}");
    assert!(restarts > 2000 && shrunk > 50, "{restarts} {shrunk}");
}
