//! Attributes of ops, as the text form writes them: `key=value`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

/// The attributes of one op in printing order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attrs(Vec<(&'static str, String)>);

impl Attrs {
    /// No attributes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value that prints and parses without loss.
    pub fn with(mut self, key: &'static str, value: impl Display) -> Self {
        self.0.push((key, value.to_string()));
        self
    }

    /// Adds a list, printed as `1x2x3`; an empty list prints as `none`.
    pub fn list(self, key: &'static str, values: &[usize]) -> Self {
        let text: Vec<String> = values.iter().map(usize::to_string).collect();
        self.with(key, if text.is_empty() { "none".to_owned() } else { text.join("x") })
    }

    /// The pairs in printing order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(k, v)| (*k, v.as_str()))
    }
}

/// Reads attributes back; an attribute that was not read is an error at the end.
#[derive(Debug, Default)]
pub struct AttrReader {
    values: BTreeMap<String, String>,
}

impl AttrReader {
    /// A reader of `key=value` texts.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self { values: pairs.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect() }
    }

    /// Takes a required value.
    pub fn take<T: FromStr>(&mut self, key: &str) -> Result<T, String> {
        let text = self.values.remove(key).ok_or_else(|| format!("missing attribute `{key}`"))?;
        text.parse().map_err(|_| format!("`{key}={text}` is not a legal value"))
    }

    /// Takes a value that has a default.
    pub fn take_or<T: FromStr>(&mut self, key: &str, default: T) -> Result<T, String> {
        match self.values.contains_key(key) {
            true => self.take(key),
            false => Ok(default),
        }
    }

    /// Takes a list written `1x2x3`.
    pub fn take_list(&mut self, key: &str) -> Result<Vec<usize>, String> {
        let text: String = self.take(key)?;
        if text == "none" {
            return Ok(Vec::new());
        }
        (text.split('x').map(str::parse).collect::<Result<_, _>>())
            .map_err(|_| format!("`{key}={text}` is not a list such as 1x2x3"))
    }

    /// Fails if an attribute was never read.
    pub fn finish(self) -> Result<(), String> {
        match self.values.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("unknown attribute `{key}`")),
        }
    }
}
