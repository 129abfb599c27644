//! Reading the keys of a JSON object with errors that name them, and refusing values by rule.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::{ABSENT, HfError};

/// A key, the implemented values as text, and the test for them. An absent key passes.
pub(super) struct Rule {
    key: &'static str,
    supported: &'static str,
    accepts: fn(&Value) -> bool,
}

pub(super) const fn rule(
    key: &'static str,
    supported: &'static str,
    accepts: fn(&Value) -> bool,
) -> Rule {
    Rule { key, supported, accepts }
}

/// One JSON object of the file, read with errors that name the key. `null` is the same as absent.
pub(super) struct Keys<'a> {
    pub(super) path: &'a Path,
    /// The key that holds this object; empty for the file itself.
    pub(super) within: &'a str,
    pub(super) map: &'a Map<String, Value>,
}

impl Keys<'_> {
    /// Larger sizes are mistakes; the limit keeps products of sizes within range.
    const LARGEST_SIZE: u64 = 1 << 30;
    const MOST_LAYERS: usize = 1 << 16;

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn enforce(&self, rules: &[Rule]) -> Result<(), HfError> {
        for rule in rules {
            if let Some(value) = self.get(rule.key).filter(|value| !(rule.accepts)(value)) {
                return Err(self.unsupported(rule.key, value, rule.supported));
            }
        }
        Ok(())
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, HfError> {
        let expected = "a whole number from 1 to 2^30";
        self.read(key, expected, |value| {
            let size = value.as_u64().filter(|n| (1..=Self::LARGEST_SIZE).contains(n))?;
            usize::try_from(size).ok()
        })
    }

    /// A size that is 0 if it is not there.
    pub(super) fn count(&self, key: &str) -> Result<usize, HfError> {
        match self.get(key).and_then(Value::as_u64) {
            Some(0) => Ok(0),
            _ => Ok(self.size(key)?.unwrap_or(0)),
        }
    }

    pub(super) fn need(&self, key: &str) -> Result<usize, HfError> {
        let size = self.size(key)?;
        size.ok_or_else(|| self.missing(key, "a whole number from 1 to 2^30"))
    }

    pub(super) fn layers(&self, key: &str) -> Result<usize, HfError> {
        let layers = self.need(key)?;
        if layers > Self::MOST_LAYERS {
            let expected = format!("at most {}", Self::MOST_LAYERS);
            return Err(self.bad(key, layers.to_string(), &expected));
        }
        Ok(layers)
    }

    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, HfError> {
        self.read(key, "a number above zero", |value| {
            value.as_f64().filter(|&x| x > 0.0 && x.is_finite())
        })
    }

    pub(super) fn need_positive(&self, key: &str) -> Result<f64, HfError> {
        let number = self.positive(key)?;
        number.ok_or_else(|| self.missing(key, "a number above zero"))
    }

    /// A number from 0 to 1.
    pub(super) fn share(&self, key: &str) -> Result<Option<f64>, HfError> {
        self.read(key, "a number from 0 to below 1", |value| {
            value.as_f64().filter(|x| (0.0..1.0).contains(x))
        })
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, HfError> {
        self.read(key, "true or false", Value::as_bool)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, HfError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => Err(self.bad(key, shown(value), expected)),
        }
    }

    pub(super) fn multiple(
        &self,
        key: &str,
        value: usize,
        of: &str,
        divisor: usize,
    ) -> Result<(), HfError> {
        if value.is_multiple_of(divisor) {
            return Ok(());
        }
        let expected = format!("a multiple of `{of}` = {divisor}");
        Err(self.bad(key, value.to_string(), &expected))
    }

    pub(super) fn missing(&self, key: &str, expected: &str) -> HfError {
        self.bad(key, ABSENT.to_owned(), expected)
    }

    pub(super) fn bad(&self, key: &str, found: String, expected: &str) -> HfError {
        HfError::key(self.path, &self.full(key), found, expected)
    }

    pub(super) fn unsupported(&self, key: &str, value: &Value, supported: &str) -> HfError {
        HfError::Unsupported {
            path: self.path.into(),
            key: self.full(key),
            found: shown(value),
            supported: supported.to_owned(),
        }
    }

    fn full(&self, key: &str) -> String {
        if self.within.is_empty() { key.to_owned() } else { format!("{}.{key}", self.within) }
    }
}

/// A value for a message, shortened so that a message stays readable.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("…".chars()).collect()
}
