//! `phalanx schedule`.

use std::fs;

use serde_json::{Value, json};

use crate::command::{Done, phalanx};

fn schedule(args: &str) -> Done {
    let dir = tempfile::tempdir().unwrap();
    let words: Vec<&str> = args.split_whitespace().collect();
    phalanx(dir.path(), &[&["schedule"], &words])
}

fn numbers(args: &str) -> Value {
    schedule(&format!("{args} --json")).ok().json().remove(0)
}

#[test]
fn numbers_are_those_of_the_closed_forms() {
    let row = numbers("1f1b --stages 4 --microbatches 8");
    assert_eq!(row["makespan"], json!(33.0));
    assert_eq!(row["span"], json!(33.0));
    assert_eq!(row["bubble_ideal"], json!(0.375));
    assert_eq!(row["bubble_total"], json!(3.0 / 11.0));
    assert_eq!(row["peak_in_flight"], json!([4, 3, 2, 1]));
    assert_eq!(row["peak_until_w"], json!([4, 3, 2, 1]));
    assert_eq!(row["weight_versions"], json!([1, 1, 1, 1]));
    let row = numbers("zb-h2 --stages 4 --microbatches 8");
    assert_eq!((&row["makespan"], &row["span"]), (&json!(27.0), &json!(24.0)));
    assert_eq!(row["bubble_total"], json!(0.0));
    let row = numbers("interleaved --stages 4 --microbatches 8 --tf 2 --tb 2 --tw 2");
    assert_eq!((&row["makespan"], &row["chunks"]), (&json!(57.0), &json!(2)));
    assert_eq!(row["peak_in_flight"], json!([11, 9, 7, 5]));
    let row = numbers("interleaved --stages 4 --microbatches 8 --chunks 1");
    assert_eq!(row["makespan"], json!(33.0));
    let row = numbers("naive --stages 3 --microbatches 5 --tf 1 --tb 1 --tw 0");
    assert_eq!(row["makespan"], json!(30.0));
    let row = numbers("1f1b --stages 8 --microbatches 24 --tf 10 --tb 20 --tw 0 --hop 0.5");
    assert_eq!(row["makespan"], json!(957.0));
    assert_eq!(row["work"], json!(1.0));
    let row = numbers("vectorised --stages 4 --microbatches 6");
    assert_eq!((&row["makespan"], &row["work"]), (&json!(27.0), &json!(1.5)));
    assert_eq!(
        (&row["bubble_total"], &row["peak_in_flight"]),
        (&json!(1.0 / 3.0), &json!([9, 9, 9, 9]))
    );
    let row = numbers("vectorised --stages 4 --microbatches 6 --chunks 2");
    assert_eq!((&row["makespan"], &row["work"]), (&json!(22.5), &json!(1.25)));
    let row = numbers("1f1b --stages 4 --microbatches 8 --warmup pb");
    assert_eq!(row["peak_in_flight"], json!([7, 5, 3, 1]));
}

#[test]
fn a_picture_without_a_terminal_is_plain() {
    let text = schedule("1f1b --stages 2 --microbatches 3 --tw 0").ok().out;
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("device")).collect();
    assert_eq!(
        rows,
        ["device 0  F0 F1 ...B0 F2 B1 ...B2      2", "device 1  ...F0 B0 F1 B1 F2 B2 ...     1"]
    );
    assert!(!text.contains('\x1b'), "{text}");
    assert!(text.contains("makespan 8, bubble 25.0%"), "{text}");
}

#[test]
fn several_are_compared_on_one_scale() {
    let args = "--compare 1f1b,zb-h1,zb-v --stages 4 --microbatches 8";
    let rows = schedule(&format!("{args} --json")).ok().json();
    let found: Vec<(&Value, &Value)> =
        rows.iter().map(|row| (&row["schedule"], &row["makespan"])).collect();
    let expected = [("1f1b", 33.0), ("zb-h1", 27.0), ("zb-v", 25.5)];
    assert_eq!(found.len(), expected.len());
    for ((name, makespan), row) in expected.into_iter().zip(found) {
        assert_eq!(row, (&json!(name), &json!(makespan)));
    }
    let named =
        schedule("zb-h1 --compare 1f1b,zb-h1,interleaved --chunks 1 --stages 2 --microbatches 4");
    let heads = ["zb-h1: 2 devices", "1f1b: 2 devices"];
    assert!(heads.iter().all(|head| named.out.contains(head)), "{}", named.out);
    assert_eq!(named.ok().out.matches("zb-h1:").count(), 1);
}

#[test]
fn drawings_and_tables_are_written_and_tables_read() {
    let dir = tempfile::tempdir().unwrap();
    let shape = ["--stages", "4", "--microbatches", "8", "--json"];
    let files = ["--svg", "a.svg", "--csv", "a.csv"];
    let first = phalanx(dir.path(), &[&["schedule", "zb-v"], &shape, &files]).ok().json();
    let svg = fs::read_to_string(dir.path().join("a.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    let again = phalanx(dir.path(), &[&["schedule", "csv:a.csv", "--json"]]).ok().json();
    for key in ["makespan", "span", "peak_in_flight", "peak_until_w", "stages", "microbatches"] {
        assert_eq!(first[0][key], again[0][key], "{key}");
    }
    let wrong = phalanx(dir.path(), &[&["schedule", "csv:a.csv", "--stages", "3"]]);
    wrong.refused(&["--stages 3, but csv:a.csv has 4"]);
    let table = fs::read_to_string(dir.path().join("a.csv")).unwrap();
    let lines: Vec<&str> = table.lines().filter(|line| *line != "3,B,7,0,3,0,0").collect();
    fs::write(dir.path().join("b.csv"), lines.join("\n")).unwrap();
    let lost = phalanx(dir.path(), &[&["schedule", "csv:b.csv"]]);
    let line = 1 + lines.iter().position(|line| *line == "3,W,7,0,3,0,0").unwrap();
    lost.refused(&[
        "stage group 3",
        "W of micro-batch 7 comes before its B",
        &format!("(b.csv:{line})"),
        "add B7 to stage group 3 before it, or write BW",
    ]);
    fs::write(dir.path().join("c.csv"), table.replace("2,F,5", "2,X,5")).unwrap();
    phalanx(dir.path(), &[&["schedule", "csv:c.csv"]]).refused(&["part `X`", "c.csv:"]);
    phalanx(dir.path(), &[&["schedule", "csv:none.csv"]]).refused(&["none.csv: no such file"]);
}

/// A table says what it is, so that nothing else need be said, and others can be compared with it.
#[test]
fn tables_know_their_own_shape() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &str| {
        let words: Vec<&str> = args.split_whitespace().collect();
        phalanx(dir.path(), &[&["schedule"], &words])
    };
    run("interleaved --stages 2 --microbatches 4 --csv i.csv").ok();
    let rows = run("csv:i.csv --compare 1f1b,gpipe --warmup pb --json").ok().json();
    let shapes: Vec<_> = rows.iter().map(|row| (&row["stages"], &row["microbatches"])).collect();
    assert_eq!(shapes, vec![(&json!(2), &json!(4)); 3]);
    let rows = run("csv:i.csv --compare breadth-first --chunks 4 --json").ok().json();
    assert_eq!((&rows[0]["chunks"], &rows[1]["chunks"]), (&json!(2), &json!(4)));
    let rows = run("--compare 1f1b,csv:i.csv --json").ok().json();
    assert_eq!(rows.len(), 2);
    run("csv:i.csv --warmup pb")
        .refused(&["--warmup pb has no effect with csv:i.csv", "leave out"]);
    run("csv:i.csv --chunks 2").refused(&["--chunks 2 has no effect", "a table states"]);
    run("csv:i.csv --compare 1f1b --stages 4").refused(&["--stages 4, but csv:i.csv has 2"]);
    fs::write(dir.path().join("odd.csv"), b"device,part,microbatch\n0,F,0\n# caf\xe9\n").unwrap();
    run("csv:odd.csv").refused(&["the byte 0xe9", "(odd.csv:3)", "save the table as CSV in UTF-8"]);
}

#[test]
fn refusals_name_the_values_and_what_works() {
    for (args, words) in [
        ("interleaved --stages 4 --microbatches 6", ["6 micro-batches on 4 stages", "4 or 8"]),
        ("interleaved --stages 4 --microbatches 2", ["2 micro-batches", "nearest that work: 4"]),
        ("zb-v --stages 4 --microbatches 8 --chunks 1", ["zb-v cannot have 1 chunk\n", "2 chunks"]),
        ("gpipe --stages 4 --microbatches 8 --chunks 2", ["gpipe cannot have 2 chunks", "1 chunk"]),
        ("1f1b --stages 0 --microbatches 8", ["0 stages", "nearest that work"]),
        ("1f1b --microbatches 8", ["1f1b needs --stages", "such as 8"]),
        ("1F1B --stages 4 --microbatches 8", ["no schedule `1F1B`", "nearest that work: 1f1b"]),
        ("1f1b --stages 4 --microbatches 8 --tf -1", ["tf = -1", "nearest that work: tf = 0"]),
        ("1f1b --stages 4 --microbatches 8 --hop nan", ["hop = NaN", "0 or above"]),
        ("1f1b --stages 99999999999 --microbatches 8", ["99999999999", "262144 stages, or fewer"]),
        ("1f1b --stages 2 --microbatches 2 --compare gpipe --csv a.csv", ["--csv a.csv", "one"]),
        ("1f1b --stages 4 --microbatches 4 --tf 1e308 --svg x.svg", ["tf = 1e308", "larger unit"]),
        (
            "1f1b --stages 2 --microbatches 2 --svg no/a.svg",
            ["--svg no/a.svg", "folder no does not"],
        ),
        ("1f1b --stages 2 --microbatches 2 --csv no/a.csv", ["--csv no/a.csv", "create it first"]),
        (
            "1f1b --stages 2 --microbatches 2 --svg q.svg --csv ./q.svg",
            ["one file", "--csv ./q.csv"],
        ),
        ("1f1b --stages 2 --microbatches 2 --svg q.csv --csv q.csv", ["one file", "--svg q.svg"]),
        ("--compare gpipe,zb-h1 --stages 2 --microbatches 2 --warmup pb", ["no effect", "1f1b"]),
        ("--compare gpipe,zb-h1 --stages 2 --microbatches 2 --chunks 2", ["no effect", "--chunks"]),
        ("csv:", ["`csv:` has no file name", "csv:mine.csv"]),
        ("", ["NAME", "required"]),
    ] {
        schedule(args).refused(&words);
    }
}
