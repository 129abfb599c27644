//! Schedules written as tables and read back, and tables that are none.

use phalanx_pipeline::{Named, csv};

use crate::support::build;

#[test]
fn what_is_written_is_read_back() {
    for named in Named::ALL {
        for (p, m) in [(1, 1), (2, 4), (4, 8), (3, 6)] {
            let schedule = build(named, p, m);
            let again = csv::read(schedule.name(), &csv::write(&schedule)).unwrap();
            assert_eq!(again, schedule, "{named} {p} {m}");
        }
    }
}

#[test]
fn a_table_of_ones_own() {
    let text = "# one micro-batch\r\nmicrobatch, part, device\r\n0,F,0\r\n0,F,1\r\n\r\n0,BW,1\r\n0,BW,0\r\n";
    let schedule = csv::read("mine", text).unwrap();
    assert_eq!(schedule.to_string(), "0: F0 BW0\n1: F0 BW0\n");
    assert_eq!((schedule.name(), schedule.placement().stages()), ("mine", 2));
    // Without a column for stages, chunks go round and round.
    let looped = build(Named::Interleaved, 2, 2);
    let short: String = csv::write(&looped)
        .lines()
        .map(|line| line.split(',').take(4).collect::<Vec<_>>().join(",") + "\n")
        .collect();
    assert_eq!(csv::read("interleaved", &short).unwrap(), looped);
}

#[test]
fn tables_that_are_refused() {
    let head = "device,part,microbatch,chunk,stage\n";
    let one = |rows: &str| format!("{head}{rows}");
    for (text, words) in [
        (String::new(), ["line 1: an empty table", "device,part,microbatch"]),
        ("device,part\n0,F".into(), ["line 1: no column `microbatch`", "columns are device"]),
        ("device,part,microbatch,color\n".into(), ["line 1: a column `color`", "columns are"]),
        ("device,part,part,microbatch\n".into(), ["two columns `part`", "columns are"]),
        (head.to_owned(), ["no device holds a stage", "every replica"]),
        (one("0,F,0,0,0\n0,X,0,0,0\n"), ["line 3: part `X`", "F, B, W, BW"]),
        (one("0,F,0,0\n"), ["line 2: 4 values for 5 columns", "columns are device,part"]),
        (one("0,F,-1,0,0\n"), ["line 2: microbatch `-1`", "whole numbers"]),
        (one("0,F,7,0,0\n0,BW,7,0,0\n"), ["line 2: microbatch 7", "has 2 turns"]),
        (one("0,F,0,0,0\n0,BW,0,0,1\n"), ["line 3: chunk 0 of device 0 is stage 1", "line 2 says"]),
        (one("0,F,0,1,0\n0,BW,0,1,0\n"), ["chunk 1 of device 0, but no chunk 0", "from 0"]),
        (one("0,F,0,0,0\n1,F,0,0,0\n"), ["stage 0 of replica 0 is held 2 times", "exactly one"]),
        (one("0,F,0,0,0\n0,F,1,0,0\n0,BW,0,0,0\n"), ["never runs B of micro-batch 1", "one BW"]),
        (one("0,BW,0,0,0\n0,F,0,0,0\n"), ["turn 0 (BW0)", "comes before its F"]),
    ] {
        let said = csv::read("mine", &text).unwrap_err().to_string();
        for word in words {
            assert!(said.contains(word), "`{word}` is not in: {said}");
        }
    }
}

/// A short table cannot ask for more memory than it has rows.
#[test]
fn a_short_table_with_large_numbers() {
    let mut text = "device,part,microbatch\n".to_owned();
    let rows = 20_000;
    for device in 0..rows / 2 {
        text += &format!("{device},F,0\n{device},F,{}\n", rows - 1);
    }
    let said = csv::read("mine", &text).unwrap_err().to_string();
    assert!(said.contains("stage 0 (device 0, chunk 0) never runs F of micro-batch 1"), "{said}");
}
