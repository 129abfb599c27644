//! The loader: what batches hold, resuming, overlap, errors, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use phalanx_data::{
    Batch, Corpus, DataError, IGNORED, Loader, LoaderConfig, MarkovCorpus, Sampler, Split,
};

fn markov(tokens: u64) -> Arc<dyn Corpus> {
    Arc::new(MarkovCorpus::new(3, 32, tokens).expect("a valid vocabulary"))
}

fn take(loader: &mut Loader, count: usize) -> Vec<Batch> {
    (0..count).map(|_| loader.next_batch().expect("a batch").clone()).collect()
}

#[test]
fn rows_are_the_samples_the_sampler_names() {
    let corpus = markov(1000);
    let config = LoaderConfig { microbatches: 2, ..LoaderConfig::new(7, 16, 4) };
    let sampler = Sampler::new(&*corpus, 7, 16, config.val_fraction).unwrap();
    let mut loader = Loader::new(Arc::clone(&corpus), config, 0).unwrap();
    // Beyond one epoch, so that the change of order is crossed inside a batch.
    for step in 0..30 {
        let batch = loader.next_batch().unwrap();
        assert_eq!((batch.step, batch.first_sample, batch.valid_tokens), (step, 4 * step, 64));
        for row in 0..4 {
            let (epoch, index) = sampler.epoch(4 * step + row);
            let mut tokens = [0; 17];
            corpus.read(sampler.train_start(epoch, index), &mut tokens).unwrap();
            let range = row as usize * 16..(row as usize + 1) * 16;
            assert_eq!(batch.ids[range.clone()], tokens[..16]);
            assert_eq!(batch.targets[range], tokens[1..]);
        }
        assert_eq!(loader.state(), 4 * (step + 1));
    }
}

#[test]
fn resuming_from_the_counter_gives_the_same_bits() {
    let config = LoaderConfig { ignore_token: Some(5), ..LoaderConfig::new(1, 32, 3) };
    let corpus = markov(4000);
    let mut through = Loader::new(Arc::clone(&corpus), config.clone(), 0).unwrap();
    take(&mut through, 57);
    let state = through.state();
    let expected = take(&mut through, 20);
    let mut resumed = Loader::new(corpus, config, state).unwrap();
    assert_eq!(take(&mut resumed, 20), expected);
}

#[test]
fn ignored_tokens_are_masked_and_not_counted() {
    let config = LoaderConfig { ignore_token: Some(5), ..LoaderConfig::new(1, 32, 8) };
    let plain = LoaderConfig { ignore_token: None, ..config.clone() };
    let mut masked = Loader::new(markov(4000), config, 0).unwrap();
    let mut plain = Loader::new(markov(4000), plain, 0).unwrap();
    let (masked, plain) = (masked.next_batch().unwrap(), plain.next_batch().unwrap());
    assert_eq!(masked.ids, plain.ids);
    let fives = plain.targets.iter().filter(|&&target| target == 5).count();
    assert!(fives > 0, "the test needs a batch that has some");
    assert_eq!(masked.valid_tokens, 256 - fives as u64);
    for (&with, &without) in masked.targets.iter().zip(&plain.targets) {
        assert_eq!(with, if without == 5 { IGNORED } else { without });
    }
}

#[test]
fn evaluation_takes_every_held_out_sample_once() {
    // 62 pieces of 16 tokens, a quarter of them held out: 16, in batches of 5.
    let config = LoaderConfig {
        split: Split::Validation,
        val_fraction: 0.25,
        ..LoaderConfig::new(1, 16, 5)
    };
    let mut loader = Loader::new(markov(1000), config, 0).unwrap();
    assert_eq!(loader.batches_per_pass(), 4);
    let pass = take(&mut loader, 4);
    assert_eq!(pass.iter().map(|batch| batch.valid_tokens).sum::<u64>(), 16 * 16);
    assert_eq!(pass[3].valid_tokens, 16);
    let mut tokens = vec![0; 16 * 16];
    markov(1000).read((62 - 16) * 16 + 1, &mut tokens).unwrap();
    let seen = pass.iter().flat_map(|batch| &batch.targets).filter(|&&target| target != IGNORED);
    assert!(seen.eq(&tokens));
    // The next pass is the same but for its number.
    let again = take(&mut loader, 4);
    assert!(again.iter().zip(&pass).all(|(b, a)| b.ids == a.ids && b.targets == a.targets));
}

/// Counts reads, and fails from the given one on.
struct Watched {
    reads: Arc<AtomicUsize>,
    fails_at: usize,
}

impl Corpus for Watched {
    fn len_tokens(&self) -> u64 {
        1000
    }
    fn vocab(&self) -> usize {
        10
    }
    fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError> {
        if self.reads.fetch_add(1, SeqCst) >= self.fails_at {
            let (wanted, tokens) = (out.len(), 0);
            return Err(DataError::BeyondEnd { corpus: self.describe(), at, wanted, tokens });
        }
        out.fill(5);
        Ok(())
    }
    fn describe(&self) -> String {
        "a watched corpus".into()
    }
}

fn watched(fails_at: usize) -> (Arc<AtomicUsize>, Arc<dyn Corpus>) {
    let reads = Arc::new(AtomicUsize::new(0));
    (Arc::clone(&reads), Arc::new(Watched { reads, fails_at }))
}

fn wait_for(reads: &AtomicUsize, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while reads.load(SeqCst) < count {
        assert!(Instant::now() < deadline, "{} reads, not {count}", reads.load(SeqCst));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Batches are made while nobody asks, as many as there are buffers and no more.
#[test]
fn loading_runs_ahead_and_is_bounded() {
    let (reads, corpus) = watched(usize::MAX);
    let config = LoaderConfig { prefetch: 3, ..LoaderConfig::new(0, 8, 4) };
    let mut loader = Loader::new(corpus, config, 0).unwrap();
    wait_for(&reads, 12);
    for taken in 1..10 {
        loader.next_batch().unwrap();
        wait_for(&reads, 12 + 4 * taken);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(reads.load(SeqCst), 12 + 4 * taken);
    }
}

#[test]
fn an_error_arrives_in_its_place() {
    let (_, corpus) = watched(10);
    let mut loader = Loader::new(corpus, LoaderConfig::new(0, 8, 4), 0).unwrap();
    take(&mut loader, 2);
    assert!(matches!(loader.next_batch(), Err(DataError::BeyondEnd { .. })));
    assert_eq!(loader.state(), 8, "a batch that failed was not given out");
    let message = loader.next_batch().unwrap_err().to_string();
    assert!(message.contains("before sample 8"), "{message}");
}

/// A bug in a corpus must not leave the consumer waiting for ever.
#[test]
fn a_panic_in_the_thread_is_an_error_here() {
    struct Broken;
    impl Corpus for Broken {
        fn len_tokens(&self) -> u64 {
            1000
        }
        fn vocab(&self) -> usize {
            10
        }
        fn read(&self, _: u64, _: &mut [i32]) -> Result<(), DataError> {
            panic!("a bug in the corpus")
        }
        fn describe(&self) -> String {
            "a broken corpus".into()
        }
    }
    let mut loader = Loader::new(Arc::new(Broken), LoaderConfig::new(0, 8, 4), 0).unwrap();
    assert!(matches!(loader.next_batch(), Err(DataError::Stopped { sample: 0, .. })));
}

#[test]
fn dropping_ends_the_thread() {
    let (_, corpus) = watched(usize::MAX);
    for taken in [0, 1, 5] {
        let mut loader = Loader::new(Arc::clone(&corpus), LoaderConfig::new(0, 8, 4), 0).unwrap();
        take(&mut loader, taken);
        drop(loader);
        assert_eq!(Arc::strong_count(&corpus), 1, "the thread has let go of the corpus");
    }
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let good = LoaderConfig::new(0, 8, 4);
    for (name, config) in [
        ("batch_size", LoaderConfig { batch_size: 0, ..good.clone() }),
        ("microbatches", LoaderConfig { microbatches: 0, ..good.clone() }),
        ("microbatches", LoaderConfig { microbatches: 3, ..good.clone() }),
        ("prefetch", LoaderConfig { prefetch: 0, ..good.clone() }),
        ("seq_len", LoaderConfig { seq_len: 0, ..good.clone() }),
    ] {
        let error = Loader::new(markov(1000), config, 0).unwrap_err();
        assert!(
            matches!(error, DataError::Setting { setting, .. } if setting == name),
            "{name}: {error:?}"
        );
    }
    let (_, fives) = watched(usize::MAX);
    let masked = LoaderConfig { ignore_token: Some(5), ..good };
    let error = Loader::new(fives, masked, 0).unwrap().next_batch().unwrap_err();
    assert!(matches!(error, DataError::NothingToPredict { token: 5, .. }), "{error:?}");
}
