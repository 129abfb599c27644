//! The line between rank 0 and another process: short notes, in order.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use phalanx_sys::Poll;

use super::socket::Socket;
use crate::streams::Stream;

/// What is said on a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The hello is accepted; more follows when all have come.
    Welcome,
    /// The hello is not accepted, or the meeting has failed: why.
    Refused(String),
    /// Where all processes listen.
    Table(Vec<u8>),
    /// What rank 0 gives all others.
    Given(Vec<u8>),
    /// The sender's process ends, with this error; without one if it is empty.
    Ended(String),
}

/// Bytes before a note: its kind and its length.
const HEAD: usize = 5;

/// The most bytes of a note.
const MOST: usize = 1 << 20;

/// How long a note may take to be written.
const PATIENCE: Duration = Duration::from_secs(2);

/// One end of a line.
pub(super) struct Line {
    pub(super) socket: Socket,
    held: Vec<u8>,
    /// Notes that were read and are not asked for yet.
    pub(super) given: VecDeque<Vec<u8>>,
    /// The other's last words.
    pub(super) ended: Option<String>,
    /// Whether the other end is closed.
    pub(super) closed: bool,
}

impl Line {
    pub(super) fn new(socket: Socket) -> Self {
        Self { socket, held: Vec::new(), given: VecDeque::new(), ended: None, closed: false }
    }

    /// Writes a note. If the other end is closed, that is noticed when reading.
    pub(super) fn send(&mut self, note: &Note) {
        let (kind, body): (u8, &[u8]) = match note {
            Note::Welcome => (0, &[]),
            Note::Refused(text) => (1, text.as_bytes()),
            Note::Table(bytes) => (2, bytes),
            Note::Given(bytes) => (3, bytes),
            Note::Ended(text) => (4, text.as_bytes()),
        };
        let body = &body[..body.len().min(MOST)];
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(body);
        write_all(&mut self.socket, &bytes, PATIENCE);
    }

    /// The next note, if one has come. Anything else than a note closes the line.
    pub(super) fn next(&mut self) -> Option<Note> {
        loop {
            match read_note(&self.held) {
                Ok(Some((note, len))) => {
                    self.held.drain(..len);
                    return Some(note);
                }
                Ok(None) if self.closed => return None,
                Ok(None) => {}
                Err(()) => {
                    self.closed = true;
                    self.held.clear();
                    return None;
                }
            }
            // Never more than this note: on streams of a world, frames follow the first one.
            let mut room = [0; 4096];
            let left = missing(&self.held).min(room.len());
            match self.socket.read(&mut room[..left]) {
                Ok(0) => self.closed = true,
                Ok(count) => self.held.extend_from_slice(&room[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(_) => self.closed = true,
            }
        }
    }

    /// Reads what has come once ranks have met.
    pub(super) fn listen(&mut self) {
        while let Some(note) = self.next() {
            match note {
                Note::Given(bytes) => self.given.push_back(bytes),
                Note::Ended(text) | Note::Refused(text) => self.ended = Some(text),
                Note::Welcome | Note::Table(_) => {}
            }
        }
    }
}

/// The note at the start of what was received, and its length; nothing if it is not complete.
fn read_note(bytes: &[u8]) -> Result<Option<(Note, usize)>, ()> {
    let Some((&[kind, a, b, c, d], rest)) = bytes.split_first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    if len > MOST || kind > 4 {
        return Err(());
    }
    let Some(body) = rest.get(..len) else { return Ok(None) };
    let text = || String::from_utf8_lossy(body).into_owned();
    let note = match kind {
        0 => Note::Welcome,
        1 => Note::Refused(text()),
        2 => Note::Table(body.to_vec()),
        3 => Note::Given(body.to_vec()),
        _ => Note::Ended(text()),
    };
    Ok(Some((note, HEAD + len)))
}

/// How many bytes are missing until the next note is complete, or its length is known.
fn missing(held: &[u8]) -> usize {
    match held.split_first_chunk::<HEAD>() {
        None => HEAD - held.len(),
        Some((&[_, a, b, c, d], rest)) => {
            (u32::from_le_bytes([a, b, c, d]) as usize).saturating_sub(rest.len()).max(1)
        }
    }
}

/// Writes all bytes, for at most this time; says whether that worked.
pub(super) fn write_all(socket: &mut Socket, mut bytes: &[u8], patience: Duration) -> bool {
    let (start, mut poll) = (Instant::now(), Poll::default());
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(0) => return false,
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let left = patience.saturating_sub(start.elapsed());
                if left.is_zero() {
                    return false;
                }
                poll.clear();
                socket.watch(&mut poll, true);
                poll.wait(left.min(Duration::from_millis(50)));
            }
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Line, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        (Line::new(Socket::Unix(near)), far)
    }

    #[test]
    fn notes_arrive_in_order_and_the_end_is_seen() {
        let (mut one, far) = pair();
        far.set_nonblocking(true).unwrap();
        let mut other = Line::new(Socket::Unix(far));
        let notes = [
            Note::Welcome,
            Note::Table(vec![7; 100_000]),
            Note::Given(vec![]),
            Note::Refused("no".to_owned()),
            Note::Ended("out of memory".to_owned()),
        ];
        for note in notes {
            one.send(&note);
            assert_eq!(other.next(), Some(note));
            assert!(other.held.is_empty());
        }
        assert_eq!((other.next(), other.closed), (None, false));
        drop(one);
        assert_eq!((other.next(), other.closed), (None, true));
    }

    #[test]
    fn other_bytes_close_a_line() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], &[9, 0, 0, 0, 0], &[3, 255, 255, 255, 255]] {
            let (mut line, mut far) = pair();
            far.write_all(bytes).unwrap();
            assert_eq!((line.next(), line.closed), (None, true));
        }
    }
    #[test]
    fn other_bytes_are_never_more_than_they_are() {
        let mut word = 3_u64;
        let mut next = move || {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (word >> 40) as usize
        };
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = (0..next() % 40).map(|_| next() as u8).collect();
            if bytes.len() >= HEAD && next() % 4 > 0 {
                bytes[..HEAD].copy_from_slice(&[(next() % 6) as u8, next() as u8 % 48, 0, 0, 0]);
            }
            if let Ok(Some((_, len))) = read_note(&bytes) {
                assert!((HEAD..=bytes.len()).contains(&len));
            }
            // What is asked for next is never more than a note may have.
            assert!(missing(&bytes) <= u32::MAX as usize);
        }
    }
}
