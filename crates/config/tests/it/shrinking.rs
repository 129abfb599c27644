//! Layouts of fewer ranks for the same training.

use phalanx_config::{Config, Sources};

fn config(keys: &str) -> Config {
    let sources = Sources::default().preset("tiny");
    let sources = keys.split_whitespace().fold(sources, |sources, key| sources.set(key));
    Config::load(&sources).unwrap().config
}

fn degrees(config: &Config) -> [usize; 5] {
    let parallel = &config.parallel;
    let all = [parallel.dp, parallel.tp, parallel.cp, parallel.pp, config.train.microbatches];
    all.map(|degree| degree.get())
}

#[test]
fn replicas_are_given_up_first_and_the_rest_takes_their_micro_batches() {
    for (keys, ranks, expected) in [
        ("parallel.dp=4", 3, [2, 1, 1, 1, 2]),
        ("parallel.dp=4", 1, [1, 1, 1, 1, 4]),
        ("parallel.dp=2 parallel.tp=2 train.microbatches=2", 3, [1, 2, 1, 1, 4]),
        ("parallel.dp=2 parallel.pp=2 train.microbatches=4", 2, [1, 1, 1, 2, 8]),
        ("parallel.tp=4", 3, [1, 2, 1, 1, 1]),
        ("parallel.cp=2 parallel.pp=2 train.microbatches=4", 3, [1, 1, 1, 2, 4]),
        ("parallel.pp=2 train.microbatches=4", 1, [1, 1, 1, 1, 4]),
        ("parallel.dp=4 parallel.zero=3", 3, [2, 1, 1, 1, 2]),
    ] {
        let before = config(keys);
        let after = before.shrink(ranks).unwrap_or_else(|| panic!("{keys}"));
        assert_eq!(degrees(&after), expected, "{keys}");
        assert_eq!(after.train.batch_size, before.train.batch_size);
        assert!(after.is_legal() && after.parallel.ranks().get() <= ranks);
    }
}

#[test]
fn shards_stay_within_what_is_left() {
    let after = config("parallel.dp=4 parallel.zero=1 parallel.dp_shard=2").shrink(3).unwrap();
    assert_eq!((after.parallel.dp.get(), after.parallel.dp_shard.get()), (2, 2));
    let after = config("parallel.dp=4 parallel.zero=1").shrink(3).unwrap();
    assert_eq!(after.parallel.dp_shard.get(), 2);
    assert!(config("parallel.dp=2").shrink(0).is_none());
}
