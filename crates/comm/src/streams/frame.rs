//! The format of a stream: frames of a length, a kind and a body; data follow some of them.
//!
//! Numbers are little-endian. Groups and call sites are named once per stream and then identified
//! by the sender's numbers, so that the frame of a call is small and has a fixed size.
//!
//! Every frame takes whole lines of 64 bytes, and so do data with the tail behind them. A kernel copies between a
//! socket and memory at half the speed on some processors if the two sides lie a few bytes apart within a line;
//! data that begin at a line do not (docs/communication.md).

use phalanx_ir::DType;

use crate::call::{OpKind, ReduceOp};
use crate::header::Header;

/// What one rank sends to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// From now on this number means a group, or a channel between two ranks.
    Group { number: u32, channel: Option<u32>, ranks: Vec<usize> },
    /// From now on this number means a call site.
    Site { number: u32, name: String },
    /// The sender has started a call of a group.
    Call { group: u32, sequence: u64, header: Header, site: u32, counts: Vec<usize> },
    /// `bytes` bytes of a call follow this frame.
    Data { group: u32, sequence: u64, phase: Phase, bytes: usize },
    /// The sender stops, because of this rank. `mismatch` names a call that the receiver takes part
    /// in and that does not match.
    Abort { rank: usize, mismatch: Option<(u32, u64)>, message: String },
}

/// Which data of a call are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// A block that a member sends.
    Given,
    /// A reduced part.
    Result,
}

/// Bytes before the body of a frame: how long the body is, and what kind of frame.
const HEAD: usize = 5;

/// Frames, and data with their tail, are multiples of this many bytes.
pub(super) const LINE: usize = 64;

/// Bytes of a whole frame before data.
pub(super) const DATA_FRAME: usize = (HEAD + 4 + 8 + 1 + 8).next_multiple_of(LINE);

/// The most bytes of a frame's body.
const MOST: usize = 16 << 20;

/// No channel, no site, no mismatch.
pub(super) const NONE: u32 = u32::MAX;

/// How many bytes follow so many bytes of data, at least one: the last says whether the data are valid.
pub(super) const fn tail(bytes: usize) -> usize {
    LINE - bytes % LINE
}

impl Frame {
    /// Appends the frame to the bytes to be sent.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEAD]);
        let kind = match self {
            Frame::Group { number, channel, ranks } => {
                put32(out, *number);
                put32(out, channel.unwrap_or(NONE));
                ranks.iter().for_each(|&rank| put64(out, rank as u64));
                0
            }
            Frame::Site { number, name } => {
                put32(out, *number);
                out.extend_from_slice(name.as_bytes());
                1
            }
            Frame::Call { group, sequence, header, site, counts } => {
                put32(out, *group);
                put64(out, *sequence);
                put_header(out, header);
                put32(out, *site);
                counts.iter().for_each(|&count| put64(out, count as u64));
                2
            }
            Frame::Data { group, sequence, phase, bytes } => {
                put32(out, *group);
                put64(out, *sequence);
                out.push(*phase as u8);
                put64(out, *bytes as u64);
                3
            }
            Frame::Abort { rank, mismatch, message } => {
                put64(out, *rank as u64);
                let (group, sequence) = mismatch.unwrap_or((NONE, 0));
                put32(out, group);
                put64(out, sequence);
                out.extend_from_slice(message.as_bytes());
                4
            }
        };
        let len = (out.len() - start - HEAD) as u32;
        out[start..start + 4].copy_from_slice(&len.to_le_bytes());
        out[start + 4] = kind;
        out.resize(start + (out.len() - start).next_multiple_of(LINE), 0);
    }

    /// The frame at the start of what was received, and how many bytes it takes; nothing if it is
    /// not complete. Invalid bytes are an error.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<(Frame, usize)>, &'static str> {
        let Some((head, rest)) = bytes.split_at_checked(HEAD) else { return Ok(None) };
        let len = Body(head).take32().ok_or(BROKEN)? as usize;
        if len > MOST {
            return Err(BROKEN);
        }
        let whole = (HEAD + len).next_multiple_of(LINE);
        let Some(body) = rest.get(..len).filter(|_| whole <= bytes.len()) else { return Ok(None) };
        let frame = Body(body).frame(head[4]).ok_or(BROKEN)?;
        Ok(Some((frame, whole)))
    }
}

const BROKEN: &str = "it sent an invalid frame";

fn put32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_header(out: &mut Vec<u8>, header: &Header) {
    let reduction = match header.reduction {
        None => 0,
        Some(ReduceOp::Sum) => 1,
        Some(ReduceOp::Max) => 2,
    };
    // The number of a type is its index in the list of all types.
    let dtype = DType::ALL.iter().position(|&dtype| dtype == header.dtype).unwrap_or(usize::MAX);
    out.extend_from_slice(&[header.kind as u8, reduction, dtype as u8, header.accumulate.into()]);
    put32(out, header.to);
    put32(out, header.from);
    header.shape.iter().for_each(|&size| put64(out, size as u64));
}

/// The unread rest of a frame.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn frame(mut self, kind: u8) -> Option<Frame> {
        Some(match kind {
            0 => {
                let (number, channel) = (self.take32()?, self.take32()?);
                let channel = (channel != NONE).then_some(channel);
                Frame::Group { number, channel, ranks: self.numbers()? }
            }
            1 => Frame::Site { number: self.take32()?, name: self.text()? },
            2 => Frame::Call {
                group: self.take32()?,
                sequence: self.take64()?,
                header: self.header()?,
                site: self.take32()?,
                counts: self.numbers()?,
            },
            3 => Frame::Data {
                group: self.take32()?,
                sequence: self.take64()?,
                phase: if self.take8()? == 0 { Phase::Given } else { Phase::Result },
                bytes: self.take64()? as usize,
            },
            4 => {
                let rank = self.take64()? as usize;
                let (group, sequence) = (self.take32()?, self.take64()?);
                let mismatch = (group != NONE).then_some((group, sequence));
                Frame::Abort { rank, mismatch, message: self.text()? }
            }
            _ => return None,
        })
    }

    fn header(&mut self) -> Option<Header> {
        let kind = *OpKind::ALL.get(usize::from(self.take8()?))?;
        let reduction = match self.take8()? {
            0 => None,
            1 => Some(ReduceOp::Sum),
            _ => Some(ReduceOp::Max),
        };
        let dtype = *DType::ALL.get(usize::from(self.take8()?))?;
        let accumulate = self.take8()? != 0;
        let (to, from) = (self.take32()?, self.take32()?);
        let shape = [self.take64()?, self.take64()?, self.take64()?].map(|size| size as usize);
        Some(Header { kind, reduction, dtype, accumulate, to, from, shape })
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn take8(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn take32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn take64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// All that is left, as numbers.
    fn numbers(&mut self) -> Option<Vec<usize>> {
        let mut numbers = Vec::with_capacity(self.0.len() / 8);
        while !self.0.is_empty() {
            numbers.push(self.take64()? as usize);
        }
        Some(numbers)
    }

    /// All that is left, as text.
    fn text(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(self.0).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_went() {
        let header = Header {
            kind: OpKind::Permute,
            reduction: Some(ReduceOp::Max),
            dtype: DType::I32,
            accumulate: true,
            to: 3,
            from: NONE,
            shape: [2, 1, usize::MAX],
        };
        let frames = [
            Frame::Group { number: 7, channel: Some(2), ranks: vec![4, 0] },
            Frame::Group { number: 8, channel: None, ranks: vec![] },
            Frame::Site { number: 1, name: "blocks.3 grad".to_string() },
            Frame::Call { group: 7, sequence: 1 << 40, header, site: 1, counts: vec![1, 0, 9] },
            Frame::Data { group: 7, sequence: 5, phase: Phase::Result, bytes: 1 << 33 },
            Frame::Abort { rank: 3, mismatch: Some((7, 5)), message: "no luck".to_string() },
            Frame::Abort { rank: 0, mismatch: None, message: String::new() },
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let mut at = 0;
        for frame in frames {
            let (found, len) = Frame::read(&bytes[at..]).unwrap().unwrap();
            // Every prefix of a frame is an incomplete frame.
            (0..len).for_each(|end| assert_eq!(Frame::read(&bytes[at..at + end]), Ok(None)));
            assert_eq!((found, len % LINE), (frame, 0));
            at += len;
        }
        let mut unknown = [0; LINE];
        unknown[4] = 9;
        assert_eq!((at, Frame::read(&unknown)), (bytes.len(), Err(BROKEN)));
        assert_eq!(Frame::read(&[255, 255, 255, 255, 3]), Err(BROKEN));
    }

    #[test]
    fn data_end_with_their_line() {
        for (bytes, behind) in [(0, 64), (1, 63), (63, 1), (64, 64), (100, 28)] {
            assert_eq!(tail(bytes), behind);
        }
    }

    /// Bytes of any kind are a frame of at most their length, an incomplete one, or an error.
    #[test]
    fn other_bytes_are_never_more_than_they_are() {
        let mut word = 7_u64;
        let mut next = move || {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (word >> 40) as usize
        };
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = (0..next() % 200).map(|_| next() as u8).collect();
            // Often a length that fits, and a kind that exists.
            if bytes.len() >= HEAD && next() % 4 > 0 {
                let len = (bytes.len() - HEAD - next() % (bytes.len() - HEAD + 1)) as u32;
                bytes[..4].copy_from_slice(&len.to_le_bytes());
                bytes[4] = (next() % 6) as u8;
            }
            if let Ok(Some((frame, len))) = Frame::read(&bytes) {
                assert!(len <= bytes.len());
                let mut again = Vec::new();
                frame.write(&mut again);
                // Text that was not valid is longer as valid text.
                assert!(again.len() <= 3 * len + HEAD, "{frame:?}");
            }
        }
    }
}
