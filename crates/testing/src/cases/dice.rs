//! A source of random choices.

use phalanx_ir::random::Stream;

/// Random choices that depend only on a seed and a name.
#[derive(Debug)]
pub struct Dice {
    stream: Stream,
    at: u64,
}

impl Dice {
    /// The dice of a seed.
    pub fn new(seed: u64) -> Self {
        Self::named(seed, "dice")
    }

    /// Separate dice for one of several things that a seed decides.
    pub fn named(seed: u64, name: &str) -> Self {
        Self { stream: Stream::named(seed, name), at: 0 }
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.at += 1;
        self.stream.below(self.at, n as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// True with this probability, in percent.
    pub fn percent(&mut self, p: usize) -> bool {
        self.below(100) < p
    }
}
