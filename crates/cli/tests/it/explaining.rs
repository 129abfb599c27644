//! `phalanx explain` and `phalanx bench step`.

use phalanx::ir::text::parse;

use crate::command::{SMALL, phalanx};

#[test]
fn a_step_is_shown_as_programs_script_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let text = phalanx(dir.path(), &[&["explain"], SMALL]).ok().out;
    for words in [
        "# F of blocks.0",
        "# FBW of head",
        "# script:",
        "update embed",
        "# memory:",
        "residuals",
        "largest buffers",
        "beside the arena",
        "# llama of 1 layer, width 16",
        "# a step: 8 sequences of 16 tokens, at once, 1 thread",
        "matmul(mlp.gate)",
        "within block.BW",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    let part = ["--segment", "block", "--part", "W"];
    let text = phalanx(dir.path(), &[&["explain"], SMALL, &part]).ok().out;
    assert!(text.contains("program block.W") && !text.contains("# script:"), "{text}");
    let wrong = phalanx(dir.path(), &[&["explain"], SMALL, &["--segment", "blok"]]);
    wrong.refused(&["embed | block | head"]);
}

#[test]
fn the_json_programs_parse_and_the_parts_of_memory_fit_the_arena() {
    let dir = tempfile::tempdir().unwrap();
    let lines = phalanx(dir.path(), &[&["explain", "--json"], SMALL]).ok().json();
    let programs = lines.iter().filter_map(|line| line["program"]["text"].as_str());
    let names: Vec<String> = programs.map(|text| parse(text).unwrap().name).collect();
    assert_eq!(names, ["embed.F", "embed.BW", "block.F", "block.BW", "head.FBW"]);
    let actions = lines.iter().filter(|line| line.get("action").is_some());
    assert!(actions.clone().all(|line| line["action"]["lane"] == "compute"));
    assert!(actions.count() > 5);
    let memory = &lines.last().unwrap()["memory"];
    let peaks = memory["peaks"].as_object().unwrap();
    let most = peaks.values().map(|bytes| bytes.as_u64().unwrap()).max().unwrap();
    assert!(most <= memory["arena"].as_u64().unwrap());
    let largest = memory["largest"].as_array().unwrap();
    let names: Vec<&str> = largest.iter().map(|row| row["buffer"].as_str().unwrap()).collect();
    assert!(names.iter().all(|name| names.iter().filter(|n| n == &name).count() == 1));
    assert!(memory["kernel_scratch_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_benchmark_has_the_contracts_keys_and_the_memory_beside_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    let lines = phalanx(dir.path(), &[&["bench", "step", "--json"], SMALL]).ok().json();
    let row = lines[0].as_object().unwrap();
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
    ];
    assert_eq!((lines.len(), row.len()), (1, keys.len()));
    assert!(keys.iter().all(|key| row[*key].as_f64().unwrap() > 0.0), "{row:?}");
    assert!(row["best_ms"].as_f64() <= row["median_ms"].as_f64());
    assert!(row["gemm_fraction"].as_f64().unwrap() < 1.0);
    assert!(!dir.path().join("runs").exists(), "a benchmark leaves no run");
}
