//! What the coordinator of a job and the agents of its hosts tell each other: frames of bytes with their
//! length before them. An empty one only says that its sender lives.
//!
//! Both ends are of the same build, which the first frame of an agent proves. Every frame but that one
//! carries its epoch, and those of another epoch change nothing.

use std::io::{self, Read, Write};
use std::ops::Range;

use phalanx_comm::{JobSnapshot, RankSnapshot, SeenEvent};
use phalanx_recovery::{ProcessEnd, StartPoint};
use phalanx_sys::process::Signal;

use crate::codec::{Bytes, Code, fields};

/// The most bytes of a frame.
const MOST: usize = 16 << 20;

/// What the coordinator says.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Order {
    /// Starts the host's ranks of an epoch.
    Start(Box<HostStart>),
    /// Sends a signal to the ranks of an epoch.
    Signal { epoch: u64, signal: Signal },
    /// Asks what is left of an epoch: checkpoints of the run in this folder, and copies.
    Inspect { epoch: u64, folder: String },
    /// The job has ended, with this exit code.
    End(u64),
}

/// What the ranks of a host need to start.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct HostStart {
    pub(crate) epoch: u64,
    /// The first rank of this host, and how many it has.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// How many ranks the epoch has, and how many the first one had.
    pub(crate) ranks: usize,
    pub(crate) capacity: usize,
    /// Where ranks meet: a host, and the first of its ports.
    pub(crate) meet: (String, u64),
    /// Where they begin, as a kind and a step.
    pub(crate) origin: (u64, u64),
    /// What the run has said so far.
    pub(crate) job: JobSnapshot,
    /// The rank that was lost, how, and in which phase.
    pub(crate) lost: (usize, (String, String)),
    /// Where each host with ranks keeps copies, and how many ranks it has.
    pub(crate) stores: Vec<(String, usize)>,
}

impl HostStart {
    /// The ranks of this host.
    pub(crate) fn ranks_here(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

/// What an agent says.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Told {
    /// It is there: its build, and the port of its copies.
    Ready { build: u64, store: u64 },
    /// What ranks have said of themselves; of the run, if rank 0 is there.
    Seen { epoch: u64, job: Option<JobSnapshot>, ranks: Vec<(usize, RankSnapshot)> },
    /// A rank has ended.
    Ended { epoch: u64, rank: usize, end: ProcessEnd },
    /// What was asked for by [`Order::Inspect`], and whether the agent holds the memory of all ranks that it had.
    Left { epoch: u64, checkpoint: Option<u64>, copies: Vec<HeldVersion>, memory: bool },
    /// What ranks have printed.
    Output(Vec<u8>),
}

/// The files of a copy of the state that an agent holds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct HeldVersion {
    /// The step after which it was taken.
    pub(crate) step: u64,
    pub(crate) names: Vec<String>,
    /// If it is known to be whole: of each of these, one file is needed.
    pub(crate) needs: Option<Vec<Vec<String>>>,
}

/// Writes a frame.
pub(crate) fn write_frame(to: &mut impl Write, body: &[u8]) -> io::Result<()> {
    if body.len() > MOST {
        return Err(io::Error::other(format!("a frame of {} bytes is too long", body.len())));
    }
    to.write_all(&(body.len() as u32).to_le_bytes())?;
    to.write_all(body)?;
    to.flush()
}

/// Reads a frame; nothing if the stream has ended before one.
pub(crate) fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match from.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => from.read_exact(&mut length[1..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MOST {
        return Err(io::Error::other(format!("a frame of {length} bytes is too long")));
    }
    // What a stream has not sent is not allocated.
    let mut body = Vec::new();
    from.take(length as u64).read_to_end(&mut body)?;
    match body.len() == length {
        true => Ok(Some(body)),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fields! {
    HostStart { epoch, first, count, ranks, capacity, meet, origin, job, lost, stores }
    JobSnapshot { numbers, over, ago, folder }
    RankSnapshot { numbers, flags, quiet, phase, events }
    SeenEvent { number, ago, step, did, words }
    HeldVersion { step, names, needs }
}

/// Where an epoch begins, as two numbers.
pub(crate) fn origin_numbers(from: StartPoint) -> (u64, u64) {
    let kind = match from {
        StartPoint::Beginning => 0,
        StartPoint::Checkpoint(_) => 1,
        StartPoint::Memory(_) => 2,
        StartPoint::Copies(_) => 3,
    };
    (kind, from.step())
}

/// The same read back.
pub(crate) fn origin_of((kind, step): (u64, u64)) -> StartPoint {
    match kind {
        0 => StartPoint::Beginning,
        1 => StartPoint::Checkpoint(step),
        2 => StartPoint::Memory(step),
        _ => StartPoint::Copies(step),
    }
}

const SIGNALS: [Signal; 3] = [Signal::Interrupt, Signal::Terminate, Signal::Kill];

impl Code for Order {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Order::Start(start) => {
                0_u64.put(out);
                start.put(out);
            }
            Order::Signal { epoch, signal } => {
                let signal = SIGNALS.iter().position(|known| known == signal).unwrap_or(2);
                (1_u64, (*epoch, signal)).put(out);
            }
            Order::Inspect { epoch, folder } => (2_u64, (*epoch, folder.clone())).put(out),
            Order::End(code) => (3_u64, *code).put(out),
        }
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match u64::take(from)? {
            0 => Order::Start(Box::new(Code::take(from)?)),
            1 => {
                let (epoch, signal) = <(u64, usize)>::take(from)?;
                Order::Signal { epoch, signal: *SIGNALS.get(signal)? }
            }
            2 => Order::Inspect { epoch: Code::take(from)?, folder: Code::take(from)? },
            3 => Order::End(Code::take(from)?),
            _ => return None,
        })
    }
}

impl Code for Told {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Told::Ready { build, store } => (0_u64, (*build, *store)).put(out),
            Told::Seen { epoch, job, ranks } => {
                (1_u64, *epoch).put(out);
                job.put(out);
                ranks.put(out);
            }
            Told::Ended { epoch, rank, end } => {
                (2_u64, (*epoch, *rank)).put(out);
                end.put(out);
            }
            Told::Left { epoch, checkpoint, copies, memory } => {
                (3_u64, (*epoch, *checkpoint)).put(out);
                copies.put(out);
                memory.put(out);
            }
            Told::Output(bytes) => {
                4_u64.put(out);
                Bytes(bytes.clone()).put(out);
            }
        }
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match u64::take(from)? {
            0 => {
                let (build, store) = Code::take(from)?;
                Told::Ready { build, store }
            }
            1 => {
                let (epoch, job) = Code::take(from)?;
                Told::Seen { epoch, job, ranks: Code::take(from)? }
            }
            2 => {
                let (epoch, rank) = Code::take(from)?;
                Told::Ended { epoch, rank, end: Code::take(from)? }
            }
            3 => {
                let (epoch, checkpoint) = Code::take(from)?;
                let (copies, memory) = (Code::take(from)?, Code::take(from)?);
                Told::Left { epoch, checkpoint, copies, memory }
            }
            4 => Told::Output(Bytes::take(from)?.0),
            _ => return None,
        })
    }
}

impl Code for ProcessEnd {
    fn put(&self, out: &mut Vec<u8>) {
        let (kind, code, text) = match self {
            ProcessEnd::Well => (0_u64, 0, ""),
            ProcessEnd::Failed(code) => (1, u64::from(*code), ""),
            ProcessEnd::Killed(text) => (2, 0, text.as_str()),
            ProcessEnd::Broken(text) => (3, 0, text.as_str()),
            ProcessEnd::NotStarted(text) => (4, 0, text.as_str()),
        };
        (kind, (code, text.to_owned())).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let (kind, (code, text)) = <(u64, (u64, String))>::take(from)?;
        Some(match kind {
            0 => ProcessEnd::Well,
            1 => ProcessEnd::Failed(code.try_into().ok()?),
            2 => ProcessEnd::Killed(text),
            3 => ProcessEnd::Broken(text),
            4 => ProcessEnd::NotStarted(text),
            _ => return None,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;
    use crate::codec::{decoded, encoded};

    fn said() -> Vec<Told> {
        let event =
            SeenEvent { number: 3, ago: 4, step: 5, did: 2, words: "all_reduce #3".to_owned() };
        let rank = RankSnapshot {
            numbers: vec![1, 2],
            flags: vec![true, false],
            quiet: 9,
            phase: "B".to_owned(),
            events: vec![event],
        };
        let job = JobSnapshot { numbers: vec![7; 20], over: true, ago: 1, folder: "a".to_owned() };
        let needs = Some(vec![vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()]]);
        let held = HeldVersion { step: 4, names: vec!["a".to_owned()], needs };
        vec![
            Told::Ready { build: 7, store: 4711 },
            Told::Seen { epoch: 1, job: Some(job), ranks: vec![(3, rank)] },
            Told::Ended { epoch: 1, rank: 2, end: ProcessEnd::Killed("SIGKILL".to_owned()) },
            Told::Ended { epoch: 1, rank: 2, end: ProcessEnd::Failed(3) },
            Told::Left { epoch: 2, checkpoint: Some(4), copies: vec![held], memory: true },
            Told::Output(vec![1, 2, 3]),
        ]
    }

    #[test]
    fn what_is_said_comes_back_and_other_bytes_are_refused() {
        for told in said() {
            let bytes = encoded(&told);
            assert_eq!(decoded::<Told>(&bytes), Some(told));
            for cut in 0..bytes.len() {
                assert_eq!(decoded::<Told>(&bytes[..cut]), None);
            }
        }
        let start = HostStart { epoch: 2, meet: ("a".to_owned(), 9), ..HostStart::default() };
        for order in [
            Order::Start(Box::new(start)),
            Order::Signal { epoch: 1, signal: Signal::Terminate },
            Order::Inspect { epoch: 1, folder: "runs/a".to_owned() },
            Order::End(1),
        ] {
            assert_eq!(decoded::<Order>(&encoded(&order)), Some(order));
        }
    }

    #[test]
    fn frames_are_bounded_and_never_more_than_was_sent() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, b"abc").unwrap();
        write_frame(&mut bytes, b"").unwrap();
        let mut from = &bytes[..];
        assert_eq!(read_frame(&mut from).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(read_frame(&mut from).unwrap(), Some(Vec::new()));
        assert_eq!(read_frame(&mut from).unwrap(), None);
        assert!(write_frame(&mut Vec::new(), &vec![0; MOST + 1]).is_err());
        for bad in [&[0xff, 0xff, 0xff, 0xff, 0][..], &[9, 0, 0, 0, 1, 2], &[1, 0]] {
            assert!(read_frame(&mut &bad[..]).is_err(), "{bad:?}");
        }
        // Random bytes are decoded or refused, and nothing else happens.
        let mut word = 5_u64;
        let mut next = move || {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (word >> 33) as usize
        };
        let known: Vec<Vec<u8>> = said().iter().map(encoded).collect();
        for _ in 0..20_000 {
            let mut bytes = known[next() % known.len()].clone();
            for _ in 0..1 + next() % 4 {
                let at = next() % bytes.len();
                bytes[at] = next() as u8;
            }
            let _ = (decoded::<Told>(&bytes), decoded::<Order>(&bytes));
        }
    }
}
