//! An engine that hesitates: it issues calls after random delays, and writes down what it issues.

use std::time::Duration;

use phalanx_engine::{Args, Engine, EngineError, Event, Way};
use phalanx_ir::Program;
use phalanx_ir::random::Stream;
use phalanx_script::{Lane, Message, Slots};

/// What an unsteady engine does beside passing calls on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Habit {
    /// Nothing.
    Steady,
    /// It sleeps or steps aside now and then.
    Hesitates(u64),
    /// It waits for every message as soon as it asks for it, which no order of turns allows for.
    Hasty,
    /// It runs calls without waiting for the messages that they need.
    Forgetful,
}

/// A call as it was issued: the lane, the program or message, and the place of its first operand.
pub(crate) type Issued = (Lane, String, Option<usize>);

/// Passes calls on to another engine, in its own time.
pub(crate) struct Unsteady<E: Engine> {
    inner: E,
    habit: Habit,
    random: Stream,
    draws: u64,
    pub(crate) issued: Vec<Issued>,
}

impl<E: Engine> Unsteady<E> {
    /// Wraps an engine of a rank.
    pub(crate) fn new(inner: E, habit: Habit, rank: usize) -> Self {
        let seed = match habit {
            Habit::Hesitates(seed) => seed,
            _ => 0,
        };
        let random = Stream::named(seed * 64 + rank as u64, "unsteady engine");
        Self { inner, habit, random, draws: 0, issued: Vec::new() }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.draws += 1;
        self.random.below(self.draws, bound)
    }

    /// Up to 200 µs before one call in eight, and a step aside before one in four.
    fn hesitate(&mut self) {
        match self.below(8) {
            0 => std::thread::sleep(Duration::from_micros(self.below(200))),
            1 | 2 => std::thread::yield_now(),
            _ => {}
        }
    }
}

impl<E: Engine> Engine for Unsteady<E> {
    type Kernel = (E::Kernel, String);

    fn name(&self) -> &'static str {
        "unsteady"
    }

    fn compile(
        &mut self,
        program: &Program,
        slots: &Slots,
        ranks: &[usize],
    ) -> Result<Self::Kernel, EngineError> {
        Ok((self.inner.compile(program, slots, ranks)?, program.name.clone()))
    }

    fn connect(
        &mut self,
        messages: &[Message],
        way: Way,
        label: &str,
    ) -> Result<Self::Kernel, EngineError> {
        Ok((self.inner.connect(messages, way, label)?, label.to_owned()))
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), EngineError> {
        self.inner.reserve(bytes)
    }

    fn launch(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        lane: Lane,
        after: &[Event],
    ) -> Result<Event, EngineError> {
        if let Habit::Hesitates(_) = self.habit {
            self.hesitate();
        }
        let spans = args.inputs.iter().chain(args.outputs.iter().map(|target| &target.span));
        self.issued.push((lane, kernel.1.clone(), spans.map(|span| span.offset).next()));
        let after = if self.habit == Habit::Forgetful { &[] } else { after };
        let event = self.inner.launch(&kernel.0, args, lane, after)?;
        if (self.habit, lane) == (Habit::Hasty, Lane::Receive) {
            self.inner.wait(event)?;
        }
        Ok(event)
    }

    fn wait(&mut self, event: Event) -> Result<(), EngineError> {
        self.inner.wait(event)
    }

    fn upload(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        self.inner.upload(offset, bytes)
    }

    fn download(&mut self, offset: usize, out: &mut [u8]) -> Result<(), EngineError> {
        self.inner.download(offset, out)
    }

    fn launch_observed(
        &mut self,
        kernel: &Self::Kernel,
        args: &Args<'_>,
        pattern: u8,
    ) -> Result<Option<Vec<Vec<bool>>>, EngineError> {
        self.inner.launch_observed(&kernel.0, args, pattern)
    }
}
