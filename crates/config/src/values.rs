//! The values that were given for keys, where each came from, and what is wrong with them.
//!
//! Problems are collected rather than returned one by one, so that a user who made three mistakes
//! sees all three. A rule between keys is not checked when one of them could not be read: its
//! message would only repeat the first problem.

use std::collections::{BTreeMap, BTreeSet};

use toml_edit::Value;

use super::key::Key;
use super::setting::Setting;
use super::suggest::closest;
use phalanx_error::{Location, Problem};

/// A value as it was written.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) value: Value,
    pub(crate) place: Location,
    /// Whether the user wrote it, in a file or on the command line, rather than a preset.
    pub(crate) by_user: bool,
}

impl Given {
    /// The value as the user would write it.
    pub(crate) fn text(&self) -> String {
        self.value.to_string().trim().to_string()
    }
}

/// The values given for keys, after all sources were merged.
#[derive(Default)]
pub(crate) struct Values {
    pub(crate) given: BTreeMap<&'static str, Given>,
    /// The preset that the user's values override.
    pub(crate) preset: Option<String>,
    /// What the user should know although nothing is wrong, a line each.
    pub(crate) notes: Vec<String>,
    /// Keys whose value could not be read.
    broken: BTreeSet<&'static str>,
    pub(crate) problems: Vec<Problem>,
}

impl Values {
    /// The value of `key`, if one was given and it is valid; a problem is noted.
    pub(crate) fn read<T: Setting>(&mut self, key: &'static Key) -> Option<T> {
        let given = self.given.get(key.name)?;
        let value = T::read(&given.value);
        if value.is_none() {
            self.problems.push(unacceptable(key, given));
            self.broken.insert(key.name);
        }
        value
    }

    /// Whether the user wrote a value for `key`.
    pub(crate) fn by_user(&self, key: &str) -> bool {
        self.given.get(key).is_some_and(|given| given.by_user)
    }

    /// Takes out the values that a preset gave to keys that `goes` names, and returns them as text.
    pub(crate) fn drop_of_preset(&mut self, goes: impl Fn(&str) -> bool) -> Vec<String> {
        let mut dropped = Vec::new();
        self.given.retain(|key, given| {
            let stays = given.by_user || !goes(key);
            if !stays {
                dropped.push(format!("{key} = {}", given.text()));
            }
            stays
        });
        dropped
    }

    /// Tells that values of the preset are not used because of what the user gave.
    pub(crate) fn note_dropped(&mut self, dropped: &[String], cause: &str, remedy: &str) {
        if let (Some(preset), false) = (&self.preset, dropped.is_empty()) {
            let dropped = dropped.join(", ");
            self.notes.push(format!(
                "with {cause}, the layout of preset {preset} is not used: {dropped} ({remedy})"
            ));
        }
    }

    /// Notes the problem that `tell` states unless `holds`. The rule is about `keys`, whose places
    /// are added to the problem; it is skipped if one of them could not be read.
    pub(crate) fn rule(&mut self, keys: &[&str], holds: bool, tell: impl FnOnce() -> Problem) {
        if holds || keys.iter().any(|key| self.broken.contains(key)) {
            return;
        }
        let mut problem = tell();
        let places = keys.iter().filter_map(|key| self.given.get(key));
        problem.places.extend(places.map(|given| given.place.clone()));
        self.problems.push(problem);
    }
}

fn unacceptable(key: &Key, given: &Given) -> Problem {
    let problem = Problem::new(format!("{} = {} is not accepted", key.name, given.text()))
        .at(given.place.clone())
        .because(format!("expected {}", (key.expects)()));
    let unquoted = given.value.as_str().map(super::sources::free_value);
    let unquoted = unquoted.filter(|value| !value.is_str() && (key.normal)(value).is_some());
    if let Some(value) = unquoted {
        return problem.fix(format!("{} = {}, without quotes", key.name, value.to_string().trim()));
    }
    let words = (key.words)().iter().copied();
    match given.value.as_str().and_then(|word| closest(word, words)) {
        Some(word) => problem.guess(format!("`{word}`")),
        None => problem,
    }
}
