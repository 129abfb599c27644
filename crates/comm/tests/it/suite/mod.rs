//! What every transport must do, as tests that run over any of them.
//!
//! A case is a function that every rank runs; it computes the expected result itself, naively,
//! because it knows the data of all ranks. So a transport only has to run a function on every rank,
//! whether ranks are threads or processes.

mod collectives;
mod data;
mod failures;
mod layouts;
mod order;
mod over_device;
mod volumes;

use std::time::Duration;

pub(crate) use over_device::{OverDevice, TestDevice};

use phalanx_comm::Communicator;
use phalanx_comm::Failure;
use phalanx_comm::OpKind;

/// What every rank of a case runs; an error is a failure of that rank.
pub(crate) type Work<'a> = dyn Fn(&mut dyn Communicator) -> Result<(), String> + Sync + 'a;

/// What a case needs from its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The time after which a missing rank is an error.
    pub(crate) timeout: Duration,
    /// A kind of call that moves 64 bytes more than it needs.
    pub(crate) planted_copy: Option<OpKind>,
}

/// A transport under test.
pub(crate) trait Transport {
    /// Runs `work` on every rank of a new world; returns the first failure.
    fn run(&mut self, ranks: usize, settings: Settings, work: &Work<'_>) -> Result<(), Failure>;
}

/// A case: its name, and what it does.
pub(crate) type Case = (&'static str, fn(&mut dyn Transport) -> Result<(), String>);

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let groups =
        [collectives::CASES, layouts::CASES, order::CASES, failures::CASES, volumes::CASES];
    groups.concat()
}

/// Runs all cases; the error lists every one that failed, and how.
pub(crate) fn run(transport: &mut dyn Transport) -> Result<(), String> {
    let mut wrong = Vec::new();
    for (name, case) in cases() {
        if let Err(message) = case(transport) {
            wrong.push(format!("{name}: {message}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Runs a case that must succeed, with a long timeout for busy machines.
fn must_run(transport: &mut dyn Transport, ranks: usize, work: &Work<'_>) -> Result<(), String> {
    let settings = Settings { timeout: Duration::from_secs(60), planted_copy: None };
    transport.run(ranks, settings, work).map_err(|failure| failure.to_string())
}

/// An error if two lists differ.
fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Result<(), String> {
    if got == want {
        return Ok(());
    }
    let at = got.iter().zip(want).position(|(got, want)| got != want);
    let at = at.unwrap_or(got.len().min(want.len()));
    let (got_at, want_at) = (got.get(at), want.get(at));
    let (got, want) = (got.len(), want.len());
    Err(format!("{what}: element {at} is {got_at:?}, not {want_at:?} (of {got} and {want})"))
}
