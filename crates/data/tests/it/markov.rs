//! The synthetic source against plain counting: what its documentation claims, on a long sample.

use std::collections::HashMap;
use std::iter::once;

use phalanx_data::{Corpus, DataError, MarkovCorpus};

fn sample(corpus: &MarkovCorpus) -> Vec<i32> {
    let mut tokens = vec![0; corpus.len_tokens() as usize];
    corpus.read(0, &mut tokens).expect("the whole corpus");
    tokens
}

/// The empirical entropy, in nats, of a token given the `order` tokens before it in its piece.
fn counted_entropy<'a>(pieces: impl Iterator<Item = &'a [i32]>, order: usize) -> f64 {
    let mut contexts: HashMap<&[i32], HashMap<i32, u64>> = HashMap::new();
    let mut counted = 0.0;
    for window in pieces.flat_map(|piece| piece.windows(order + 1)) {
        *contexts.entry(&window[..order]).or_default().entry(window[order]).or_default() += 1;
        counted += 1.0;
    }
    let mut sum = 0.0;
    for counts in contexts.values() {
        let total = counts.values().sum::<u64>() as f64;
        sum -= counts.values().map(|&n| n as f64 * (n as f64 / total).ln()).sum::<f64>();
    }
    sum / counted
}

/// Without the restarts, counting must find the stated rate; with them, at least the floor, and
/// not much more, as a counting model is not told where blocks begin.
#[test]
fn the_entropy_is_what_is_stated() {
    for (vocab, seed) in [(10, 1), (25, 2), (32, 3)] {
        let corpus = MarkovCorpus::new(seed, vocab, 2048 * 800).unwrap();
        let tokens = sample(&corpus);
        let uniform = (corpus.used_tokens() as f64).ln();
        let (rate, floor) = (corpus.entropy_rate(), corpus.entropy_floor().unwrap());
        assert!(floor < 0.55 * (vocab as f64).ln());

        let counted = counted_entropy(tokens.chunks(2048), 2);
        assert!((counted - rate).abs() < 0.005, "{vocab}: counted {counted}, stated {rate}");
        let with_restarts = counted_entropy(once(&tokens[..]), 2);
        assert!(with_restarts > floor - 0.002 && with_restarts < floor + 0.02, "{with_restarts}");

        let unigram = counted_entropy(once(&tokens[..]), 0);
        assert!((unigram - uniform).abs() < 1e-3, "unigram {unigram}, ln {uniform}");
        let bigram = counted_entropy(once(&tokens[..]), 1);
        assert!(bigram > floor + 0.2 * (uniform - floor), "{vocab}: {bigram} and {floor}");
    }
}

/// Here contexts are too many to count well, but each must have at most four successors.
#[test]
fn large_vocabularies_keep_the_rate_and_stay_uniform() {
    let corpus = MarkovCorpus::new(4, 509, 2048 * 500).unwrap();
    let tokens = sample(&corpus);
    assert_eq!(corpus.used_tokens(), 508);
    assert!(tokens.iter().all(|&token| token < 508), "the odd token out never occurs");
    assert!((counted_entropy(once(&tokens[..]), 0) - 508f64.ln()).abs() < 2e-3);
    let floor = corpus.entropy_floor().unwrap();
    assert!(floor < 0.2 * 509f64.ln());
    assert!(counted_entropy(once(&tokens[..]), 1) > floor + 1.0);
    let mut successors: HashMap<(i32, i32), Vec<i32>> = HashMap::new();
    for triple in tokens.chunks(2048).flat_map(|block| block.windows(3)) {
        let seen = successors.entry((triple[0], triple[1])).or_default();
        if !seen.contains(&triple[2]) {
            seen.push(triple[2]);
        }
    }
    assert_eq!(successors.values().map(Vec::len).max(), Some(4));
}

#[test]
fn any_range_reads_the_same() {
    let corpus = MarkovCorpus::new(5, 100, 10_000).unwrap();
    let all = sample(&corpus);
    for (at, count) in [(0, 1), (1, 5), (2047, 3), (2048, 10), (4095, 4100), (9_990, 10), (7, 0)] {
        let mut out = vec![-7; count];
        corpus.read(at as u64, &mut out).unwrap();
        assert_eq!(out, all[at..at + count]);
    }
    assert!(matches!(corpus.read(9_999, &mut [0; 2]), Err(DataError::BeyondEnd { .. })));
    assert!(corpus.read(u64::MAX, &mut [0; 2]).is_err());
}

#[test]
fn the_seed_decides_everything() {
    let corpus = |seed| sample(&MarkovCorpus::new(seed, 64, 5000).expect("a valid vocabulary"));
    assert_eq!(corpus(1), corpus(1));
    assert_ne!(corpus(1), corpus(2));
}

#[test]
fn a_vocabulary_too_small_is_refused() {
    let message = MarkovCorpus::new(0, 9, 100).unwrap_err().to_string();
    assert!(message.contains("10") && message.contains("vocabulary of 9"), "{message}");
}
