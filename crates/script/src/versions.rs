//! The checker of versions: a buffer of weights is typed by the version that it holds, as gradient buffers are by
//! their contributions. So every run reads the version that its micro-batch must read, an update makes the next version
//! from the newest one, and a script leaves each buffer with the version that the next script expects there.

use std::collections::BTreeMap;

use crate::action::{Action, BufferId, Kind, Run, Script};
use crate::error::ScriptError;
use crate::schedule::ScheduledRun;
use crate::updates::Updates;

/// What buffers of weights hold, action by action.
pub(crate) struct Versions<'a> {
    script: &'a Script,
    updates: Option<&'a Updates>,
    turns: BTreeMap<usize, ScheduledRun>,
    /// For each buffer that holds weights now: its unit and the version.
    holds: BTreeMap<BufferId, (usize, i64)>,
    /// For each unit: how often it was updated.
    made: BTreeMap<usize, i64>,
}

impl<'a> Versions<'a> {
    pub(crate) fn new(script: &'a Script) -> Self {
        let versioned = script.versioned.iter();
        Self {
            script,
            updates: script.updates.as_ref(),
            turns: script.turns.iter().copied().collect(),
            holds: versioned.clone().map(|v| (v.buffer, (v.unit, -(v.age as i64)))).collect(),
            made: versioned.map(|v| (v.unit, 0)).collect(),
        }
    }

    pub(crate) fn apply(&mut self, index: usize, action: &Action) -> Result<(), ScriptError> {
        let Some(updates) = self.updates else { return Ok(()) };
        let bad = |why: String, help: &str| ScriptError::Version {
            action: index,
            what: action.label.clone(),
            why,
            help: help.to_owned(),
        };
        match (&action.kind, action.run(), self.turns.get(&index)) {
            (_, Some(run), Some(turn)) => {
                let wanted = updates.version(turn.instance, turn.microbatch);
                for view in &run.inputs {
                    let Some((_, found)) = self.holds.get(&view.buffer) else { continue };
                    if *found != wanted {
                        let name = self.script.name(view.buffer);
                        let why = format!(
                            "it reads version {found} of `{name}`, its micro-batch needs version {wanted}"
                        );
                        let help = "bind the buffer that holds that version, and keep it until its last micro-batch";
                        return Err(bad(why, help));
                    }
                }
                Ok(())
            }
            (Kind::Update { run, .. }, ..) => self.update(run, &bad),
            (_, Some(run), None) => self.moved(run, &bad),
            (Kind::Release { buffer }, ..) => {
                self.holds.remove(buffer);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// An update makes the version after the newest one, from that one.
    fn update(
        &mut self,
        run: &Run,
        bad: &dyn Fn(String, &str) -> ScriptError,
    ) -> Result<(), ScriptError> {
        let written = run.outputs.iter().map(|(view, _)| view.buffer);
        let written: Vec<BufferId> = written.filter(|b| self.holds.contains_key(b)).collect();
        let [into] = written[..] else {
            let why = format!("it writes {} buffers of weights", written.len());
            return Err(bad(why, "an update makes one version"));
        };
        let unit = self.holds[&into].0;
        let newest = self.made[&unit];
        for view in &run.inputs {
            match self.holds.get(&view.buffer) {
                Some(found) if *found != (unit, newest) => {
                    let name = self.script.name(view.buffer);
                    let why = format!(
                        "it updates version {} of `{name}`, the newest is {newest}",
                        found.1
                    );
                    return Err(bad(why, "gradients are applied to the newest weights"));
                }
                _ => {}
            }
        }
        self.made.insert(unit, newest + 1);
        self.holds.insert(into, (unit, newest + 1));
        Ok(())
    }

    /// What a gather or a copy writes is the version that it reads.
    fn moved(
        &mut self,
        run: &Run,
        bad: &dyn Fn(String, &str) -> ScriptError,
    ) -> Result<(), ScriptError> {
        let read = run.inputs.iter().find_map(|view| self.holds.get(&view.buffer).copied());
        for (view, _) in &run.outputs {
            match (read, self.holds.get(&view.buffer)) {
                (None, None) => {}
                (None, Some(_)) => {
                    let why = format!("it overwrites `{}`", self.script.name(view.buffer));
                    return Err(bad(why, "only updates, gathers and copies write weights"));
                }
                (Some(read), _) => {
                    self.holds.insert(view.buffer, read);
                }
            }
        }
        Ok(())
    }

    /// The next script finds each version where this one found it, as many updates later.
    pub(crate) fn end(&self) -> Result<(), ScriptError> {
        for own in &self.script.versioned {
            let wanted = self.made[&own.unit] - own.age as i64;
            let found = self.holds.get(&own.buffer).map(|(_, version)| *version);
            if found != Some(wanted) {
                let name = self.script.name(own.buffer);
                let found = found.map_or("nothing".to_owned(), |v| format!("version {v}"));
                return Err(ScriptError::Version {
                    action: self.script.actions.len(),
                    what: "the end of the script".to_owned(),
                    why: format!(
                        "`{name}` holds {found}, the next script needs version {wanted} there"
                    ),
                    help: "carry it over: copy it there, or update it there".to_owned(),
                });
            }
        }
        Ok(())
    }
}
