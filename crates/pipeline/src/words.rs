//! Counts and numbers as text in messages.

/// `1 stage`, `2 stages`; for words with the plural ending s, or es after an h.
pub(crate) fn counted(count: usize, word: &str) -> String {
    match (count, word.ends_with('h')) {
        (1, _) => format!("1 {word}"),
        (_, true) => format!("{count} {word}es"),
        (_, false) => format!("{count} {word}s"),
    }
}

/// Numbers for each stage, such as `2-1-1`.
pub(crate) fn listed(counts: &[usize]) -> String {
    let words: Vec<String> = counts.iter().map(usize::to_string).collect();
    words.join("-")
}

/// A number as it would be typed: `0.5`, and `1e308` instead of many zeros.
pub(crate) fn typed(number: f64) -> String {
    match number.abs() {
        size if size.is_finite() && size != 0.0 && !(1e-6..1e15).contains(&size) => {
            format!("{number:e}")
        }
        _ => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_a_thing_and_several() {
        assert_eq!(counted(1, "micro-batch"), "1 micro-batch");
        assert_eq!(
            [counted(0, "micro-batch"), counted(2, "stage")],
            ["0 micro-batches", "2 stages"]
        );
    }

    #[test]
    fn numbers_are_short_whatever_their_size() {
        let found = [-1.0, 0.0, 0.25, 1e308, 2e-310, f64::NAN, f64::INFINITY].map(typed);
        assert_eq!(found, ["-1", "0", "0.25", "1e308", "2e-310", "NaN", "inf"]);
    }
}
