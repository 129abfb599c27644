//! Fresh streams between all processes of a job: one set for each world.

use std::collections::HashMap;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use phalanx_sys::Poll;

use super::hello::{HELLO, Hello, Refusal};
use super::job::{Membership, Reach, meeting_error};
use super::line::{Line, Note, write_all};
use super::socket::{Address, Listener, Socket};
use crate::error::CommError;
use crate::streams::Stream;

/// Connections that have not said who they are: the most at once, and how long each may take.
const STRANGERS: usize = 256;
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections whose hello has not been read to its end.
#[derive(Default)]
pub(super) struct Arrivals {
    list: Vec<Arrival>,
}

struct Arrival {
    socket: Socket,
    held: [u8; HELLO],
    count: usize,
    since: Instant,
}

impl Arrivals {
    /// Connections that are open already.
    pub(super) fn of(sockets: impl Iterator<Item = Socket>) -> Self {
        let since = Instant::now();
        let arrival = |socket| Arrival { socket, held: [0; HELLO], count: 0, since };
        Self { list: sockets.map(arrival).collect() }
    }

    /// Takes all new connections.
    pub(super) fn listen(&mut self, listener: &Listener) {
        self.list.retain(|arrival| arrival.since.elapsed() < PATIENCE);
        while let Some(socket) = listener.accept() {
            if self.list.len() >= STRANGERS {
                self.list.remove(0);
            }
            let since = Instant::now();
            self.list.push(Arrival { socket, held: [0; HELLO], count: 0, since });
        }
    }

    /// The next connection of this job; others are refused with an empty note. Fails if a process
    /// of the job cannot take part.
    pub(super) fn next(&mut self, own: &Hello) -> Result<Option<(Hello, Socket)>, CommError> {
        let mut at = 0;
        while at < self.list.len() {
            match self.list[at].read() {
                Some(false) => at += 1,
                None => drop(self.list.remove(at)),
                Some(true) => {
                    let Arrival { socket, held, .. } = self.list.remove(at);
                    match Hello::read(&held, own) {
                        Ok(hello) => return Ok(Some((hello, socket))),
                        Err(Refusal::Stranger) => {
                            Line::new(socket).send(&Note::Refused(String::new()));
                        }
                        Err(Refusal::Unfit(text)) => {
                            Line::new(socket).send(&Note::Refused(text.clone()));
                            let (problem, fix) = text.split_once(": ").unwrap_or((&text, ""));
                            return Err(meeting_error(problem, fix));
                        }
                    }
                }
            }
        }
        Ok(None)
    }

    /// Adds all connections to what is waited for.
    pub(super) fn watch(&self, poll: &mut Poll) {
        self.list.iter().for_each(|arrival| arrival.socket.watch(poll, false));
    }
}

impl Arrival {
    /// Reads on; whether the hello is complete, or nothing if the connection is closed.
    fn read(&mut self) -> Option<bool> {
        while self.count < HELLO {
            match self.socket.read(&mut self.held[self.count..]) {
                Ok(0) => return None,
                Ok(count) => self.count += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(false),
                Err(_) => return None,
            }
        }
        Some(true)
    }
}

/// Where other processes connect to this one, and who came early.
pub(super) struct Door {
    listener: Listener,
    arrivals: Arrivals,
    /// By world and rank: streams for a world that this process has not begun yet.
    early: HashMap<(u64, usize), Socket>,
    /// How many worlds this process has begun.
    worlds: u64,
}

impl Door {
    pub(super) fn new(listener: Listener, arrivals: Arrivals) -> Self {
        Self { listener, arrivals, early: HashMap::new(), worlds: 0 }
    }
}

/// A connection for each direction: on one, large blocks that cross took twice as long in some processes, because
/// TCP took packets for lost that were not (docs/communication.md).
pub(super) struct TwoWays {
    writes: Socket,
    reads: Socket,
}

impl Read for TwoWays {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reads.read(bytes)
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.reads.read_vectored(slices)
    }
}

impl Write for TwoWays {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writes.write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.writes.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writes.flush()
    }
}

impl Stream for TwoWays {
    fn watch(&self, poll: &mut Poll, write: bool) {
        self.reads.watch(poll, false);
        if write {
            self.writes.watch(poll, true);
        }
    }
}

impl Membership {
    /// As `connect`, with two connections for each stream. Of two ranks the lower one writes to the first.
    pub(super) fn connect_two_ways(&self) -> Result<Vec<Option<TwoWays>>, CommError> {
        let ways = self.connect()?.into_iter().zip(self.connect()?);
        let stream = |(rank, ways)| match ways {
            (Some(first), Some(second)) if rank > self.rank() => {
                Some(TwoWays { writes: first, reads: second })
            }
            (Some(first), Some(second)) => Some(TwoWays { writes: second, reads: first }),
            _ => None,
        };
        Ok(ways.enumerate().map(stream).collect())
    }

    /// A stream to every other process, by rank, for a new world. All processes must call it
    /// together; worlds are counted, so that a process that is ahead is not taken for another.
    pub(super) fn connect(&self) -> Result<Vec<Option<Socket>>, CommError> {
        let (door, addresses) = match &self.reach {
            Reach::Sockets { door, addresses } => (door, addresses),
            Reach::Mpi(mpi) => {
                let streams = mpi.streams(self.ranks()).unwrap_or_default();
                return Ok(streams.into_iter().map(|stream| stream.map(Socket::Mpi)).collect());
            }
        };
        let mut door = door.lock().unwrap_or_else(PoisonError::into_inner);
        let door = &mut *door;
        door.worlds += 1;
        let (world, me, start) = (door.worlds, self.rank(), Instant::now());
        let mut calls = self.call(addresses, world)?;
        let mut streams: Vec<Option<Socket>> = (0..self.ranks()).map(|_| None).collect();
        let mut poll = Poll::default();
        loop {
            door.arrivals.listen(&door.listener);
            while let Some((hello, socket)) = door.arrivals.next(&self.hello)? {
                let (mut line, rank) = (Line::new(socket), hello.rank as usize);
                if hello.world == 0 {
                    line.send(&Note::Ended(self.twice(rank)));
                    continue;
                }
                // The line is only used to answer; data follow on the same stream.
                line.send(&Note::Welcome);
                door.early.insert((hello.world, rank), line.socket);
            }
            for (rank, call) in calls.iter_mut().enumerate() {
                match call.as_mut().and_then(Line::next) {
                    Some(Note::Welcome) => streams[rank] = call.take().map(|line| line.socket),
                    Some(Note::Refused(text)) => {
                        return Err(meeting_error(text, format!("rank {rank} says so")));
                    }
                    _ => {}
                }
            }
            for (rank, stream) in streams.iter_mut().enumerate().skip(me + 1) {
                if let Some(socket) = door.early.remove(&(world, rank)) {
                    *stream = Some(socket);
                }
            }
            let missing: Vec<usize> =
                (0..self.ranks()).filter(|&r| r != me && streams[r].is_none()).collect();
            if missing.is_empty() {
                return Ok(streams);
            }
            self.check_lines()?;
            if start.elapsed() >= self.wait {
                return Err(self.absent(&missing));
            }
            poll.clear();
            poll.add(&door.listener, false);
            door.arrivals.watch(&mut poll);
            let open = calls.iter().flatten().filter(|line| !line.closed);
            open.for_each(|line| line.socket.watch(&mut poll, false));
            self.rest(&mut poll);
        }
    }

    /// Calls all lower ranks, which listen since the meeting.
    fn call(&self, addresses: &[Address], world: u64) -> Result<Vec<Option<Line>>, CommError> {
        let hello = Hello { world, ..self.hello };
        let mut calls = Vec::new();
        for (rank, address) in addresses.iter().enumerate().take(self.rank()) {
            let mut socket = Socket::connect(address, self.wait).map_err(|error| {
                // If it has ended, that is the reason.
                self.check_lines().err().unwrap_or_else(|| {
                    meeting_error(
                        format!(
                            "rank {} cannot reach rank {rank} at {address}: {error}",
                            self.rank()
                        ),
                        "see whether its process runs, and whether a firewall is in between",
                    )
                })
            })?;
            write_all(&mut socket, &hello.bytes(), PATIENCE);
            calls.push(Some(Line::new(socket)));
        }
        Ok(calls)
    }

    /// The refusal of a process that comes to the meeting when it is over.
    fn twice(&self, rank: usize) -> String {
        format!("another process is rank {rank} of {} already", self.ranks())
    }

    fn absent(&self, missing: &[usize]) -> CommError {
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let (me, waited) = (self.rank(), self.wait.as_secs_f64());
        meeting_error(
            format!("rank {me} waited {waited:.1} s for rank {} to connect", names.join(", ")),
            "every process must run the same program with the same arguments",
        )
    }
}
