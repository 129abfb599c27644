//! Which seeds a test of random cases tries: the default ones, or those in an environment variable.

use std::ops::Range;

/// The seeds of a run, and how many of their cases must not be refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeds {
    /// The seeds.
    pub range: Range<u64>,
    /// Few cases may be refused, else nothing would be tested.
    pub at_least: usize,
}

impl Seeds {
    /// Seeds for this many cases, beginning with 0; or, where `PHALANX_SEEDS=1000..5000` is set,
    /// those.
    pub fn for_cases(cases: usize) -> Self {
        match asked_seeds("PHALANX_SEEDS") {
            Some(range) => Self { at_least: count(&range).saturating_sub(10) * 9 / 10, range },
            None => Self { range: 0..(cases * 10 / 9) as u64 + 1, at_least: cases },
        }
    }
}

/// The seeds that an environment variable asks for, if it is set, as `1000..5000`.
///
/// # Panics
/// If it has another form.
pub fn asked_seeds(variable: &str) -> Option<Range<u64>> {
    let text = std::env::var(variable).ok()?;
    let range = parse(&text);
    assert!(range.is_some(), "{variable} is `{text}`, which should read like 1000..5000");
    range
}

fn count(range: &Range<u64>) -> usize {
    range.end.saturating_sub(range.start) as usize
}

fn parse(text: &str) -> Option<Range<u64>> {
    let (from, to) = text.split_once("..")?;
    let range: Range<u64> = from.parse().ok()?..to.parse().ok()?;
    (range.start <= range.end).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        assert_eq!(parse("1000..5000"), Some(1000..5000));
        for bad in ["17", "18..17", "a..b", "..5", "1..-2"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
