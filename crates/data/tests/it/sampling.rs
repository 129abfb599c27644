//! The order of samples: a bijection, keyed, with the held-out part left alone.

use std::collections::HashSet;

use phalanx_data::{Corpus, DataError, MarkovCorpus, Permutation, Sampler, Split};

fn order(seed: u64, epoch: u64, n: u64) -> Vec<u64> {
    let permutation = Permutation::new(seed, epoch, n);
    (0..n).map(|index| permutation.at(index)).collect()
}

#[test]
fn every_number_comes_once() {
    for n in (1..70).chain([255, 256, 257, 1000, 65_537]) {
        let mut numbers = order(11, 3, n);
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..n), "n = {n}");
    }
}

/// Places are hit evenly: over many epochs each number stands first about equally often, and
/// neighbours do not stay neighbours.
#[test]
fn the_order_looks_random() {
    let (n, epochs) = (10u64, 20_000u64);
    let mut first = [0f64; 10];
    for epoch in 0..epochs {
        first[Permutation::new(5, epoch, n).at(0) as usize] += 1.0;
    }
    let expected = (epochs / n) as f64;
    let chi: f64 = first.iter().map(|count| (count - expected).powi(2) / expected).sum();
    assert!(chi < 30.0, "chi² = {chi} with 9 degrees of freedom");
    let numbers = order(5, 0, 10_000);
    let neighbours = numbers.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count();
    assert!(neighbours < 15, "{neighbours} of 9999, where 2 are expected");
}

#[test]
fn seed_and_epoch_change_the_order() {
    assert_eq!(order(1, 0, 100), order(1, 0, 100));
    assert_ne!(order(1, 0, 100), order(1, 1, 100));
    assert_ne!(order(1, 0, 100), order(2, 0, 100));
    assert_ne!(order(1, 0, 100), order(1, 1 << 32, 100));
}

#[test]
fn each_epoch_takes_every_training_sample_and_no_other() {
    let corpus = MarkovCorpus::new(0, 16, 16 * 100 + 3).unwrap();
    let sampler = Sampler::new(&corpus, 9, 16, 0.05).unwrap();
    assert_eq!((sampler.samples(Split::Train), sampler.samples(Split::Validation)), (95, 5));
    let starts = |epoch| -> HashSet<u64> {
        (0..95).map(|index| sampler.train_start(epoch, index)).collect()
    };
    let expected: HashSet<u64> = (0..95).map(|piece| piece * 16).collect();
    for epoch in 0..3 {
        assert_eq!(starts(epoch), expected);
    }
    let held: Vec<u64> = (0..5).map(|index| sampler.validation_start(index)).collect();
    assert_eq!(held, [1520, 1536, 1552, 1568, 1584]);
    assert!(1584 + 17 <= corpus.len_tokens());
    assert_eq!(sampler.epoch(94), (0, 94));
    assert_eq!(sampler.epoch(95), (1, 0));
}

#[test]
fn at_least_one_sample_on_either_side_unless_none_is_wanted() {
    let corpus = MarkovCorpus::new(0, 16, 65).unwrap();
    for (fraction, held) in [(0.0, 0), (1e-9, 1), (0.3, 1), (0.99, 3)] {
        let sampler = Sampler::new(&corpus, 0, 16, fraction).unwrap();
        assert_eq!(sampler.samples(Split::Validation), held);
        assert_eq!(sampler.samples(Split::Train), 4 - held);
    }
    for bad in [-0.1, 1.0, f64::NAN] {
        let error = Sampler::new(&corpus, 0, 16, bad).unwrap_err();
        assert!(matches!(error, DataError::Setting { setting: "val_fraction", .. }), "{error}");
    }
    assert!(Sampler::new(&corpus, 0, 0, 0.05).is_err());
}

#[test]
fn too_little_data_says_how_much_would_do() {
    let corpus = MarkovCorpus::new(0, 16, 128).unwrap();
    let message = Sampler::new(&corpus, 0, 64, 0.05).unwrap_err().to_string();
    assert!(message.contains("128 tokens") && message.contains("need 129 tokens"), "{message}");
    assert!(message.contains("at most 63"), "{message}");
    Sampler::new(&corpus, 0, 63, 0.05).unwrap();
    let enough = MarkovCorpus::new(0, 16, 129).unwrap();
    Sampler::new(&enough, 0, 64, 0.05).unwrap();
}
