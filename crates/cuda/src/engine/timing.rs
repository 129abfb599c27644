//! When calls happened: by marks in the stream, which the GPU times.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use phalanx_engine::{CallPart, CallTimes, EngineError, Event, PartKind, Stamps};

use crate::device::{Stream, TimeMark};

/// Times of calls. While timing is off this costs nothing.
#[derive(Default)]
pub(super) struct Timing {
    /// What the host notes: when calls are issued, and both ends of what ranks do together.
    pub(super) stamps: Stamps,
    /// A mark and its time since the origin.
    base: Option<(TimeMark, Duration)>,
    origin: Option<Instant>,
    calls: BTreeMap<Event, (Duration, TimeMark, TimeMark)>,
    /// By call: the tasks that were issued for it, with a mark behind each.
    tasks: BTreeMap<Event, Vec<(String, TimeMark)>>,
    /// The call that is being issued.
    call: Option<Event>,
}

impl Timing {
    /// Turns timing on, with an origin and without earlier times; or off, which keeps the times.
    pub(super) fn time(&mut self, origin: Option<Instant>, stream: &Stream) {
        self.stamps.time(origin);
        self.origin = origin;
        let Some(origin) = origin else { return };
        self.calls.clear();
        self.tasks.clear();
        // If the GPU has failed, there is no base and no times; the next call reports the failure.
        let mark = stream.wait().and_then(|()| stream.mark()).ok();
        self.base = mark.map(|mark| (mark, origin.elapsed()));
    }

    pub(super) fn is_on(&self) -> bool {
        self.origin.is_some()
    }

    pub(super) fn issue(&mut self, event: Event) {
        self.stamps.issue(event);
    }

    /// A mark before a call, if timing is on.
    pub(super) fn mark(
        &mut self,
        event: Event,
        stream: &Stream,
    ) -> Result<Option<TimeMark>, EngineError> {
        self.call = self.origin.map(|_| event);
        Ok(self.call.map(|_| stream.mark()).transpose()?)
    }

    /// A task of the call was just issued.
    pub(super) fn task(
        &mut self,
        name: impl FnOnce() -> String,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        if let Some(call) = self.call {
            self.tasks.entry(call).or_default().push((name(), stream.mark()?));
        }
        Ok(())
    }

    /// Keeps the marks around a call that was just issued.
    pub(super) fn keep(
        &mut self,
        event: Event,
        begun: Option<TimeMark>,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        self.call = None;
        if let (Some(begun), Some(origin)) = (begun, self.origin) {
            self.calls.insert(event, (origin.elapsed(), begun, stream.mark()?));
        }
        Ok(())
    }

    /// The tasks of a call that has ended, one after the other.
    pub(super) fn parts(&self, event: Event) -> Vec<CallPart> {
        let (Some((base, at)), Some((_, begun, _))) = (&self.base, self.calls.get(&event)) else {
            return Vec::new();
        };
        let since = |mark: &TimeMark| mark.since(base).map_or(*at, |passed| *at + passed);
        let mut started = since(begun);
        let tasks = self.tasks.get(&event).into_iter().flatten();
        tasks
            .map(|(name, mark)| {
                let ended = since(mark);
                let kind = PartKind::Computes;
                let part = CallPart { name: name.clone(), started, ended, kind };
                started = ended;
                part
            })
            .collect()
    }

    /// The times of a call that has ended.
    pub(super) fn of(&self, event: Event) -> Option<CallTimes> {
        let Some((issued, begun, ended)) = self.calls.get(&event) else {
            return self.stamps.of(event);
        };
        let (base, at) = self.base.as_ref()?;
        let since = |mark: &TimeMark| mark.since(base).ok().map(|passed| *at + passed);
        let (started, ended) = (since(begun)?, since(ended)?);
        Some(CallTimes { issued: (*issued).min(started), started, ended })
    }
}
