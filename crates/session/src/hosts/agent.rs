//! The agent of a host: it starts the host's ranks when the coordinator says so, watches them, and tells
//! what they say of themselves.
//!
//! An agent that does not hear its coordinator any more ends its ranks: the coordinator takes it for
//! lost a little later, and then starts them elsewhere.

use std::io::Read;
use std::process::ChildStdout;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use phalanx_comm::{FlightRecorder, HostShare, Token, build, names};
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::{ALONE, Allowed, ProcessEnd};
use phalanx_sys::interrupt;
use phalanx_sys::process::is_stopped;

use super::frame::{HostStart, Order, Told, origin_of};
use super::link::{Link, LinkWriter};
use crate::copies::Store;
use crate::launch::{Children, HeldMemory, Launched, Starting, newest_step};

/// How often ranks are looked at, and how often the coordinator gets a report about them.
const LOOK: Duration = Duration::from_millis(5);
const TELL: Duration = Duration::from_millis(200);

/// How many of a rank's last events the coordinator sees.
const EVENTS: usize = 8;

/// An agent at work.
pub(super) struct AgentLoop<'a> {
    program: &'a Launched,
    token: Token,
    link: Link,
    /// Whether the output of ranks goes to the coordinator.
    forwards: bool,
    store: Arc<Store>,
    children: Children,
    memory: HeldMemory,
    recorder: Option<FlightRecorder>,
    share: Option<HostStart>,
    /// Ranks that have not ended.
    running: usize,
    told: Instant,
    /// What the run allows, as last reported to the coordinator.
    allowed: Option<Allowed>,
}

impl<'a> AgentLoop<'a> {
    /// An agent that hears a coordinator over this link.
    pub(super) fn new(
        program: &'a Launched,
        token: Token,
        link: Link,
        forwards: bool,
    ) -> Result<Self> {
        let store = Store::open(token).map_err(|error| {
            let problem = Problem::new(format!("the agent cannot listen for copies: {error}"));
            Error::refused(problem.fix("see whether this host allows programs to open a TCP port"))
        })?;
        let mut agent = Self {
            program,
            token,
            link,
            forwards,
            store,
            children: Children::default(),
            memory: HeldMemory::default(),
            recorder: None,
            share: None,
            running: 0,
            told: Instant::now(),
            allowed: None,
        };
        let store = u64::from(agent.store.port());
        agent.link.send(&Told::Ready { build: build(), store });
        Ok(agent)
    }

    /// Does what the coordinator says until the job has ended; gives its exit code.
    pub(super) fn run(mut self) -> Result<u8> {
        // Requests to stop come from the coordinator, also those that reach all hosts at once.
        let _listening = interrupt::listen_for_others();
        loop {
            while let Some(order) = self.link.next() {
                if let Some(code) = self.act(order)? {
                    return Ok(code);
                }
            }
            if self.link.is_closed() || self.link.silence(ALONE).is_some() {
                // What still runs is ended when the children are dropped.
                return Ok(u8::from(self.running > 0));
            }
            self.look();
            std::thread::sleep(LOOK);
        }
    }

    fn act(&mut self, order: Order) -> Result<Option<u8>> {
        match order {
            Order::Start(start) => self.start(*start)?,
            Order::Signal { epoch, signal } if Some(epoch) == self.epoch() => {
                self.children.send(signal);
            }
            Order::Signal { .. } => {}
            Order::Inspect { epoch, folder } => {
                let (checkpoint, copies) = (newest_step(&folder), self.store.held());
                let memory = self.share.as_ref().filter(|_| self.epoch() == Some(epoch));
                let memory = memory
                    .map(|share| share.ranks_here().all(|rank| self.memory.holds(rank)))
                    .unwrap_or(false);
                self.link.send(&Told::Left { epoch, checkpoint, copies, memory });
            }
            Order::End(code) => return Ok(Some(u8::try_from(code).unwrap_or(1))),
        }
        Ok(None)
    }

    fn epoch(&self) -> Option<u64> {
        self.share.as_ref().map(|share| share.epoch)
    }

    fn start(&mut self, start: HostStart) -> Result<()> {
        let from = origin_of(start.origin);
        self.store.begin(start.epoch, from.step());
        self.memory.begin(from);
        let recorder = match self.recorder.take() {
            Some(recorder) => recorder,
            None => FlightRecorder::create(start.capacity)
                .map_err(|error| Error::refused(Problem::new(error.to_string())))?,
        };
        let (rank, (cause, phase)) = &start.lost;
        recorder.job().show(&start.job);
        recorder.job().lost(*rank, cause, phase);
        recorder.job().begin(start.epoch, start.ranks, from);
        let local = start.ranks_here();
        local.clone().for_each(|rank| recorder.rank(rank).begin(from));
        let meet = (start.meet.0.clone(), u16::try_from(start.meet.1).unwrap_or_default());
        let share = HostShare { first: start.first, count: start.count, ranks: start.ranks, meet };
        let stores = crate::copies::write_stores(&start.stores);
        let variables = |rank: usize| {
            let mut variables = share.variables(rank, &self.token);
            variables.push((names::EPOCH, start.epoch.to_string()));
            variables.push((names::STORES, stores.clone()));
            variables
        };
        let writer = self.link.writer();
        let forward = |output: ChildStdout| forward(output, writer.clone());
        let starting = Starting {
            program: self.program,
            ranks: local.clone(),
            variables: &variables,
            recorder: &recorder,
            memory: &self.memory,
            output: self.forwards.then_some(&forward),
        };
        let started = self.children.start(&starting);
        self.running = start.count;
        let epoch = start.epoch;
        (self.recorder, self.share) = (Some(recorder), Some(start));
        if let Err((failed, error)) = started {
            for rank in failed..local.end {
                let end = ProcessEnd::NotStarted(error.to_string());
                self.running -= 1;
                self.link.send(&Told::Ended { epoch, rank, end });
            }
        }
        Ok(())
    }

    /// Looks at the ranks, and tells the coordinator if it is time or one has ended.
    fn look(&mut self) {
        let (Some(recorder), Some(share)) = (&self.recorder, &self.share) else { return };
        let epoch = share.epoch;
        self.memory.look(share.ranks_here(), &self.children, recorder);
        let ended = self.children.ended(recorder);
        self.running = self.running.saturating_sub(ended.len());
        // What the run allows is reported at once: the host may be lost before the next report is due.
        let allowed = recorder.job().allowed();
        let news = std::mem::replace(&mut self.allowed, allowed) != allowed;
        if news || !ended.is_empty() || self.told.elapsed() >= TELL {
            self.tell();
        }
        for (rank, end) in ended {
            self.link.send(&Told::Ended { epoch, rank, end });
        }
    }

    fn tell(&mut self) {
        self.told = Instant::now();
        let (Some(recorder), Some(share)) = (&self.recorder, &self.share) else { return };
        let job = (share.first == 0).then(|| recorder.job().snapshot());
        let seen = |rank: usize| {
            let words = recorder.rank(rank);
            let process = words.process() as u32;
            (rank, words.snapshot(EVENTS, process > 0 && is_stopped(process)))
        };
        let ranks = share.ranks_here().map(seen).collect();
        self.link.send(&Told::Seen { epoch: share.epoch, job, ranks });
    }
}

/// Passes on what a process prints.
fn forward(mut output: ChildStdout, to: LinkWriter) -> std::io::Result<JoinHandle<()>> {
    let pass = move || {
        let mut room = vec![0; 1 << 16];
        while let Ok(count @ 1..) = output.read(&mut room) {
            if !to.send(&Told::Output(room[..count].to_vec())) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("output".to_owned()).spawn(pass)
}
