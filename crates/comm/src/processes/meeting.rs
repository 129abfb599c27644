//! How processes that know only where they meet find each other.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use phalanx_sys::Poll;

use super::addresses::{candidates, path_of, read_table, write_table};
use super::environment::{Environment, MeetingPoint};
use super::hello::Hello;
use super::job::{Membership, Reach, meeting_error};
use super::line::{Line, Note, write_all};
use super::socket::{Address, Listener, Socket};
use super::world::{Arrivals, Door};
use crate::error::{CommError, Failure};
use crate::mpi::Mpi;
use crate::streams::Stream;

/// How long a process that could not connect waits before it tries again.
const AGAIN: Duration = Duration::from_millis(10);

/// How long a process waits for the answer to its hello before it takes the other for a stranger.
const ANSWER: Duration = Duration::from_secs(3);

/// How long rank 0 answers after a meeting that failed.
const LATE: Duration = Duration::from_millis(500);

/// How long a process waits before it says what for.
const NOTICE: Duration = Duration::from_secs(5);

/// What to do about two processes with one rank: they may also belong to two jobs.
const SAME_RANK: &str = "give every process its own RANK, and every job on these hosts its own MASTER_PORT or PHALANX_TOKEN";

/// Rank 0 at the meeting.
pub(super) struct Host<'a> {
    pub(super) me: &'a Environment,
    pub(super) hello: Hello,
    pub(super) wait: Duration,
    pub(super) start: Instant,
    /// The MPI job whose processes meet, if it is one.
    pub(super) mpi: Option<&'a Arc<Mpi>>,
    /// Tells people what is waited for, if that lasts.
    pub(super) tell: &'a dyn Fn(&str),
}

impl Host<'_> {
    pub(super) fn gather(self) -> Result<Membership, CommError> {
        let mut lines: Vec<Option<Line>> = (0..self.me.ranks).map(|_| None).collect();
        let mut addresses = vec![None; self.me.ranks];
        let (listener, mut arrivals) = match self.mpi {
            Some(mpi) => {
                let lines = (1..self.me.ranks).map(|rank| Socket::Mpi(mpi.line(rank)));
                (None, Arrivals::of(lines))
            }
            None => {
                let (listener, address) = self.open()?;
                addresses[0] = Some(address);
                (Some(listener), Arrivals::default())
            }
        };
        match self.receive(listener.as_ref(), &mut arrivals, &mut lines, &mut addresses) {
            Err(error) => {
                let note = Note::Refused(error.to_string());
                lines.iter_mut().flatten().for_each(|line| line.send(&note));
                self.tell_late_ones(listener.as_ref(), &mut arrivals, &note);
                Err(error)
            }
            Ok(()) => {
                let addresses: Vec<Address> = addresses.into_iter().flatten().collect();
                let note = Note::Table(write_table(&addresses));
                lines.iter_mut().flatten().for_each(|line| line.send(&note));
                let door = listener.map(|listener| Door::new(listener, arrivals));
                let reach = reach(door, addresses, self.mpi)?;
                let (me, lines) = (self.me.clone(), Mutex::new(lines));
                Ok(Membership { me, hello: self.hello, reach, lines, wait: self.wait })
            }
        }
    }

    /// Tells ranks that come just after the meeting has failed, which would look for rank 0.
    fn tell_late_ones(&self, listener: Option<&Listener>, arrivals: &mut Arrivals, note: &Note) {
        let (start, mut poll) = (Instant::now(), Poll::default());
        while start.elapsed() < LATE {
            listener.into_iter().for_each(|listener| arrivals.listen(listener));
            // Those that cannot take part get the reason instead.
            if let Ok(Some((_, socket))) = arrivals.next(&self.hello) {
                Line::new(socket).send(note);
                continue;
            }
            poll.clear();
            listener.into_iter().for_each(|listener| poll.add(listener, false));
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
        listener: Option<&Listener>,
        arrivals: &mut Arrivals,
        lines: &mut [Option<Line>],
        addresses: &mut [Option<Address>],
    ) -> Result<(), CommError> {
        let (mut poll, mut told) = (Poll::default(), false);
        loop {
            let missing: Vec<usize> =
                (1..lines.len()).filter(|&rank| lines[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if self.start.elapsed() >= self.wait {
                return Err(self.missing(&missing));
            }
            if self.start.elapsed() >= NOTICE && !std::mem::replace(&mut told, true) {
                let (ranks, wait) = (named(&missing), self.wait.as_secs_f64());
                (self.tell)(&format!(
                    "{ranks} of {} did not come to {} yet: see whether they were started, and can reach \
                     that address; rank 0 waits for {wait:.0} s in all (run.timeout_s)",
                    self.me.ranks, self.me.meet
                ));
            }
            listener.into_iter().for_each(|listener| arrivals.listen(listener));
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
            listener.into_iter().for_each(|listener| poll.add(listener, false));
            arrivals.watch(&mut poll);
            lines.iter().flatten().for_each(|line| line.socket.watch(&mut poll, false));
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
            return Err(meeting_error(problem, SAME_RANK));
        }
        addresses[rank] = match (socket.ends(), &self.me.meet) {
            (Some((seen, _)), _) => Some(Address::Tcp(SocketAddr::new(seen, hello.port))),
            (None, MeetingPoint::Path(path)) => Some(Address::Path(path_of(path, rank))),
            (None, MeetingPoint::Mpi) => None,
            (None, MeetingPoint::Host { .. }) => return Ok(()),
        };
        let mut line = Line::new(socket);
        line.send(&Note::Welcome);
        lines[rank] = Some(line);
        Ok(())
    }

    fn missing(&self, missing: &[usize]) -> CommError {
        let (ranks, meet, waited) = (self.me.ranks, &self.me.meet, self.wait.as_secs_f64());
        meeting_error(
            format!("{} of {ranks} did not come to {meet} within {waited:.1} s", named(missing)),
            "see whether they were started, and can reach that address; run.timeout_s allows more time",
        )
    }
}

/// Ranks as text.
fn named(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if names.len() > 1 { "ranks" } else { "rank" }, names.join(", "))
}

/// Any other rank at the meeting.
pub(super) struct Guest<'a> {
    pub(super) me: &'a Environment,
    pub(super) hello: Hello,
    pub(super) wait: Duration,
    pub(super) start: Instant,
    /// The MPI job whose processes meet, if it is one.
    pub(super) mpi: Option<&'a Arc<Mpi>>,
    /// Tells people what is waited for, if that lasts.
    pub(super) tell: &'a dyn Fn(&str),
}

impl Guest<'_> {
    pub(super) fn come(mut self) -> Result<Membership, CommError> {
        let (mut line, listener) = match self.mpi {
            Some(mpi) => (self.greet(mpi), None),
            None => {
                let listener = self.listen()?;
                self.hello.port = listener.as_ref().map_or(0, Listener::port);
                let (line, listener) = self.find(listener)?;
                (line, Some(listener))
            }
        };
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
        let addresses = match self.mpi {
            Some(_) => Some(Vec::new()),
            None => read_table(&table, self.me, reached),
        };
        let addresses = addresses.ok_or_else(invalid)?;
        let mut lines: Vec<Option<Line>> = (0..self.me.ranks).map(|_| None).collect();
        lines[0] = Some(line);
        let (me, lines) = (self.me.clone(), Mutex::new(lines));
        let door = listener.map(|listener| Door::new(listener, Arrivals::default()));
        let reach = reach(door, addresses, self.mpi)?;
        Ok(Membership { me, hello: self.hello, reach, lines, wait: self.wait })
    }

    /// Says hello to rank 0 of an MPI job.
    fn greet(&self, mpi: &Arc<Mpi>) -> Line {
        let mut socket = Socket::Mpi(mpi.line(0));
        write_all(&mut socket, &self.hello.bytes(), ANSWER);
        Line::new(socket)
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
        let (mut own, mut told) = (own, false);
        while self.start.elapsed() < self.wait {
            if self.start.elapsed() >= NOTICE && !std::mem::replace(&mut told, true) {
                let (rank, wait) = (self.me.rank, self.wait.as_secs_f64());
                (self.tell)(&format!(
                    "rank {rank} has found no rank 0 at {} yet: see whether rank 0 was started, and \
                     whether MASTER_ADDR names its host; it waits for {wait:.0} s in all (run.timeout_s)",
                    self.me.meet
                ));
            }
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
                    Some(Note::Ended(problem)) => {
                        return Err(meeting_error(problem, SAME_RANK));
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

/// How a process reaches the others from now on.
fn reach(
    door: Option<Door>,
    addresses: Vec<Address>,
    mpi: Option<&Arc<Mpi>>,
) -> Result<Reach, CommError> {
    match (door, mpi) {
        (_, Some(mpi)) => Ok(Reach::Mpi(mpi.clone())),
        (Some(door), None) => Ok(Reach::Sockets { door: Mutex::new(door), addresses }),
        (None, None) => Err(invalid()),
    }
}

fn invalid() -> CommError {
    meeting_error("rank 0 sent an invalid list of addresses", "start the job again")
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
    socket.watch(&mut poll, false);
    poll.wait(Duration::from_millis(50));
}
