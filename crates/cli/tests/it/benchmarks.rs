//! `phalanx bench`: step, collectives, partition.

use std::path::Path;

use serde_json::Value;

use crate::command::{SMALL, phalanx};

/// Two replicas of two shards each: four ranks.
const FOUR_RANKS: &[&str] =
    &["--set", "parallel.dp=2", "--set", "parallel.tp=2", "--set", "parallel.zero=3"];

fn bench_step(dir: &Path, more: &[&str]) -> Value {
    let mut lines = phalanx(dir, &[&["bench", "step", "--json"], SMALL, more]).ok().json();
    assert_eq!(lines.len(), 1);
    lines.swap_remove(0)
}

#[test]
fn a_benchmark_has_the_contracts_keys_and_the_memory_beside_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    for (ranks, more) in [(1, [].as_slice()), (4, FOUR_RANKS)] {
        let row = bench_step(dir.path(), more);
        let row = row.as_object().unwrap();
        let keys = [
            "median_ms",
            "best_ms",
            "tokens_per_s",
            "peak_rss_bytes",
            "kernel_scratch_bytes",
            "gemm_packing_bytes",
            "gemm_packing_bytes_per_step",
            "gemm_fraction",
            "floor_ms",
            "floor_fraction",
            "ranks",
            "busy_ms",
            "busy_fraction",
            "busiest_ms",
        ];
        assert_eq!(row.len(), keys.len());
        assert!(keys.iter().all(|key| row[*key].as_f64().unwrap() > 0.0), "{row:?}");
        assert!(row["best_ms"].as_f64() <= row["median_ms"].as_f64());
        assert!(row["gemm_fraction"].as_f64().unwrap() < 1.0);
        assert_eq!(row["ranks"], ranks);
    }
    assert!(!dir.path().join("runs").exists(), "a benchmark leaves no run");
}

/// Only a rank's own thread is asked for its time.
#[test]
fn busy_time_is_not_told_where_other_threads_compute_too() {
    let dir = tempfile::tempdir().unwrap();
    let row = bench_step(dir.path(), &["--set", "run.threads=2"]);
    assert_eq!((&row["busy_ms"], &row["busy_fraction"]), (&Value::Null, &Value::Null));
}

#[test]
fn collectives_have_a_row_for_each_op_and_size() {
    let dir = tempfile::tempdir().unwrap();
    let command = ["bench", "collectives", "--ranks", "2", "--json"];
    let rows = phalanx(dir.path(), &[&command]).ok().json();
    let ops = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
    let ops = [&ops[..], &["turn", "broadcast_block", "reduce_block"]].concat();
    assert_eq!(rows.len(), 5 * ops.len());
    for (row, at) in rows.iter().zip(0..) {
        let kib = [4, 64, 1 << 10, 16 << 10, 64 << 10][at / ops.len()];
        assert_eq!((&row["op"], &row["bytes"]), (&ops[at % ops.len()].into(), &(kib << 10).into()));
        let [us, rate] = ["median_us", "gib_per_s"].map(|key| row[key].as_f64().unwrap());
        let gib = row["bytes"].as_f64().unwrap() / (1u64 << 30) as f64;
        assert!((rate * us * 1e-6 / gib - 1.0).abs() < 1e-9, "{row}");
        assert!(row["copy_limit_us"].as_f64().unwrap() > 0.0, "{row}");
    }
    let refused = |ranks: &str| phalanx(dir.path(), &[&["bench", "collectives", "--ranks", ranks]]);
    refused("0").refused(&["--ranks"]);
    refused("2000").refused(&["--ranks 1024 or fewer"]);
}

#[test]
fn partitioning_a_deep_model_for_many_ranks_takes_less_than_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let command = ["bench", "partition", "--preset", "llama-0.95b", "--json", "--layers"];
    let layout = [
        "--set",
        "train.batch_size=64",
        "--set",
        "parallel.dp=16",
        "--set",
        "parallel.tp=8",
        "--set",
        "parallel.cp=8",
        "--set",
        "parallel.cp_kind=allgather",
    ];
    let row = phalanx(dir.path(), &[&command, &["96"], &layout]).ok().json().swap_remove(0);
    assert_eq!((&row["layers"], &row["ranks"]), (&96.into(), &1024.into()));
    let ms = row["ms"].as_f64().unwrap();
    let parts = ["model_ms", "programs_ms", "script_ms"].map(|key| row[key].as_f64().unwrap());
    assert!((parts.iter().sum::<f64>() - ms).abs() < 1e-6 * ms, "{row}");
    // Ten times the time that it takes, for machines that others use.
    assert!(ms < 1000.0, "{row}");
    // Every layer is run forward and backward.
    assert!(row["actions"].as_u64().unwrap() > 2 * 96, "{row}");
    phalanx(dir.path(), &[&command, &["0"]]).refused(&["--layers"]);
    phalanx(dir.path(), &[&command, &["2"], &["--set", "parallel.dp=3"]])
        .refused(&["train.batch_size"]);
}
