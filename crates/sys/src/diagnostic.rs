//! A diagnostic: an error in parts, so that a program can format it in its own way.

use std::fmt;

/// What is wrong, why, and what would work. [`fmt::Display`] puts it all on one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Diagnostic {
    /// What is wrong, with the place and the values found.
    pub what: String,
    /// Why that cannot work, or what was expected.
    pub because: Option<String>,
    /// What would work.
    pub fix: Option<String>,
}

impl Diagnostic {
    /// A diagnostic with only this message.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), because: None, fix: None }
    }

    /// Adds why it cannot work.
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.because = Some(why.into());
        self
    }

    /// Sets what would work, replacing an earlier fix.
    pub fn fix(mut self, what: impl Into<String>) -> Self {
        self.fix = Some(what.into());
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        for part in [&self.because, &self.fix].into_iter().flatten() {
            write!(f, "; {part}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_make_one_line() {
        let told = Diagnostic::new("a.txt: empty").fix("another file");
        assert_eq!(told.to_string(), "a.txt: empty; another file");
        assert_eq!(told.because("no tokens").to_string(), "a.txt: empty; no tokens; another file");
    }
}
