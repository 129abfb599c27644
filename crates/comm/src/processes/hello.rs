//! The first bytes of every connection: who is there, and whether it belongs here.

use std::fmt;
use std::io::Read;

use super::identity::{build, unit_names, units};
use crate::hash::hash;

/// What proves that a process belongs to a job.
#[derive(Clone, Copy, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// A new one, from the system's random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 32];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The token of a job that has a name but no secret: it keeps jobs apart, not strangers out.
    pub fn of(job: &str) -> Self {
        let mut bytes = [0; 32];
        for (seed, part) in bytes.chunks_exact_mut(8).enumerate() {
            part.copy_from_slice(&hash(job.as_bytes(), seed as u64 + 1).to_le_bytes());
        }
        Self(bytes)
    }

    /// The token that [`Token::hex`] wrote.
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// The token of these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// As bytes, for the start of a connection.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// As text, for an environment variable.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Compares in a time that does not depend on where two tokens differ.
impl PartialEq for Token {
    fn eq(&self, other: &Self) -> bool {
        let differ = self.0.iter().zip(&other.0).fold(0, |all, (a, b)| all | (a ^ b));
        std::hint::black_box(differ) == 0
    }
}

/// A token is not shown.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Who opens a connection, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) token: Token,
    pub(super) build: u64,
    pub(super) units: u32,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// The world that the stream is for, from 1; 0 for the meeting.
    pub(super) world: u64,
    /// The port at which the sender listens, if it is one.
    pub(super) port: u16,
    /// Which processes of the job these are: those of another epoch are strangers.
    pub(super) epoch: u64,
}

/// Bytes of a hello.
pub(super) const HELLO: usize = 80;

const MAGIC: [u8; 8] = *b"PHALANX1";

/// Why a hello is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It is of another program or another job: nothing else of it was read.
    Stranger,
    /// It is of this job, but cannot take part: the sentence says why.
    Unfit(String),
}

impl Hello {
    pub(super) fn new(token: Token, rank: usize, ranks: usize) -> Self {
        let (rank, ranks) = (rank as u32, ranks as u32);
        Self { token, build: build(), units: units(), rank, ranks, world: 0, port: 0, epoch: 0 }
    }

    pub(super) fn bytes(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        let fields: [&[u8]; 9] = [
            &MAGIC,
            &self.token.0,
            &self.build.to_le_bytes(),
            &self.units.to_le_bytes(),
            &self.rank.to_le_bytes(),
            &self.ranks.to_le_bytes(),
            &self.world.to_le_bytes(),
            &self.port.to_le_bytes(),
            &self.epoch.to_le_bytes(),
        ];
        let mut at = 0;
        for field in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }

    /// Reads a hello and compares it with one's own.
    pub(super) fn read(bytes: &[u8; HELLO], own: &Hello) -> Result<Self, Refusal> {
        let mut token = [0; 32];
        token.copy_from_slice(&bytes[8..40]);
        // The token is compared first; without it the rest is not looked at.
        if Token(token) != own.token || bytes[..8] != MAGIC {
            return Err(Refusal::Stranger);
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let epoch = u64::from_le_bytes(std::array::from_fn(|at| bytes[70 + at]));
        // A process that was taken for lost and has woken up again must not disturb its successors.
        if epoch != own.epoch {
            return Err(Refusal::Stranger);
        }
        let found = Self {
            token: own.token,
            build: long(40),
            units: word(48),
            rank: word(52),
            ranks: word(56),
            world: long(60),
            port: u16::from_le_bytes([bytes[68], bytes[69]]),
            epoch,
        };
        found.check(own).map_err(Refusal::Unfit)?;
        Ok(found)
    }

    fn check(&self, own: &Hello) -> Result<(), String> {
        let (rank, ranks, me) = (self.rank, self.ranks, own.rank);
        if self.build != own.build {
            return Err(format!(
                "rank {rank} runs another build of the program than rank {me} \
                 ({:016x}, not {:016x}): start the same file on every host",
                self.build, own.build
            ));
        }
        if self.units != own.units {
            return Err(format!(
                "rank {rank} computes with {} and rank {me} with {}, which round differently: use hosts \
                 with the same kind of processor",
                unit_names(self.units),
                unit_names(own.units)
            ));
        }
        if ranks != own.ranks {
            return Err(format!(
                "rank {rank} was started as one of {ranks} ranks, but rank {me} as one of {}: give all \
                 the same WORLD_SIZE",
                own.ranks
            ));
        }
        if rank >= ranks || rank == me {
            return Err(format!(
                "a second process says that it is rank {rank} of {ranks}: give every process its own \
                 RANK, from 0 to {}",
                ranks.saturating_sub(1)
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize) -> Hello {
        Hello { world: 7, port: 513, epoch: 3, ..Hello::new(Token::of("job"), rank, 4) }
    }

    #[test]
    fn a_hello_comes_back_as_it_went() {
        assert_eq!(Hello::read(&hello(1).bytes(), &hello(0)), Ok(hello(1)));
    }

    #[test]
    fn any_other_token_or_program_is_a_stranger() {
        let good = hello(1).bytes();
        for at in 0..40 {
            let mut bytes = good;
            bytes[at] ^= 1;
            assert_eq!(Hello::read(&bytes, &hello(0)), Err(Refusal::Stranger), "{at}");
        }
        // Random bytes never get further.
        let mut word = 1_u64;
        for _ in 0..2000 {
            let bytes = std::array::from_fn(|_| {
                word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (word >> 56) as u8
            });
            assert_eq!(Hello::read(&bytes, &hello(0)), Err(Refusal::Stranger));
        }
    }

    #[test]
    fn processes_of_another_epoch_are_strangers() {
        for epoch in [0, 2, 4, u64::MAX] {
            let bytes = Hello { epoch, ..hello(1) }.bytes();
            assert_eq!(Hello::read(&bytes, &hello(0)), Err(Refusal::Stranger));
        }
    }

    #[test]
    fn what_does_not_fit_is_said_in_one_sentence() {
        let own = hello(0);
        for (other, sentence) in [
            (Hello { build: own.build ^ 1, ..hello(2) }, "rank 2 runs another build"),
            (Hello { units: own.units ^ 4, ..hello(2) }, "rank 2 computes with"),
            (Hello { ranks: 8, ..hello(2) }, "one of 8 ranks, but rank 0 as one of 4"),
            (Hello { rank: 0, ..hello(2) }, "a second process says that it is rank 0 of 4"),
            (Hello { rank: 9, ..hello(2) }, "says that it is rank 9 of 4"),
        ] {
            let Err(Refusal::Unfit(text)) = Hello::read(&other.bytes(), &own) else {
                panic!("{sentence}: accepted")
            };
            assert!(text.contains(sentence), "{text}");
        }
    }

    #[test]
    fn tokens_are_text_and_back() {
        let token = Token::random().unwrap();
        assert_eq!(Token::from_hex(&token.hex()), Some(token));
        assert_ne!(Token::random().unwrap(), token);
        for text in ["", "ab", &"x".repeat(64), &"é".repeat(32)] {
            assert_eq!(Token::from_hex(text), None);
        }
    }
}
