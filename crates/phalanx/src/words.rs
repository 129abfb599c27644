//! The words of the library in errors that speak of the command's settings.

use phalanx_error::Error;

/// What the command calls a setting, and what it is in the library. Longer names come first.
const WORDS: &[(&str, &str)] = &[
    ("train.recompute = \"full\"", "Trainer::recompute(Recompute::Full)"),
    ("optim.clip = 1.0", "Trainer::clip(Some(1.0))"),
    ("--set run.memory_limit=", "Trainer::memory_limit of "),
    ("more train.microbatches", "more Trainer::microbatches"),
    ("train.microbatches", "Trainer::microbatches"),
    ("train.seq_len", "Trainer::seq_len"),
    ("precision.compute", "Trainer::compute"),
    ("run.memory_limit", "Trainer::memory_limit"),
    ("parallel.chunks", "Trainer::chunks"),
    ("parallel.pp", "the axis pp of Trainer::mesh"),
    ("parallel.split", "Trainer::split"),
    ("parallel.holders", "Trainer::holders"),
];

/// The same error in the library's words.
pub(crate) fn in_own_words(error: Error) -> Error {
    error.reworded(|text| {
        WORDS.iter().fold(text.to_owned(), |text, (theirs, ours)| text.replace(theirs, ours))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_error::Problem;

    #[test]
    fn keys_become_methods() {
        let problem = Problem::new("own has 4 micro-batches, but train.microbatches = 2")
            .fix("compute in f32 (precision.compute)");
        let told = in_own_words(Error::refused(problem)).to_string();
        assert!(told.contains("but Trainer::microbatches = 2"), "{told}");
        assert!(told.contains("(Trainer::compute)"), "{told}");
    }
}
