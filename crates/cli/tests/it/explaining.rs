//! `phalanx explain`.

use phalanx::ir::text::parse;

use crate::command::{SMALL, phalanx};

#[test]
fn a_step_is_shown_as_programs_script_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    let text = phalanx(dir.path(), &[&["explain"], SMALL]).ok().out;
    for words in [
        "# F of blocks.0",
        "# FBW of head",
        "# script of rank 0:",
        "update embed",
        "# memory:",
        "residuals",
        "largest buffers",
        "outside the arena",
        "# llama of 1 layer, width 16",
        "# a step: 8 sequences of 16 tokens, at once, 1 thread",
        "matmul(mlp.gate)",
        "within block.BW",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    let part = ["--segment", "block", "--part", "W"];
    let text = phalanx(dir.path(), &[&["explain"], SMALL, &part]).ok().out;
    assert!(text.contains("program block.W") && !text.contains("# script of rank 0:"), "{text}");
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

/// Keys and values of two ranks that are gathered are four blocks, the own ones among them; in a ring the two of the other
/// rank are there, forward and backward. A block: 8 sequences, 8 of 16 positions, one key head of 8, in f32.
#[test]
fn operands_of_other_ranks_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let block = 8 * 8 * 8 * 4;
    for (kind, blocks) in [("ring", 2), ("allgather", 4)] {
        let kind = format!("parallel.cp_kind={kind}");
        let sets = ["--set", "parallel.cp=2", "--set", &kind];
        let lines = phalanx(dir.path(), &[&["explain", "--json"], SMALL, &sets]).ok().json();
        assert_eq!(lines.last().unwrap()["memory"]["foreign_bytes"], blocks * block, "{kind}");
        let text = phalanx(dir.path(), &[&["explain"], SMALL, &sets]).ok().out;
        let words = format!("operands that other ranks sent: {} bytes", blocks * block);
        assert!(text.contains(&words), "`{words}` is not in: {text}");
    }
    let alone = phalanx(dir.path(), &[&["explain"], SMALL]).ok().out;
    assert!(!alone.contains("operands that other ranks sent"), "{alone}");
}

/// Two replicas whose weights are sharded over them, of two tensor-parallel ranks each.
const FOUR_RANKS: &[&str] =
    &["--set", "parallel.dp=2", "--set", "parallel.tp=2", "--set", "parallel.zero=3"];

/// Eight sequences of 16 tokens and width 16 in f32, half of them on each replica: an all-reduce
/// over two ranks moves as many bytes as there are.
const HIDDEN_BYTES: u64 = 8 * 16 * 16 * 4 / 2;

#[test]
fn collectives_show_their_bytes_in_programs_script_and_total() {
    let dir = tempfile::tempdir().unwrap();
    let text = phalanx(dir.path(), &[&["explain"], SMALL, FOUR_RANKS]).ok().out;
    let words = format!("{{0:dp}}  // moves {HIDDEN_BYTES} bytes (4.0 KiB)");
    assert!(text.contains(&words), "{text}");
    for words in ["# communication of a step:", "  // all_gather<dp> moves", "reduce_scatter"] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    let lines = phalanx(dir.path(), &[&["explain", "--json"], SMALL, FOUR_RANKS]).ok().json();
    let program = |name: &str| {
        let named = |l: &&serde_json::Value| {
            l["program"]["text"].as_str().is_some_and(|t| t.contains(name))
        };
        lines.iter().find(named).unwrap()["program"].clone()
    };
    let block = program("program block.F ");
    assert!(parse(block["text"].as_str().unwrap()).is_ok());
    let collectives = block["collectives"].as_array().unwrap();
    let bytes: Vec<u64> = collectives.iter().map(|c| c["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes, [HIDDEN_BYTES; 2]);
    assert!(collectives.iter().all(|c| c["op"] == "all_reduce" && c["axes"][0] == "tp"));

    // The total is what the actions move together, and every unit's weights are gathered.
    let moves = |line: &serde_json::Value| line["action"]["moves"].as_array().cloned();
    let by_action: Vec<serde_json::Value> = lines.iter().filter_map(moves).flatten().collect();
    let sum = |rows: &[serde_json::Value]| -> u64 {
        rows.iter().map(|row| row["bytes"].as_u64().unwrap()).sum()
    };
    let total = lines.iter().find_map(|line| line["communication"].as_array()).unwrap();
    assert_eq!(sum(total), sum(&by_action));
    let gathers = lines.iter().filter(|line| line["action"]["kind"] == "gather");
    assert!(gathers.clone().count() > 2);
    assert!(gathers.clone().all(|line| line["action"]["moves"][0]["op"] == "all_gather"));
}

#[test]
fn the_grid_of_ranks_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let text = phalanx(dir.path(), &[&["explain", "--ranks"], SMALL, FOUR_RANKS]).ok().out;
    for words in [
        "# ranks: 4 on the mesh dp=2 tp=2",
        "        tp=0  tp=1\n  dp=0     0     1\n  dp=1     2     3\n",
        "2 of 2    [0,2] [1,3]",
        "# communication of a step:",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    assert!(!text.contains("program block"), "{text}");
    let lines = phalanx(dir.path(), &[&["explain", "--ranks", "--json"], SMALL, FOUR_RANKS]);
    let lines = lines.ok().json();
    assert_eq!(
        lines[0]["ranks"]["coordinates"],
        serde_json::json!([[0, 0], [0, 1], [1, 0], [1, 1]])
    );
    let alone = phalanx(dir.path(), &[&["explain", "--ranks"], SMALL]).ok().out;
    assert!(alone.contains("# ranks: 1\n\n# communication: none"), "{alone}");
    phalanx(dir.path(), &[&["explain", "--ranks", "--part", "F"], SMALL]).refused(&["--part"]);
}

/// A row for each rank; a column for each kind of thing, with the share that the rank holds.
#[test]
fn what_ranks_hold_is_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let zero = ["--set", "parallel.dp=4", "--set", "parallel.zero=2"];
    let draw = ["explain", "--ranks", "--svg", "ranks.svg"];
    phalanx(dir.path(), &[&draw, &["--preset", "tiny"], &zero]).ok();
    let svg = std::fs::read_to_string(dir.path().join("ranks.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    for words in ["rank 0  dp=0", "rank 3  dp=3", "optimizer state", "tokens of a batch", "ZeRO-2"]
    {
        assert!(svg.contains(words), "`{words}` is not in: {svg}");
    }
    // Whole weights, a quarter of gradients and of state, on each of four ranks.
    assert_eq!(svg.matches(">100%<").count(), 4, "{svg}");
    // Padding makes the last shard a little smaller.
    let quarters = [">24%<", ">25%<", ">26%<"].map(|share| svg.matches(share).count());
    assert_eq!(quarters.iter().sum::<usize>(), 8, "{svg}");
    phalanx(dir.path(), &[&["explain", "--svg", "x.svg"], SMALL]).refused(&["--ranks"]);
    let nowhere = ["explain", "--ranks", "--svg", "none/x.svg"];
    phalanx(dir.path(), &[&nowhere, SMALL]).refused(&["none/x.svg cannot be written"]);
}
