//! The launcher's loop: what it sees becomes events, and it does what the coordinator says.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use phalanx_comm::FlightRecorder;
use phalanx_error::{Error, Problem, Result, counted};
use phalanx_recovery::{
    Blame, Coordinator, JobAction, JobEnd, JobEvent, Ledger, Left, Life, ProcessEnd, RankSight,
    StartPoint, blame,
};
use phalanx_sys::process::Signal;
use phalanx_sys::{interrupt, machine_nanos};
use serde_json::json;

use super::Launched;
use super::crew::{Crew, Epoch};
use super::sight::{FLIGHT, JOB, ledger, put, report, sights};
use crate::folders::LEDGER;

/// How often processes are looked at, and how often they are looked at closely.
const LOOK: Duration = Duration::from_millis(5);
const CLOSE_LOOK: Duration = Duration::from_millis(200);

/// How long the others have to end by themselves after one has failed, and then on request.
const GRACE: Duration = Duration::from_secs(3);

/// If no rank does anything for so long inside a step, a note says so.
const QUIET: Duration = Duration::from_secs(10);

/// A job as its launcher sees it.
pub(crate) struct JobLoop<'a> {
    program: &'a Launched,
    crew: Box<dyn Crew + 'a>,
    recorder: FlightRecorder,
    /// How many ranks this epoch has.
    ranks: usize,
    coordinator: Coordinator,
    todo: VecDeque<JobAction>,
    /// Since when the ranks of an epoch may end by themselves.
    ending: Option<Instant>,
    /// Requests to stop that were passed on.
    passed: usize,
    looked: Instant,
    /// What was found when the first rank of this epoch was lost.
    lost: Option<Blame>,
    /// The rank that was named last because it does nothing, and when.
    named: Option<usize>,
    /// Whether the run's folder knows where the recorder is.
    announced: Option<PathBuf>,
}

impl<'a> JobLoop<'a> {
    pub(crate) fn new(
        ranks: usize,
        program: &'a Launched,
        crew: Box<dyn Crew + 'a>,
    ) -> Result<Self> {
        let recorder = FlightRecorder::create(ranks);
        let recorder = recorder.map_err(|e| Error::refused(Problem::new(e.to_string())))?;
        recorder.job().keep(&Ledger::default(), machine_nanos());
        let (coordinator, first) = Coordinator::new(ranks);
        Ok(Self {
            program,
            crew,
            recorder,
            ranks,
            coordinator,
            todo: first.into(),
            ending: None,
            passed: 0,
            looked: Instant::now(),
            lost: None,
            named: None,
            announced: None,
        })
    }

    /// A job whose ranks are on several hosts.
    pub(crate) fn spread(
        ranks: usize,
        program: &'a Launched,
        crew: Box<dyn Crew + 'a>,
    ) -> Result<Self> {
        let job = Self::new(ranks, program, crew)?;
        job.recorder.job().set_spread();
        Ok(job)
    }

    /// Runs the job to its end; gives its exit code.
    pub(crate) fn run(mut self) -> Result<u8> {
        let _listening = interrupt::listen_for_others();
        loop {
            while let Some(action) = self.todo.pop_front() {
                if let Some(verdict) = self.act(action)? {
                    let ended = self.end(verdict);
                    let code = ended.as_ref().map_or_else(Error::exit_code, |code| *code);
                    self.crew.finish(code);
                    return ended;
                }
            }
            self.look();
            if self.todo.is_empty() {
                std::thread::sleep(LOOK);
            }
        }
    }

    fn on(&mut self, event: JobEvent) {
        self.todo.extend(self.coordinator.on(event));
    }

    /// Does what the coordinator says; gives how the job ends, if it does.
    fn act(&mut self, action: JobAction) -> Result<Option<JobEnd>> {
        match action {
            JobAction::Start { epoch, ranks, from } => self.start(epoch, ranks, from)?,
            JobAction::Kill { .. } => self.crew.send(Signal::Kill),
            JobAction::Allow { .. } => self.ending = Some(Instant::now()),
            JobAction::Inspect { epoch } => {
                let left = self.left();
                self.on(JobEvent::Found { epoch, left });
            }
            JobAction::Finish(verdict) => return Ok(Some(verdict)),
        }
        Ok(None)
    }

    fn start(&mut self, epoch: u64, ranks: usize, from: StartPoint) -> Result<()> {
        if epoch > 0 {
            self.tell_restart(ranks, from);
        }
        self.recorder.job().begin(epoch, ranks, from);
        (0..ranks).for_each(|rank| self.recorder.rank(rank).begin(from));
        (self.ending, self.lost, self.named) = (None, None, None);
        self.ranks = ranks;
        let missing = self.crew.start(Epoch { number: epoch, ranks, from }, &self.recorder)?;
        for (rank, why) in missing {
            self.on(JobEvent::Ended { epoch, rank, end: ProcessEnd::NotStarted(why) });
        }
        Ok(())
    }

    /// One look at everything.
    fn look(&mut self) {
        let epoch = self.coordinator.epoch();
        let urged = self.ending.is_some_and(|since| since.elapsed() > GRACE);
        for (rank, end) in self.crew.look(&self.recorder) {
            // A rank that was stopped because another had failed is not lost.
            let end = match end {
                ProcessEnd::Killed(how) if urged && how == "SIGTERM" => ProcessEnd::Well,
                end => end,
            };
            if self.lost.is_none() && !matches!(end, ProcessEnd::Well | ProcessEnd::Failed(_)) {
                self.note_loss(rank, &end);
            }
            self.on(JobEvent::Ended { epoch, rank, end });
        }
        if interrupt::requests() > self.passed {
            self.passed += 1;
            // Processes in the background of a script ignore SIGINT, whichever process sends it.
            self.crew.send(match interrupt::by_keys() {
                true => Signal::Interrupt,
                false => Signal::Terminate,
            });
            self.on(JobEvent::StopAsked);
        }
        match self.ending.map(|since| since.elapsed()) {
            Some(time) if time > 2 * GRACE => self.on(JobEvent::Overdue { epoch }),
            Some(time) if time > GRACE => self.crew.send(Signal::Terminate),
            _ => {}
        }
        if self.looked.elapsed() >= CLOSE_LOOK {
            self.looked = Instant::now();
            self.announce();
            self.look_closely(epoch);
        }
    }

    /// Writes where the recorder is to the run's folder, once that is known.
    fn announce(&mut self) {
        let folder = PathBuf::from(self.recorder.job().folder());
        if self.announced.is_some() || folder.as_os_str().is_empty() {
            return;
        }
        let (launcher, fd) = (std::process::id(), self.recorder.fd().as_raw_fd());
        put(&folder, JOB, &json!({"launcher": launcher, "recorder": fd}));
        self.announced = Some(folder);
    }

    /// Looks for ranks that are stopped or hang.
    fn look_closely(&mut self, epoch: u64) {
        if self.ending.is_some() || self.lost.is_some() || self.passed > 0 {
            return;
        }
        let sights = self.sights(None);
        let stopped = sights.iter().any(|sight| sight.life == Life::Stopped);
        let inside = sights.iter().any(|sight| sight.inside);
        let apart = inside || sights.iter().any(|sight| sight.meets);
        let quiet = sights.iter().map(|sight| sight.quiet).min().unwrap_or_default();
        let patience = self.recorder.job().timeout();
        // Who has little patience wants to know early, too.
        let long = if patience.is_zero() { QUIET } else { QUIET.min(patience / 2) };
        let found = blame(&sights).filter(|_| stopped || apart && quiet >= long);
        let Some(found) = found else {
            self.named = None;
            return;
        };
        if self.named.replace(found.rank) != Some(found.rank) {
            self.write_flight(&sights, Some(&found));
            let help = match sights[found.rank].life {
                Life::Stopped => {
                    format!("; to continue it: kill -CONT {}", sights[found.rank].process)
                }
                _ => String::new(),
            };
            tell(&format!("note: {}{help}", found.sentence));
        }
        // Between steps a rank may write a large file, for which the others wait.
        if (stopped || inside) && !patience.is_zero() && quiet >= patience {
            self.lost = Some(found.clone());
            self.on(JobEvent::Hangs { epoch, rank: found.rank });
        }
    }

    fn sights(&self, ended: Option<(usize, &ProcessEnd)>) -> Vec<RankSight> {
        sights(&self.recorder, |rank, _| match ended {
            Some((lost, end)) if lost == rank => Life::Ended(end.to_string()),
            _ if self.crew.is_stopped(rank, &self.recorder) => Life::Stopped,
            _ => Life::Runs,
        })
    }

    /// Remembers what a rank that was lost did last, and what the others wait for.
    fn note_loss(&mut self, rank: usize, end: &ProcessEnd) {
        // A rank may be lost before the first close look.
        self.announce();
        let sights = self.sights(Some((rank, end)));
        let found = blame(&sights);
        self.write_flight(&sights, found.as_ref());
        let phase = self.recorder.rank(rank).phase();
        self.recorder.job().lost(rank, &end.to_string(), &phase);
        self.lost = found;
    }

    fn write_flight(&self, sights: &[RankSight], found: Option<&Blame>) {
        if let Some(folder) = &self.announced {
            put(folder, FLIGHT, &report(&self.recorder, sights, found));
        }
    }

    /// What the ranks of an epoch have left.
    fn left(&mut self) -> Left {
        let words = self.recorder.job();
        let ranks = 0..words.active().min(self.recorder.ranks());
        let mut left = Left {
            allowed: words.allowed().filter(|_| !words.is_over()),
            progress: ranks.map(|rank| self.recorder.rank(rank).progress()).collect(),
            reported: words.ledger().furthest(),
            ..Left::default()
        };
        self.crew.find_left(&self.recorder, &mut left);
        left
    }

    fn tell_restart(&self, ranks: usize, from: StartPoint) {
        let words = self.recorder.job();
        let place = match from {
            StartPoint::Beginning => "at the beginning".to_owned(),
            StartPoint::Checkpoint(step) => format!("from the checkpoint after step {step}"),
            StartPoint::Memory(step) => format!("from memory after step {step}"),
            StartPoint::Copies(step) => format!("from the hosts' copies after step {step}"),
        };
        let (number, of) =
            (self.coordinator.restarts(), words.allowed().map_or(0, |allowed| allowed.restarts));
        let fewer = match ranks == words.active() {
            true => String::new(),
            false => format!(" with {} instead of {}", counted(ranks, "rank"), words.active()),
        };
        let what = self.lost.as_ref().map(|lost| lost.sentence.clone()).unwrap_or_default();
        tell(&format!("note: {what}\nnote: going on {place}{fewer} (restart {number} of {of})"));
    }

    /// The end of the job: its exit code, or the error.
    fn end(&self, verdict: JobEnd) -> Result<u8> {
        let ranks = self.ranks;
        if let Some(folder) = &self.announced {
            let _ = std::fs::remove_file(folder.join(JOB));
        }
        match verdict {
            JobEnd::Done => Ok(0),
            JobEnd::Failed(code) => {
                let codes = (0..ranks).filter_map(|rank| self.crew.code(rank));
                let own = codes.max().and_then(|code| u8::try_from(code).ok()).unwrap_or(code);
                match self.program.is_own {
                    // It has said why.
                    true => Ok(own),
                    false => {
                        let first = (0..ranks).find(|&rank| {
                            self.crew.code(rank).is_some_and(|found| found == i32::from(code))
                        });
                        let (first, name) =
                            (first.unwrap_or(0), Path::new(&self.program.file).display());
                        Err(Error::failed(Problem::new(format!(
                            "rank {first} of {ranks} ended with exit code {code}: {name}"
                        ))))
                    }
                }
            }
            JobEnd::Lost { rank, end, why } => {
                if let Some(folder) = &self.announced {
                    put(folder, LEDGER, &ledger(&self.recorder));
                }
                let details = self.lost.as_ref().map(|lost| lost.sentence.clone());
                Err(Error::failed(lost(rank, ranks, &end, details, &why)))
            }
        }
    }
}

/// A line for people, on standard error.
fn tell(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn lost(
    rank: usize,
    ranks: usize,
    end: &ProcessEnd,
    details: Option<String>,
    why: &str,
) -> Problem {
    let mut problem = Problem::new(format!("the process of rank {rank} of {ranks} {end}"));
    if let Some(details) = details {
        problem = problem.because(details);
    }
    let rest = match why.is_empty() {
        true => "the other ranks cannot go on without it, and were ended".to_owned(),
        false => format!("the run does not go on: {why}"),
    };
    let problem = problem.because(rest);
    match end {
        ProcessEnd::Killed(how) if how == "SIGKILL" => {
            problem.fix("if nobody sent it, memory was short: see dmesg, or use less of it")
        }
        ProcessEnd::Killed(_) | ProcessEnd::NotStarted(_) => {
            problem.fix("see what ended it; phalanx train --resume goes on from a checkpoint")
        }
        _ => problem.fix("please report it, together with the command and the configuration"),
    }
}
