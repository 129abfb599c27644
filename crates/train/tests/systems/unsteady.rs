//! An engine that hesitates: it issues calls after random delays, and writes down what it issues.

use std::time::Duration;

use phalanx_engine::{Engine, EngineError, Event};
use phalanx_ir::random::Stream;
use phalanx_script::Lane;
use phalanx_testing::{Hook, Launch, Wrapped};

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

/// Launches calls in its own time.
pub(crate) struct Unsteady {
    habit: Habit,
    random: Stream,
    draws: u64,
    pub(crate) issued: Vec<Issued>,
}

impl Unsteady {
    /// Wraps an engine of a rank.
    pub(crate) fn around<E: Engine>(inner: E, habit: Habit, rank: usize) -> Wrapped<E, Self> {
        let seed = match habit {
            Habit::Hesitates(seed) => seed,
            _ => 0,
        };
        let random = Stream::named(seed * 64 + rank as u64, "unsteady engine");
        Wrapped::new(inner, Self { habit, random, draws: 0, issued: Vec::new() })
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

impl<E: Engine> Hook<E> for Unsteady {
    fn launch(
        &mut self,
        engine: &mut E,
        call: &Launch<'_, E::Kernel>,
    ) -> Result<Event, EngineError> {
        if let Habit::Hesitates(_) = self.habit {
            self.hesitate();
        }
        let outputs = call.args.outputs.iter().map(|target| &target.span);
        let place = call.args.inputs.iter().chain(outputs).map(|span| span.offset).next();
        self.issued.push((call.lane, call.name.to_owned(), place));
        if self.habit == Habit::Forgetful {
            return call.unordered_on(engine);
        }
        let event = call.on(engine)?;
        if (self.habit, call.lane) == (Habit::Hasty, Lane::Receive) {
            engine.wait(event)?;
        }
        Ok(event)
    }

    /// There are more ranks than cores: who looks in vain makes room for whom it waits for.
    fn is_over(&mut self, engine: &mut E, event: Event) -> Result<bool, EngineError> {
        let over = engine.is_over(event)?;
        if !over {
            std::thread::yield_now();
        }
        Ok(over)
    }
}
