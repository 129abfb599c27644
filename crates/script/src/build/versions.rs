//! Where the versions of a unit's weights lie while a script is built.
//!
//! A unit of which d older versions are kept has d + 1 buffers: if its readers are d updates late, exactly those that are read. When an update is due, its own micro-batches were the
//! last that read the oldest version, so the new one takes its place: a ring, in which nothing is copied and no more than
//! d + 1 versions ever exist. Every script must end as it began, with the newest version first. After whole turns of
//! the ring it does; the few updates after them move each version on by one buffer and update the first in place.

use super::finish::push;
use super::{
    Binder, BufferId, Builder, DType, Role, Script, ScriptError, State, TensorType, UnitBuffers,
    View, World,
};
use crate::action::VersionedBuffer;
use crate::schedule::ScheduledRun;
use crate::unit::Unit;
use crate::updates::UnitTiming;

/// The versions of a rank's weights.
pub(super) struct VersionPlaces<'a> {
    world: &'a World<'a>,
    units: &'a [Unit],
    buffers: &'a [UnitBuffers],
    /// For each unit: when it is updated.
    timings: Vec<UnitTiming>,
    /// For each unit: its updates in the script, and how many of them are done.
    updates: Vec<usize>,
    done: Vec<usize>,
    /// Whether runs read previewed weights.
    previewed: bool,
}

/// What the next update of a unit reads and writes.
#[derive(Clone, Copy)]
pub(super) struct NextVersion {
    /// The newest weights.
    pub(super) from: BufferId,
    /// Where those that it makes go.
    pub(super) into: BufferId,
}

impl<'a> VersionPlaces<'a> {
    /// For the script of a rank of this stage group.
    pub(super) fn new(
        world: &'a World<'a>,
        stage_group: usize,
        state: &'a State,
    ) -> Result<Self, ScriptError> {
        let State { units, buffers, .. } = state;
        let timings = units.iter().map(|unit| world.timing(unit));
        let timings: Vec<UnitTiming> = timings.collect::<Result<_, _>>()?;
        let updates = timings.iter().map(|own| world.update_count(*own, stage_group)).collect();
        let (done, previewed) = (vec![0; units.len()], false);
        Ok(Self { world, units, buffers, timings, updates, done, previewed })
    }

    /// The same, where runs read previewed weights.
    pub(super) fn previewed(self, previewed: bool) -> Self {
        Self { previewed, ..self }
    }

    /// Tells the checker what each buffer holds at the start.
    pub(super) fn declare(&self, script: &mut Script) {
        if self.world.updates.is_none() {
            return;
        }
        script.updates = self.world.updates.clone();
        for (unit, timing) in self.timings.iter().enumerate() {
            let aged = |age| VersionedBuffer { buffer: self.buffers[unit].aged(age), unit, age };
            script.versioned.extend((0..=timing.older()).map(aged));
        }
    }

    /// Binds the weights that a run reads.
    pub(super) fn bind(&self, turn: ScheduledRun, binder: &mut Binder<'_>, dtype: DType) {
        for (number, unit) in self.units.iter().enumerate() {
            binder.weights.set(unit, self.read(number, turn), dtype);
        }
    }

    /// The buffer of the version of a unit that a run reads.
    pub(super) fn read(&self, unit: usize, turn: ScheduledRun) -> BufferId {
        match (&self.buffers[unit].preview, self.previewed) {
            (Some(preview), true) => preview.buffer,
            _ => self.place(unit, self.version(unit, turn)),
        }
    }

    /// Whether the version that a run reads was made already.
    pub(super) fn exists(&self, unit: usize, turn: ScheduledRun) -> bool {
        self.version(unit, turn) <= self.done[unit] as i64
    }

    /// Where the next update of a unit finds and leaves its weights. Appends the moves that make room for it.
    pub(super) fn next(
        &self,
        unit: usize,
        script: &mut Script,
        dtype: DType,
    ) -> Result<NextVersion, ScriptError> {
        let (from, next) = (self.place(unit, self.done[unit] as i64), self.done[unit] + 1);
        let kept = self.kept(unit);
        if next <= self.ringed(unit) {
            let into = self.buffers[unit].aged(ring(next as i64, kept));
            return Ok(NextVersion { from, into });
        }
        for age in (1..kept).rev() {
            let [from, into] = [age - 1, age].map(|age| self.buffers[unit].aged(age));
            self.keep(unit, script, (from, into), dtype)?;
        }
        Ok(NextVersion { from, into: from })
    }

    /// How many units there are.
    pub(super) fn units(&self) -> usize {
        self.units.len()
    }

    /// How many updates of a unit the script has so far.
    pub(super) fn done(&self, unit: usize) -> usize {
        self.done[unit]
    }

    /// When a unit is updated.
    pub(super) fn timing(&self, unit: usize) -> UnitTiming {
        self.timings[unit]
    }

    /// A unit was updated.
    pub(super) fn updated(&mut self, unit: usize) {
        self.done[unit] += 1;
    }

    fn version(&self, unit: usize, turn: ScheduledRun) -> i64 {
        let timing = self.timings[unit];
        timing.version(self.world.update_of(timing, turn.microbatch))
    }

    /// Updates that go around in whole turns.
    fn ringed(&self, unit: usize) -> usize {
        self.updates[unit] - self.updates[unit] % self.kept(unit)
    }

    /// How many versions there are.
    fn kept(&self, unit: usize) -> usize {
        self.timings[unit].older() + 1
    }

    fn place(&self, unit: usize, version: i64) -> BufferId {
        let age = match self.done[unit] < self.ringed(unit) {
            true => ring(version, self.kept(unit)),
            false => (self.done[unit] as i64 - version) as usize,
        };
        self.buffers[unit].aged(age)
    }

    /// Appends a copy of a version.
    fn keep(
        &self,
        unit: usize,
        script: &mut Script,
        (from, into): (BufferId, BufferId),
        dtype: DType,
    ) -> Result<(), ScriptError> {
        let elements = script.buffers[from.0].bytes / dtype.size();
        let b = Builder::new("keep", dtype);
        let weights = b.input("w", Role::State, TensorType::unit(dtype, elements));
        b.port("w", Role::State, weights.scale(1.0));
        let program = self.world.library.placed(&b.finish()?);
        let view = |buffer| View { buffer, offset: 0 };
        let label = format!("keep {}", self.units[unit].name);
        push(script, &label, program, vec![view(from)], &[view(into)], None);
        Ok(())
    }
}

/// The buffer of a version in a ring of so many, by its age at the start.
fn ring(version: i64, kept: usize) -> usize {
    (-version).rem_euclid(kept as i64) as usize
}
