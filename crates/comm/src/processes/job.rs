//! The meeting of a job's processes, and what they tell each other outside of any world.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_sys::Poll;

use super::environment::{Environment, MeetingPoint};
use super::hello::Hello;
use super::line::{Line, Note, write_all};
use super::socket::{Address, Listener, Socket};
use super::world::{Arrivals, Door};
use crate::error::{CommError, Failure};

/// How long a process that could not connect waits before it tries again.
const AGAIN: Duration = Duration::from_millis(10);

/// How long a process waits for the answer to its hello before it takes the other for a stranger.
const ANSWER: Duration = Duration::from_secs(3);

/// How long rank 0 answers after a meeting that failed.
const LATE: Duration = Duration::from_millis(500);

/// The processes of a job, as one of them knows them after they have met.
pub struct Job {
    pub(super) me: Environment,
    pub(super) hello: Hello,
    pub(super) door: Mutex<Door>,
    /// Where each process listens, by rank.
    pub(super) addresses: Vec<Address>,
    /// By rank: on rank 0 the lines to all others, elsewhere the one to rank 0.
    lines: Mutex<Vec<Option<Line>>>,
    pub(super) wait: Duration,
}

impl Job {
    /// Meets the other processes; waits at most this long for them.
    pub fn meet(me: &Environment, wait: Duration) -> Result<Self, CommError> {
        let hello = Hello::new(me.token, me.rank, me.ranks);
        match me.rank {
            0 => Host { me, hello, wait, start: Instant::now() }.gather(),
            _ => Guest { me, hello, wait, start: Instant::now() }.come(),
        }
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.me.rank
    }

    /// How many ranks there are, each a process.
    pub fn ranks(&self) -> usize {
        self.me.ranks
    }

    /// Who this process is.
    pub fn environment(&self) -> &Environment {
        &self.me
    }

    /// What rank 0 gives, on every rank; other ranks give nothing. All must call it together.
    pub fn from_first(&self, given: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let start = Instant::now();
        if self.me.rank == 0 {
            let mut lines = self.lines();
            lines.iter_mut().flatten().for_each(|line| line.send(&Note::Given(given.clone())));
            return Ok(given);
        }
        loop {
            self.check_lines()?;
            if let Some(line) = &mut self.lines()[0]
                && let Some(given) = line.given.pop_front()
            {
                return Ok(given);
            }
            if start.elapsed() >= self.wait {
                let (me, waited) = (self.me.rank, self.wait.as_secs_f64());
                return Err(meeting_error(
                    format!("rank {me} waited {waited:.1} s for what rank 0 measures"),
                    "raise run.timeout_s if rank 0 needs longer",
                ));
            }
            self.rest(&mut Poll::default());
        }
    }

    /// Tells the other processes that this one ends, and with which error; none if it is empty.
    pub fn end(&self, error: &str) {
        let note = Note::Ended(error.to_owned());
        self.lines().iter_mut().flatten().for_each(|line| line.send(&note));
    }

    /// The error that a process ended with, or nothing if it has not said so within this time; an
    /// empty one if it just ended. Only rank 0 hears all; the others hear rank 0.
    pub fn ended(&self, rank: usize, patience: Duration) -> Option<String> {
        let start = Instant::now();
        loop {
            {
                let mut lines = self.lines();
                let line = lines.get_mut(rank)?.as_mut()?;
                line.listen();
                if let Some(text) = &line.ended {
                    return Some(text.clone());
                }
                if line.closed || start.elapsed() >= patience {
                    return None;
                }
            }
            self.rest(&mut Poll::default());
        }
    }

    /// Fails if a process that this one hears has ended.
    pub(super) fn check_lines(&self) -> Result<(), CommError> {
        for (rank, line) in self.lines().iter_mut().enumerate() {
            let Some(line) = line else { continue };
            line.listen();
            let message = match &line.ended {
                Some(text) if text.is_empty() => "its process has ended".into(),
                Some(text) => text.as_str().into(),
                None if line.closed => "its process has ended without a word".into(),
                None => continue,
            };
            return Err(CommError::Aborted(Failure { rank, message }));
        }
        Ok(())
    }

    /// Sleeps until a line, or one of what is added already, can be read.
    pub(super) fn rest(&self, poll: &mut Poll) {
        for line in self.lines().iter().flatten().filter(|line| !line.closed) {
            poll.add(&line.socket, false);
        }
        poll.wait(Duration::from_millis(50));
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Option<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn meeting_error(problem: impl Into<String>, fix: impl Into<String>) -> CommError {
    CommError::Meeting { problem: problem.into(), fix: fix.into() }
}

/// Rank 0 at the meeting.
struct Host<'a> {
    me: &'a Environment,
    hello: Hello,
    wait: Duration,
    start: Instant,
}

impl Host<'_> {
    fn gather(self) -> Result<Job, CommError> {
        let (listener, address) = self.open()?;
        let mut lines: Vec<Option<Line>> = (0..self.me.ranks).map(|_| None).collect();
        let mut addresses = vec![None; self.me.ranks];
        addresses[0] = Some(address);
        let mut arrivals = Arrivals::default();
        match self.receive(&listener, &mut arrivals, &mut lines, &mut addresses) {
            Err(error) => {
                let note = Note::Refused(error.to_string());
                lines.iter_mut().flatten().for_each(|line| line.send(&note));
                self.tell_late_ones(&listener, &mut arrivals, &note);
                Err(error)
            }
            Ok(()) => {
                let addresses: Vec<Address> = addresses.into_iter().flatten().collect();
                let note = Note::Table(write_table(&addresses));
                lines.iter_mut().flatten().for_each(|line| line.send(&note));
                let door = Mutex::new(Door::new(listener, arrivals));
                let (me, lines) = (self.me.clone(), Mutex::new(lines));
                Ok(Job { me, hello: self.hello, door, addresses, lines, wait: self.wait })
            }
        }
    }

    /// Tells ranks that come just after the meeting has failed, which would look for rank 0.
    fn tell_late_ones(&self, listener: &Listener, arrivals: &mut Arrivals, note: &Note) {
        let (start, mut poll) = (Instant::now(), Poll::default());
        while start.elapsed() < LATE {
            arrivals.listen(listener);
            // Those that cannot take part are told so instead.
            if let Ok(Some((_, socket))) = arrivals.next(&self.hello) {
                Line::new(socket).send(note);
                continue;
            }
            poll.clear();
            poll.add(listener, false);
            arrivals.watch(&mut poll);
            poll.wait(LATE.saturating_sub(start.elapsed()));
        }
    }

    /// Opens the meeting point.
    fn open(&self) -> Result<(Listener, Address), CommError> {
        let mut last = String::new();
        for address in candidates(&self.me.meet)? {
            match Listener::open(&address) {
                Ok(listener) => return Ok((listener, address)),
                Err(error) => last = error.to_string(),
            }
        }
        let meet = &self.me.meet;
        Err(meeting_error(
            format!("rank 0 cannot listen at {meet}: {last}"),
            "another job or program may use it: choose another MASTER_PORT, or end the other job",
        ))
    }

    fn receive(
        &self,
        listener: &Listener,
        arrivals: &mut Arrivals,
        lines: &mut [Option<Line>],
        addresses: &mut [Option<Address>],
    ) -> Result<(), CommError> {
        let mut poll = Poll::default();
        loop {
            let missing: Vec<usize> =
                (1..lines.len()).filter(|&rank| lines[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.start.elapsed() >= self.wait {
                return Err(self.missing(&missing));
            }
            arrivals.listen(listener);
            while let Some((hello, socket)) = arrivals.next(&self.hello)? {
                self.welcome(hello, socket, lines, addresses)?;
            }
            for (rank, line) in lines.iter_mut().enumerate() {
                let Some(line) = line else { continue };
                line.listen();
                if line.closed {
                    let message = "its process ended while ranks were meeting".into();
                    return Err(CommError::Aborted(Failure { rank, message }));
                }
            }
            poll.clear();
            poll.add(listener, false);
            arrivals.watch(&mut poll);
            lines.iter().flatten().for_each(|line| poll.add(&line.socket, false));
            let left = self.wait.saturating_sub(self.start.elapsed());
            poll.wait(left.min(Duration::from_millis(50)));
        }
    }

    fn welcome(
        &self,
        hello: Hello,
        socket: Socket,
        lines: &mut [Option<Line>],
        addresses: &mut [Option<Address>],
    ) -> Result<(), CommError> {
        let rank = hello.rank as usize;
        if lines[rank].is_some() {
            let ranks = self.me.ranks;
            let problem = format!("two processes say that they are rank {rank} of {ranks}");
            Line::new(socket).send(&Note::Refused(problem.clone()));
            return Err(meeting_error(problem, "give every process its own RANK"));
        }
        addresses[rank] = Some(match (socket.ends(), &self.me.meet) {
            (Some((seen, _)), _) => Address::Tcp(SocketAddr::new(seen, hello.port)),
            (None, MeetingPoint::Path(path)) => Address::Path(path_of(path, rank)),
            (None, MeetingPoint::Host { .. }) => return Ok(()),
        });
        let mut line = Line::new(socket);
        line.send(&Note::Welcome);
        lines[rank] = Some(line);
        Ok(())
    }

    fn missing(&self, missing: &[usize]) -> CommError {
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let plural = if names.len() > 1 { "ranks" } else { "rank" };
        let (ranks, meet, waited) = (self.me.ranks, &self.me.meet, self.wait.as_secs_f64());
        meeting_error(
            format!(
                "{plural} {} of {ranks} did not come to {meet} within {waited:.1} s",
                names.join(", ")
            ),
            "see whether they were started, and can reach that address; run.timeout_s allows more time",
        )
    }
}

/// Any other rank at the meeting.
struct Guest<'a> {
    me: &'a Environment,
    hello: Hello,
    wait: Duration,
    start: Instant,
}

impl Guest<'_> {
    fn come(mut self) -> Result<Job, CommError> {
        let listener = self.listen()?;
        self.hello.port = listener.as_ref().map_or(0, Listener::port);
        let (mut line, listener) = self.find(listener)?;
        let table = loop {
            match line.next() {
                Some(Note::Table(table)) => break table,
                Some(Note::Refused(text) | Note::Ended(text)) => {
                    let message = text.as_str().into();
                    return Err(CommError::Aborted(Failure { rank: 0, message }));
                }
                Some(_) => {}
                None if line.closed => {
                    let message = "its process ended while ranks were meeting".into();
                    return Err(CommError::Aborted(Failure { rank: 0, message }));
                }
                None if self.start.elapsed() >= self.wait + ANSWER => return Err(self.alone()),
                None => rest(&line.socket),
            }
        };
        let reached = line.socket.ends().map(|(host, _)| host);
        let addresses = read_table(&table, self.me, reached).ok_or_else(|| {
            meeting_error("rank 0 sent an invalid list of addresses", "start the job again")
        })?;
        let mut lines: Vec<Option<Line>> = (0..self.me.ranks).map(|_| None).collect();
        lines[0] = Some(line);
        let (me, lines) = (self.me.clone(), Mutex::new(lines));
        let door = Mutex::new(Door::new(listener, Arrivals::default()));
        Ok(Job { me, hello: self.hello, door, addresses, lines, wait: self.wait })
    }

    /// Opens the own socket, if ranks meet at a path. Otherwise the address is known only when rank
    /// 0 was reached.
    fn listen(&self) -> Result<Option<Listener>, CommError> {
        let MeetingPoint::Path(path) = &self.me.meet else { return Ok(None) };
        self.open(&Address::Path(path_of(path, self.me.rank))).map(Some)
    }

    fn open(&self, at: &Address) -> Result<Listener, CommError> {
        let rank = self.me.rank;
        Listener::open(at).map_err(|error| {
            let problem = format!("rank {rank} cannot listen at {at}: {error}");
            meeting_error(problem, "another process may be this rank: start the job again")
        })
    }

    /// Finds rank 0, and is welcomed.
    fn find(&mut self, own: Option<Listener>) -> Result<(Line, Listener), CommError> {
        let mut own = own;
        while self.start.elapsed() < self.wait {
            let addresses = candidates(&self.me.meet)?;
            for address in &addresses {
                let left = self.wait.saturating_sub(self.start.elapsed()).min(ANSWER);
                let Ok(mut socket) = Socket::connect(address, left) else { continue };
                let listener = match own.take() {
                    Some(listener) => listener,
                    None => self.open(&beside(&socket))?,
                };
                self.hello.port = listener.port();
                write_all(&mut socket, &self.hello.bytes(), ANSWER);
                let mut line = Line::new(socket);
                match answer(&mut line, left) {
                    Some(Note::Welcome) => return Ok((line, listener)),
                    Some(Note::Refused(text)) if !text.is_empty() => {
                        let message = text.as_str().into();
                        return Err(CommError::Aborted(Failure { rank: 0, message }));
                    }
                    // Not rank 0 of this job. Where there are several ports, it has another one.
                    Some(_) if addresses.len() == 1 => return Err(self.other_job(address)),
                    None if addresses.len() == 1 && !line.closed && left == ANSWER => {
                        return Err(self.other_job(address));
                    }
                    _ => own = Some(listener),
                }
            }
            std::thread::sleep(AGAIN);
        }
        Err(self.alone())
    }

    fn other_job(&self, address: &Address) -> CommError {
        let rank = self.me.rank;
        meeting_error(
            format!("rank {rank} was refused at {address}: another job or program listens there"),
            "choose another MASTER_PORT, or end the other job",
        )
    }

    fn alone(&self) -> CommError {
        let (rank, ranks, meet) = (self.me.rank, self.me.ranks, &self.me.meet);
        let waited = self.wait.as_secs_f64();
        meeting_error(
            format!("rank {rank} of {ranks} found no rank 0 at {meet} within {waited:.1} s"),
            "see whether rank 0 was started, and whether MASTER_ADDR names its host; run.timeout_s \
             allows more time",
        )
    }
}

/// The first note on a line, for at most this time.
fn answer(line: &mut Line, patience: Duration) -> Option<Note> {
    let start = Instant::now();
    loop {
        let note = line.next();
        if note.is_some() || line.closed || start.elapsed() >= patience {
            return note;
        }
        rest(&line.socket);
    }
}

/// Any port of the host address that reached rank 0.
fn beside(socket: &Socket) -> Address {
    let here = socket.ends().map_or(IpAddr::from([127, 0, 0, 1]), |(_, here)| here);
    Address::Tcp(SocketAddr::new(here, 0))
}

fn rest(socket: &Socket) {
    let mut poll = Poll::default();
    poll.add(socket, false);
    poll.wait(Duration::from_millis(50));
}

/// The addresses of a meeting point, in the order in which they are tried.
fn candidates(meet: &MeetingPoint) -> Result<Vec<Address>, CommError> {
    let (host, ports) = match meet {
        MeetingPoint::Path(path) => return Ok(vec![Address::Path(path.clone())]),
        MeetingPoint::Host { host, ports } => (host, ports),
    };
    let found = (host.as_str(), 0).to_socket_addrs().map(|mut found| found.next());
    match found {
        Ok(Some(address)) => {
            let at = |&port: &u16| Address::Tcp(SocketAddr::new(address.ip(), port));
            Ok(ports.iter().map(at).collect())
        }
        Ok(None) | Err(_) => Err(meeting_error(
            format!("MASTER_ADDR = {host} is not a host that can be found"),
            "set it to the name or the address of rank 0's host",
        )),
    }
}

/// Where a rank other than 0 listens, if ranks meet at a path.
fn path_of(meet: &Path, rank: usize) -> PathBuf {
    let mut path = meet.as_os_str().to_owned();
    path.push(format!(".{rank}"));
    path.into()
}

/// For each rank 16 bytes of its host and 2 of its port; paths are the same everywhere.
fn write_table(addresses: &[Address]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(18 * addresses.len());
    for address in addresses {
        let (host, port) = match address {
            Address::Path(_) => ([0; 16], 0),
            Address::Tcp(address) => {
                let host = match address.ip() {
                    IpAddr::V4(host) => host.to_ipv6_mapped(),
                    IpAddr::V6(host) => host,
                };
                (host.octets(), address.port())
            }
        };
        bytes.extend_from_slice(&host);
        bytes.extend_from_slice(&port.to_le_bytes());
    }
    bytes
}

/// `reached` is the address at which this process reached rank 0.
fn read_table(bytes: &[u8], me: &Environment, reached: Option<IpAddr>) -> Option<Vec<Address>> {
    if bytes.len() != 18 * me.ranks {
        return None;
    }
    let entry = |(rank, entry): (usize, &[u8])| match &me.meet {
        MeetingPoint::Path(path) if rank == 0 => Some(Address::Path(path.clone())),
        MeetingPoint::Path(path) => Some(Address::Path(path_of(path, rank))),
        MeetingPoint::Host { .. } => {
            let host: [u8; 16] = entry[..16].try_into().ok()?;
            let host = IpAddr::from(host).to_canonical();
            // A process that rank 0 sees at its own host is, from elsewhere, where rank 0 is.
            let host = if host.is_loopback() || rank == 0 { reached? } else { host };
            Some(Address::Tcp(SocketAddr::new(host, u16::from_le_bytes([entry[16], entry[17]]))))
        }
    };
    bytes.chunks_exact(18).enumerate().map(entry).collect()
}
