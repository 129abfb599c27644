//! When every action of a step happens, by the scripts alone.
//!
//! The executor runs scripts; this crate plays them: the same actions, lanes, dependencies, messages
//! and collectives, with durations that are given, or that were measured in a traced step. What is
//! played is what runs, so gathers, sums of gradients, updates and evictions are seen as forwards
//! and backwards are.
#![forbid(unsafe_code)]

mod durations;
mod play;

pub use durations::{ActionDuration, Durations, MeasuredTimes};
pub use play::{ActionTimes, IssueRule, Playback, holds_thread, play};
