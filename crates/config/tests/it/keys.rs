//! The keys are a promise to users: adding one is a decision, losing one breaks configurations.

use phalanx_config::{Config, Sources};

#[test]
fn the_keys_are_frozen() {
    let names: Vec<&str> = phalanx_config::keys().map(|key| key.name).collect();
    assert_eq!(names.join("\n"), include_str!("keys.txt").trim_end());
}

#[test]
fn other_names_are_unambiguous_within_a_section() {
    for key in phalanx_config::keys() {
        let others =
            phalanx_config::keys().filter(|k| k.section() == key.section() && k.name != key.name);
        for other in others {
            assert_ne!(key.field(), other.field());
            for aka in key.aka {
                assert_ne!(*aka, other.field(), "{} and {}", key.name, other.name);
                assert!(
                    !other.aka.contains(aka),
                    "{} and {} both know {aka}",
                    key.name,
                    other.name
                );
            }
        }
    }
}

#[test]
fn the_contracts_defaults_hold() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty.toml");
    std::fs::write(&empty, "").unwrap();
    let cores = phalanx_config::Count::new(6).unwrap();
    let loaded = Config::load(&Sources::default().file(&empty).cores(cores)).unwrap();
    let text = loaded.config.to_toml();
    for line in [
        "microbatches = 1",
        "dir = \"runs/\"",
        "threads = 6",
        "dp = 1",
        "tp = 1",
        "cp = 1",
        "pp = 1",
        "zero = 0",
        "sp = false",
        "tp_kind = \"1d\"",
        "cp_kind = \"ulysses\"",
        "sync = \"ddp\"",
        "schedule = \"1f1b\"",
        "warmup = \"pa\"",
        "chunks = 1",
        "order = \"tp-cp-dp-pp\"",
        "bucket_mib = 25",
        "reduce_bucket_size = 500000000",
        "allgather_bucket_size = 500000000",
        "compute = \"f32\"",
        "weights = \"f32\"",
        "grads = \"f32\"",
        "recompute = \"none\"",
        "kind = \"adamw\"",
        "dp_shard = 1",
        "from = \"none\"",
        "memory_limit = \"none\"",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}
