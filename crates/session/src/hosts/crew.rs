//! The processes of a job on several hosts, by their agents: which host is there, which ranks it has, and
//! what becomes of them if it is lost.

use std::collections::BTreeSet;
use std::io::Write;
use std::ops::Range;
use std::process::Child;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use phalanx_comm::{FlightRecorder, build, fill_slots};
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::{LOST, Left, ProcessEnd};
use phalanx_sys::process::Signal;

use super::frame::{HeldVersion, HostStart, Order, Told, origin_numbers};
use super::link::Link;
use super::remote::{RemoteShell, shell_ended};
use crate::copies::newest_whole;
use crate::launch::{Crew, Epoch};

/// How long a host may take to come, and to say what it has left.
const COMING: Duration = Duration::from_secs(60);
const COMING_NOTICE: Duration = Duration::from_secs(5);
const COMING_AGAIN: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(10);

/// What to do about hosts with another build.
const SAME_BUILD: &str = "install the same file there, under the same path";

/// How often agents are listened to while something is waited for.
const LOOK: Duration = Duration::from_millis(5);

/// How long agents have to end when the job has ended.
const LEAVING: Duration = Duration::from_secs(3);

/// A host of a job.
pub(super) struct Host {
    /// The name that the remote shell gets and that messages show.
    pub(super) name: String,
    /// Where other hosts reach it.
    pub(super) address: String,
    /// Its place among the hosts, where they come in any order.
    pub(super) order: usize,
    /// How many ranks it can have.
    pub(super) slots: usize,
    /// The way to its agent; nothing if it has none.
    pub(super) link: Option<Link>,
    shell: Option<Child>,
    /// How many times its agent was started.
    starts: usize,
    /// Whether its agent was one of another build.
    is_other_build: bool,
    /// The port of its copies, once its agent has come.
    store: Option<u64>,
    ranks: Range<usize>,
    running: BTreeSet<usize>,
    /// What it has said that it has left of this epoch.
    left: Option<HostLeft>,
}

/// What a host has left of an epoch.
struct HostLeft {
    checkpoint: Option<u64>,
    copies: Vec<HeldVersion>,
    /// Whether its agent holds the memory of all its ranks.
    memory: bool,
}

impl Host {
    pub(super) fn new(name: String, address: String, slots: usize, link: Option<Link>) -> Self {
        let running = BTreeSet::new();
        let (shell, store, left) = (None, None, None);
        let (order, starts, ranks) = (0, 0, 0..0);
        Self {
            name,
            address,
            order,
            slots,
            link,
            shell,
            starts,
            is_other_build: false,
            store,
            ranks,
            running,
            left,
        }
    }

    fn is_there(&self) -> bool {
        self.link.is_some() && self.store.is_some()
    }

    /// Ends the remote shell, if there is one.
    fn end_shell(&mut self) {
        if let Some(mut shell) = self.shell.take() {
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}

/// The hosts of a job.
pub(super) struct HostCrew {
    hosts: Vec<Host>,
    /// How agents are started, if it is not done by another program.
    shell: Option<RemoteShell>,
    /// Hosts whose agents come by themselves.
    newcomers: Option<Receiver<Host>>,
    /// How many ranks the job began with.
    capacity: usize,
    /// The first port at which ranks meet.
    port: u16,
    epoch: u64,
    ranks: usize,
    ended: Vec<(usize, ProcessEnd)>,
    codes: Vec<Option<i32>>,
}

impl HostCrew {
    /// The hosts of a job of this many ranks; agents are not there yet, or have come already.
    pub(super) fn new(
        hosts: Vec<Host>,
        shell: Option<RemoteShell>,
        newcomers: Option<Receiver<Host>>,
        capacity: usize,
        port: u16,
    ) -> Self {
        let (ended, codes) = (Vec::new(), vec![None; capacity]);
        let (epoch, ranks) = (0, capacity);
        Self { hosts, shell, newcomers, capacity, port, epoch, ranks, ended, codes }
    }

    /// Starts agents on as many hosts as the ranks need, in their order. If one cannot be started, reports why
    /// and gives an exit code.
    pub(super) fn come(&mut self) -> Result<Option<u8>> {
        let needed = fill_slots(self.hosts.iter().map(|host| host.slots), self.capacity);
        for at in (0..needed.len()).filter(|&at| !needed[at].is_empty()) {
            self.start_agent(at)?;
        }
        let (start, mut told) = (Instant::now(), false);
        loop {
            self.listen(None);
            let late = !told && start.elapsed() > COMING_NOTICE;
            for at in (0..needed.len()).filter(|&at| !needed[at].is_empty()) {
                let host = &mut self.hosts[at];
                if host.is_there() {
                    continue;
                }
                if host.is_other_build {
                    // The note has said how and what to do.
                    return Ok(Some(1));
                }
                let ended = host.shell.as_mut().and_then(|shell| shell.try_wait().ok().flatten());
                if let Some(status) = ended {
                    return Err(shell_ended(&host.name, status.code()));
                }
                let name = &host.name;
                if late {
                    told = true;
                    tell(&format!(
                        "no agent has come from {name} yet: see what the remote shell does there; it \
                         has {} s in all",
                        COMING.as_secs()
                    ));
                }
                if start.elapsed() > COMING {
                    let problem =
                        Problem::new(format!("no agent has come from {name} within 60 s"));
                    return Err(Error::failed(problem.fix("see what the remote shell does there")));
                }
            }
            if self.room() >= self.capacity {
                return Ok(None);
            }
            std::thread::sleep(LOOK);
        }
    }

    fn start_agent(&mut self, at: usize) -> Result<()> {
        let host = &mut self.hosts[at];
        if let Some(shell) = self.shell.as_ref().filter(|_| host.link.is_none()) {
            host.starts += 1;
            host.end_shell();
            let (child, link) = shell.start(&host.name)?;
            (host.shell, host.link, host.store) = (Some(child), Some(link), None);
        }
        Ok(())
    }

    /// Whether the memory of all ranks is held where they would be started again.
    fn holds_memory(&self) -> bool {
        let holds = |(share, host): (&Range<usize>, &Host)| {
            let same = *share == host.ranks || share.is_empty() && host.ranks.is_empty();
            same && (share.is_empty() || host.left.as_ref().is_some_and(|left| left.memory))
        };
        let (there, shares) = self.shares(self.ranks);
        let hosts = there.iter().map(|&at| &self.hosts[at]);
        let placed = shares.last().map_or(0, |last| last.end);
        placed == self.ranks && shares.iter().zip(hosts).all(holds)
    }

    /// The hosts that are there, and which of so many ranks each of them gets.
    fn shares(&self, ranks: usize) -> (Vec<usize>, Vec<Range<usize>>) {
        let there: Vec<usize> =
            (0..self.hosts.len()).filter(|&at| self.hosts[at].is_there()).collect();
        let shares = fill_slots(there.iter().map(|&at| self.hosts[at].slots), ranks);
        (there, shares)
    }

    /// How many ranks the hosts that are there can have.
    fn room(&self) -> usize {
        self.hosts.iter().filter(|host| host.is_there()).map(|host| host.slots).sum()
    }

    /// Takes in what agents have said, and notices those that are gone.
    fn listen(&mut self, recorder: Option<&FlightRecorder>) {
        self.hosts.extend(self.newcomers.iter().flat_map(|new| new.try_iter()));
        for at in 0..self.hosts.len() {
            while let Some(told) = self.hosts[at].link.as_mut().and_then(Link::next) {
                self.hear(at, told, recorder);
            }
            let Some(link) = &mut self.hosts[at].link else { continue };
            let silence = link.silence(LOST);
            if link.is_closed() {
                self.lose(at, "its agent has ended, or the connection to it");
            } else if let Some(silence) = silence.filter(|_| self.hosts[at].is_there()) {
                let why = format!("nothing was heard of it for {:.1} s", silence.as_secs_f64());
                self.lose(at, &why);
            }
        }
    }

    fn hear(&mut self, at: usize, told: Told, recorder: Option<&FlightRecorder>) {
        let (now, host) = (self.epoch, &mut self.hosts[at]);
        match told {
            Told::Ready { build: theirs, .. } if theirs != build() => {
                host.is_other_build = true;
                tell(&format!("{} runs another build of this program: {SAME_BUILD}", host.name));
                self.lose(at, "");
            }
            Told::Ready { store, .. } => host.store = Some(store),
            Told::Seen { epoch, job, ranks } if epoch == now => {
                let Some(recorder) = recorder else { return };
                job.iter().for_each(|job| recorder.job().show(job));
                for (rank, seen) in ranks.iter().filter(|(rank, _)| host.ranks.contains(rank)) {
                    recorder.rank(*rank).show(seen);
                }
            }
            Told::Ended { epoch, rank, end } if epoch == now && host.running.remove(&rank) => {
                self.codes[rank] = match &end {
                    ProcessEnd::Well => Some(0),
                    ProcessEnd::Failed(code) => Some(i32::from(*code)),
                    _ => None,
                };
                self.ended.push((rank, end));
            }
            Told::Left { epoch, checkpoint, copies, memory } if epoch == now => {
                host.left = Some(HostLeft { checkpoint, copies, memory });
            }
            Told::Output(bytes) => {
                let mut out = std::io::stdout().lock();
                // Who does not want to read it any more is not asked.
                let _ = out.write_all(&bytes).and_then(|()| out.flush());
            }
            // Of an epoch that is over.
            Told::Seen { .. } | Told::Ended { .. } | Told::Left { .. } => {}
        }
    }

    /// A host is gone, with its ranks.
    fn lose(&mut self, at: usize, why: &str) {
        let host = &mut self.hosts[at];
        let came = host.store.take().is_some();
        host.link = None;
        if came {
            host.end_shell();
            tell(&format!("host {} is lost: {why}", host.name));
        }
        let how = format!("the loss of host {}", host.name);
        for rank in std::mem::take(&mut host.running) {
            self.ended.push((rank, ProcessEnd::Killed(how.clone())));
        }
    }

    fn tell_all(&mut self, order: &Order) {
        self.hosts
            .iter_mut()
            .filter_map(|host| host.link.as_mut())
            .for_each(|link| link.send(order));
    }

    /// Lets hosts come again, or ones that were not needed so far, until there is room for all ranks.
    fn refill(&mut self) {
        let start = Instant::now();
        let mut tried = BTreeSet::new();
        while self.room() < self.ranks && start.elapsed() < COMING_AGAIN {
            let coming: usize =
                self.hosts.iter().filter(|h| h.link.is_some()).map(|h| h.slots).sum();
            // Hosts that were not needed so far come first.
            let absent = (0..self.hosts.len()).filter(|at| self.hosts[*at].link.is_none());
            let next =
                absent.filter(|at| !tried.contains(at)).min_by_key(|at| self.hosts[*at].starts);
            match next {
                Some(at) if self.shell.is_some() && coming < self.ranks => {
                    tried.insert(at);
                    // A shell that cannot be started is like a host that does not answer.
                    let _ = self.start_agent(at);
                }
                _ if self.newcomers.is_none() && coming < self.ranks => return,
                _ => std::thread::sleep(LOOK),
            }
            self.listen(None);
        }
    }
}

impl Crew for HostCrew {
    fn start(&mut self, epoch: Epoch, recorder: &FlightRecorder) -> Result<Vec<(usize, String)>> {
        let Epoch { number, ranks, from } = epoch;
        (self.epoch, self.ranks) = (number, ranks);
        self.codes = vec![None; ranks];
        let (there, shares) = self.shares(ranks);
        let store = |at: usize| {
            let host = &self.hosts[at];
            format!("{}:{}", host.address, host.store.unwrap_or_default())
        };
        let used = there.iter().zip(&shares).filter(|(_, share)| !share.is_empty());
        let stores: Vec<(String, usize)> =
            used.map(|(&at, share)| (store(at), share.len())).collect();
        let first = there.first().map(|&at| self.hosts[at].address.clone()).unwrap_or_default();
        let (rank, cause, phase) = recorder.job().last_lost();
        let common = HostStart {
            epoch: number,
            ranks,
            capacity: self.capacity,
            meet: (first, u64::from(self.port)),
            origin: origin_numbers(from),
            job: recorder.job().snapshot(),
            lost: (rank, (cause, phase)),
            stores,
            ..HostStart::default()
        };
        for host in &mut self.hosts {
            (host.ranks, host.left) = (0..0, None);
        }
        for (&at, share) in there.iter().zip(&shares) {
            let host = &mut self.hosts[at];
            (host.ranks, host.running) = (share.clone(), share.clone().collect());
            let (first, count) = (share.start, share.len());
            let start = HostStart { first, count, ..common.clone() };
            if let Some(link) = host.link.as_mut().filter(|_| count > 0) {
                link.send(&Order::Start(Box::new(start)));
            }
        }
        let placed = shares.last().map_or(0, |last| last.end);
        Ok((placed..ranks).map(|rank| (rank, "no host has room for it".to_owned())).collect())
    }

    fn look(&mut self, recorder: &FlightRecorder) -> Vec<(usize, ProcessEnd)> {
        self.listen(Some(recorder));
        std::mem::take(&mut self.ended)
    }

    fn send(&mut self, signal: Signal) {
        let epoch = self.epoch;
        self.tell_all(&Order::Signal { epoch, signal });
    }

    fn is_stopped(&self, rank: usize, recorder: &FlightRecorder) -> bool {
        recorder.rank(rank).is_stopped()
    }

    fn code(&self, rank: usize) -> Option<i32> {
        self.codes.get(rank).copied().flatten()
    }

    fn find_left(&mut self, recorder: &FlightRecorder, left: &mut Left) {
        if left.allowed.is_some() {
            self.refill();
        }
        let (epoch, folder) = (self.epoch, recorder.job().folder());
        self.tell_all(&Order::Inspect { epoch, folder });
        let start = Instant::now();
        let silent = |hosts: &[Host]| hosts.iter().any(|h| h.is_there() && h.left.is_none());
        while silent(&self.hosts) && start.elapsed() < ANSWER {
            self.listen(None);
            std::thread::sleep(LOOK);
        }
        let found: Vec<_> = self.hosts.iter().filter(|host| host.is_there()).collect();
        let found: Vec<_> = found.iter().filter_map(|host| host.left.as_ref()).collect();
        // A checkpoint counts if all hosts see it: they need not share a disk.
        left.checkpoint = found.iter().map(|host| host.checkpoint).min().flatten();
        left.copies = newest_whole(found.iter().map(|host| host.copies.as_slice()));
        left.room = Some(self.room());
        left.memory = self.holds_memory();
    }

    fn finish(&mut self, code: u8) {
        self.tell_all(&Order::End(u64::from(code)));
        let start = Instant::now();
        for host in &mut self.hosts {
            let Some(mut shell) = host.shell.take() else { continue };
            while start.elapsed() < LEAVING && matches!(shell.try_wait(), Ok(None)) {
                std::thread::sleep(LOOK);
            }
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}

impl Drop for HostCrew {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.link = None;
            host.end_shell();
        }
    }
}

/// A line for people.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "note: {text}");
}
