//! How a rank and an agent exchange the bytes of copies, over TCP.
//!
//! A connection begins with a hello of fixed size: the token, which is compared before anything else is
//! read, and the epoch. Then the rank puts files and asks for parts of them. Every length is bounded.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use phalanx_checkpoint::FileSink;
use phalanx_comm::Token;

use super::store::Store;
use crate::codec::{Code, decoded, encoded};
use crate::hosts::{HeldVersion, read_frame, write_frame};

const MAGIC: [u8; 8] = *b"PHXCOPY1";
const HELLO: usize = 48;

/// How long a hello may take, a connection, and anything else.
const GREETING: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(60);

/// The most bytes of one transfer, and of a file.
const PART: usize = 4 << 20;
const MOST: u64 = 1 << 42;

/// What a rank asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Request {
    /// A file of a copy follows, of so many bytes.
    Put { step: u64, name: String, bytes: u64 },
    /// Bytes of it, which follow.
    Write { at: u64, bytes: u64 },
    /// The file is complete.
    Done,
    /// Bytes of a file; all of it if there are none.
    Get { step: u64, name: String, at: u64, bytes: u64 },
    /// What is held.
    List,
}

impl Code for Request {
    fn put(&self, out: &mut Vec<u8>) {
        match self.clone() {
            Request::Put { step, name, bytes } => (0_u64, (step, (name, bytes))).put(out),
            Request::Write { at, bytes } => (1_u64, (at, bytes)).put(out),
            Request::Done => 2_u64.put(out),
            Request::Get { step, name, at, bytes } => {
                (3_u64, ((step, name), (at, bytes))).put(out);
            }
            Request::List => 4_u64.put(out),
        }
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match u64::take(from)? {
            0 => {
                let (step, (name, bytes)) = Code::take(from)?;
                Request::Put { step, name, bytes }
            }
            1 => {
                let (at, bytes) = Code::take(from)?;
                Request::Write { at, bytes }
            }
            2 => Request::Done,
            3 => {
                let ((step, name), (at, bytes)) = Code::take(from)?;
                Request::Get { step, name, at, bytes }
            }
            4 => Request::List,
            _ => return None,
        })
    }
}

/// A rank's connection to an agent.
#[derive(Debug)]
pub(super) struct Connection(TcpStream);

impl Connection {
    pub(super) fn open(address: &str, token: Token, epoch: u64) -> io::Result<Self> {
        let mut last = io::Error::other("it has no address");
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, GREETING) {
                Ok(stream) => return Self::greet(stream, token, epoch),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn greet(mut stream: TcpStream, token: Token, epoch: u64) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let hello = [&MAGIC[..], &token.bytes(), &epoch.to_le_bytes()].concat();
        stream.write_all(&hello)?;
        let mut own = Self(stream);
        own.answer().map(|_| own)
    }

    /// Begins a file.
    pub(super) fn put(&mut self, step: u64, name: &str, bytes: u64) -> io::Result<()> {
        self.ask(&Request::Put { step, name: name.to_owned(), bytes })
    }

    /// Writes bytes of the file that was begun.
    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        for (part, at) in bytes.chunks(PART).zip((at..).step_by(PART)) {
            self.ask(&Request::Write { at, bytes: part.len() as u64 })?;
            self.0.write_all(part)?;
        }
        Ok(())
    }

    /// Ends the file, and waits until the agent has all of it.
    pub(super) fn done(&mut self) -> io::Result<()> {
        self.ask(&Request::Done)?;
        self.answer().map(drop)
    }

    /// Reads bytes of a file.
    pub(super) fn get(&mut self, step: u64, name: &str, at: u64, out: &mut [u8]) -> io::Result<()> {
        for (part, at) in out.chunks_mut(PART).zip((at..).step_by(PART)) {
            let (name, bytes) = (name.to_owned(), part.len() as u64);
            self.ask(&Request::Get { step, name, at, bytes })?;
            let found = self.answer()?;
            if found.len() != part.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            part.copy_from_slice(&found);
        }
        Ok(())
    }

    /// Reads a small file.
    pub(super) fn whole(&mut self, step: u64, name: &str) -> io::Result<Vec<u8>> {
        self.ask(&Request::Get { step, name: name.to_owned(), at: 0, bytes: 0 })?;
        self.answer()
    }

    /// What the agent holds.
    pub(super) fn list(&mut self) -> io::Result<Vec<HeldVersion>> {
        self.ask(&Request::List)?;
        decoded(&self.answer()?).ok_or_else(|| io::Error::other("its answer cannot be read"))
    }

    fn ask(&mut self, request: &Request) -> io::Result<()> {
        write_frame(&mut self.0, &encoded(request))
    }

    /// The answer: a frame that begins with 1, or a reason after 0.
    fn answer(&mut self) -> io::Result<Vec<u8>> {
        let gone = || io::Error::other("it has closed the connection: of another job or epoch?");
        let mut body = read_frame(&mut self.0)?.ok_or_else(gone)?;
        match body.first() {
            Some(1) => Ok(body.split_off(1)),
            _ => Err(io::Error::other(String::from_utf8_lossy(body.get(1..).unwrap_or_default()))),
        }
    }
}

/// A file that is written to one agent or two.
#[derive(Debug)]
pub(crate) struct CopySink(Mutex<Vec<Connection>>);

impl CopySink {
    pub(super) fn new(connections: Vec<Connection>) -> Self {
        Self(Mutex::new(connections))
    }

    fn each(&self, mut tell: impl FnMut(&mut Connection) -> io::Result<()>) -> io::Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter_mut().try_for_each(&mut tell)
    }
}

impl FileSink for CopySink {
    fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.each(|connection| connection.write(at, bytes))
    }

    fn finish(&self) -> io::Result<()> {
        self.each(Connection::done)
    }
}

/// Answers a rank until it closes its connection.
pub(super) fn serve(store: &Store, mut stream: TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(GREETING))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello)?;
    let token = Token::from_bytes(std::array::from_fn(|at| hello[8 + at]));
    // The token is compared first; without it the rest is not looked at.
    if token != store.token || hello[..8] != MAGIC {
        return Ok(());
    }
    let epoch = u64::from_le_bytes(std::array::from_fn(|at| hello[40 + at]));
    let current = |epoch: u64| match epoch == store.epoch() {
        true => Ok(Vec::new()),
        false => Err("another epoch of the job runs".to_owned()),
    };
    reply(&mut stream, current(epoch))?;
    stream.set_read_timeout(None)?;
    let mut open: Option<(u64, String, Vec<u8>)> = None;
    while let Some(body) = read_frame(&mut stream)? {
        let request = decoded(&body).ok_or_else(|| io::Error::other("not a request"))?;
        match request {
            Request::Put { step, name, bytes } => {
                store.make_room();
                open = Some((step, name, room(bytes)?));
            }
            Request::Write { at, bytes } => {
                let (_, _, held) = open.as_mut().ok_or_else(|| io::Error::other("no file"))?;
                let range = usize::try_from(at).ok().zip(usize::try_from(bytes).ok());
                let part = range.and_then(|(at, bytes)| held.get_mut(at..at.checked_add(bytes)?));
                stream.read_exact(part.ok_or_else(|| io::Error::other("outside of the file"))?)?;
            }
            Request::Done => {
                let kept = open
                    .take()
                    .is_some_and(|(step, name, bytes)| store.keep(epoch, step, name, bytes));
                let late = || "another epoch of the job runs".to_owned();
                reply(&mut stream, kept.then(Vec::new).ok_or_else(late))?;
            }
            Request::Get { step, name, at, bytes } => {
                let found = current(epoch).and_then(|_| part(store, step, &name, at, bytes));
                reply(&mut stream, found)?;
            }
            Request::List => reply(&mut stream, current(epoch).map(|_| encoded(&store.held())))?,
        }
    }
    Ok(())
}

/// Zeros for a file, if there is memory for them.
fn room(bytes: u64) -> io::Result<Vec<u8>> {
    let bytes = usize::try_from(bytes.min(MOST)).map_err(io::Error::other)?;
    let mut room = Vec::new();
    room.try_reserve_exact(bytes).map_err(io::Error::other)?;
    room.resize(bytes, 0);
    Ok(room)
}

fn part(store: &Store, step: u64, name: &str, at: u64, bytes: u64) -> Result<Vec<u8>, String> {
    let missing = || format!("it has no such bytes of {name} after step {step}");
    let file = store.file(step, name).ok_or_else(missing)?;
    let at = usize::try_from(at).map_err(|_| missing())?;
    let bytes = if bytes == 0 { file.len() } else { bytes as usize };
    let part = at.checked_add(bytes).and_then(|end| file.get(at..end));
    Ok(part.ok_or_else(missing)?.to_vec())
}

fn reply(stream: &mut TcpStream, answer: Result<Vec<u8>, String>) -> io::Result<()> {
    let (mark, body) = match answer {
        Ok(body) => (1, body),
        Err(why) => (0, why.into_bytes()),
    };
    write_frame(stream, &[&[mark], &body[..]].concat())
}
