//! Schedules written as tables and read back, and tables that are none.

use phalanx_pipeline::{NamedSchedule, Schedule, ScheduleShape, csv};

use crate::support::{all, build};

#[test]
fn what_is_written_is_read_back() {
    for (p, m) in [(1, 1), (2, 4), (4, 8), (3, 6)] {
        for (named, schedule) in all(p, m) {
            let again = csv::read(schedule.name(), &csv::write(&schedule)).unwrap();
            // A table does not say who keeps what for whom.
            let turns = again.all().eq(schedule.all());
            assert!(turns && again.placement() == schedule.placement(), "{named} {p} {m}");
            assert!(again == schedule || !schedule.moves().is_empty(), "{named} {p} {m}");
        }
    }
}

/// Turns on zeros are flagged, and have numbers above all others.
#[test]
fn a_table_says_which_turns_are_empty() {
    let table = csv::write(&build(NamedSchedule::Vectorised, 2, 3));
    assert!(table.starts_with("device,part,microbatch,chunk,stage,replica,version,empty\n"));
    assert!(
        table.contains("\n0,F,3,0,0,0,0,1\n") && table.contains("\n0,F,2,0,0,0,0,0\n"),
        "{table}"
    );
    for (from, to, words) in [
        ("1,F,4,0,1,0,0,1", "1,F,1,0,1,0,0,1", ["micro-batch 1 is empty here", "3 or above"]),
        ("1,BW,4,0,1,0,0,1\n", "", ["stage 1", "B of micro-batch 4"]),
    ] {
        assert!(table.contains(from), "{table}");
        let said = csv::read("own", &table.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
}

#[test]
fn a_table_of_ones_own() {
    let text = "# one micro-batch\r\nmicrobatch, part, device\r\n0,F,0\r\n0,F,1\r\n\r\n0,BW,1\r\n0,BW,0\r\n";
    let schedule = csv::read("mine", text).unwrap();
    assert_eq!(schedule.to_string(), "0: F0 BW0\n1: F0 BW0\n");
    assert_eq!((schedule.name(), schedule.placement().stages()), ("mine", 2));
    // Without a column for stages, chunks go round and round.
    let looped = build(NamedSchedule::Interleaved, 2, 2);
    let short: String = csv::write(&looped)
        .lines()
        .map(|line| line.split(',').take(4).collect::<Vec<_>>().join(",") + "\n")
        .collect();
    assert_eq!(csv::read("interleaved", &short).unwrap(), looped);
}

/// The table of PipeDream with a first stage that reads weights without a delay.
fn on_time(table: &str) -> String {
    let line = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        match cells[0] {
            "0" => format!("{},{},{}\n", cells[..6].join(","), cells[2], cells[7]),
            _ => format!("{line}\n"),
        }
    };
    table.lines().map(line).collect()
}

/// What cannot be meant by rounds and versions is refused with its line and what would work.
#[test]
fn rounds_that_are_refused() {
    let whole = csv::write(&build(NamedSchedule::PipeDream2bw, 2, 2));
    assert!(
        whole.starts_with("device,part,microbatch,chunk,stage,replica,version,round\n"),
        "{whole}"
    );
    let spoil = |from: &str, to: &str| {
        assert!(whole.contains(from), "{whole}");
        csv::read("own", &whole.replacen(from, to, 1)).unwrap_err().to_string()
    };
    let read = |table: &str| csv::read("own", table).unwrap_err().to_string();
    let stash = csv::write(&build(NamedSchedule::PipeDream, 2, 4));
    for (found, words) in [
        (spoil("0,F,0,0,0,0,-1,2", "0,F,0,0,0,0,-1,1"), ["round 2 differs", "round 1"]),
        (read(&whole.replace(",2\n", ",3\n")), ["round 3 does not divide", "round 2"]),
        (
            spoil("0,F,1,0,0,0,-1,2", "0,F,1,0,0,0,-2,2"),
            ["2 updates late", "nearest that work: version -1"],
        ),
        (read(&whole.replace(",-1,2\n", ",1,2\n")), ["belongs to update 1", "version 0"]),
        // On the first of two stages, version 1 exists after the first backward, and micro-batch 1 comes before it.
        (
            read(&on_time(&stash)),
            ["reads version 1 before it exists", "usual fix: move line 3 after line 4"],
        ),
    ] {
        assert!(words.iter().all(|words| found.contains(words)), "{found}: {words:?}");
    }
}

/// A table says how many micro-batches an update of each stage takes: as many more as it has holders.
#[test]
fn holders_and_directions_have_rounds() {
    let held = |holders: &[usize], m| {
        let shape = ScheduleShape::held_by(holders, m);
        let synced = NamedSchedule::PipeDream.build(shape.clone().vertical_sync(true)).unwrap();
        // Where all stages have as many holders, they change versions together anyway.
        let again = csv::read("pipedream", &csv::write(&synced)).unwrap();
        assert!(again.all().eq(synced.all()), "{holders:?}");
        let kept = |own: &Schedule| {
            let older = |stage| own.updates().unwrap().older(stage);
            (0..holders.len()).map(older).collect::<Vec<_>>()
        };
        assert_eq!(kept(&again), kept(&synced), "{holders:?}");
        let own = NamedSchedule::PipeDream.build(shape).unwrap();
        let table = csv::write(&own);
        assert_eq!(csv::read("pipedream", &table).unwrap(), own, "{holders:?}");
        table
    };
    let table = held(&[2, 1, 1], 4);
    for line in ["0,F,0,0,0,0,-2,2", "1,F,1,0,0,1,-2,2", "2,F,0,0,1,0,-1,1", "3,F,3,0,2,0,3,1"] {
        assert!(table.lines().any(|own| own == line), "{line}\n{table}");
    }
    held(&[4, 2, 1], 8);
    held(&[2, 2], 4);
    let read = |table: &str| csv::read("own", table).unwrap_err().to_string();
    let other: String = table.replace("1,F,1,0,0,1,-2,2", "1,F,1,0,0,1,-2,1");
    let swapped = table.replace("0,F,0,", "0,F,9,").replace("0,BW,0,", "0,BW,9,");
    let swapped = swapped.replace("1,F,1,", "1,F,0,").replace("1,BW,1,", "1,BW,0,");
    let swapped = swapped.replace("0,F,9,", "0,F,1,").replace("0,BW,9,", "0,BW,1,");
    let swapped = read(&swapped);
    assert!(swapped.contains("micro-batch 1 of stage 0 is taken by holder 0"), "{swapped}");
    assert!(swapped.contains("nearest that work: holder 1"), "{swapped}");
    let other = read(&other);
    assert!(other.contains("round 1 differs") && other.contains("round 2"), "{other}");
    let odd = read(&table.replace(",-2,2\n", ",-2,3\n"));
    assert!(odd.contains("round 3 is not a multiple of 2 holders"), "{odd}");
    // Each holder would wait for the first backward of the other, which comes after its own next forward.
    let newer = |line: &str| match line.split(',').collect::<Vec<_>>()[..] {
        [group @ ("0" | "1"), part, microbatch, ..] => {
            let holder = group;
            let update = microbatch.parse::<usize>().unwrap() / 2;
            format!("{group},{part},{microbatch},0,0,{holder},{update},2\n")
        }
        _ => format!("{line}\n"),
    };
    let newer: String = table.lines().map(newer).collect();
    let early = read(&newer);
    assert!(early.contains("reads version 1 before it exists"), "{early}");
}

/// Of two holders each has its own backwards in time, but not the other's.
#[test]
fn holders_that_wait_for_each_other_are_refused() {
    let head = "device,part,microbatch,chunk,stage,replica,version,round\n";
    let own = |rows: &[&str]| {
        let row = |row: &&str| {
            let cells: Vec<&str> = row.split(' ').collect();
            let replica = if cells[3] == "0" { cells[0] } else { "0" };
            let round = if cells[3] == "0" { 2 } else { 1 };
            format!(
                "{},{},{},0,{},{replica},{},{round}\n",
                cells[0], cells[1], cells[2], cells[3], cells[4]
            )
        };
        format!("{head}{}", rows.iter().map(row).collect::<String>())
    };
    let rows = [
        &["0 F 0 0 0", "0 BW 0 0 0", "0 F 2 0 1", "0 BW 2 0 1"][..],
        &["1 F 1 0 0", "1 BW 1 0 0", "1 F 3 0 1", "1 BW 3 0 1"],
        &["2 F 0 1 0", "2 BW 0 1 0", "2 F 1 1 1", "2 BW 1 1 1"],
        &["2 F 2 1 2", "2 BW 2 1 2", "2 F 3 1 3", "2 BW 3 1 3"],
    ];
    assert!(csv::read("own", &own(&rows.concat())).is_ok());
    // The last stage begins with micro-batch 2 before 1, and the first holder's second forward waits for the backward of 1.
    let rows = [
        &["0 F 0 0 0", "0 BW 0 0 0", "0 F 2 0 1", "0 BW 2 0 1"][..],
        &["1 F 1 0 0", "1 BW 1 0 0", "1 F 3 0 1", "1 BW 3 0 1"],
        &["2 F 0 1 -1", "2 BW 0 1 -1", "2 F 2 1 1", "2 F 1 1 0"],
        &["2 BW 1 1 0", "2 BW 2 1 1", "2 F 3 1 2", "2 BW 3 1 2"],
    ];
    let stuck = csv::read("own", &own(&rows.concat())).unwrap_err().to_string();
    assert!(stuck.contains("waits for version 1 of its weights"), "{stuck}");
    // The gradient of micro-batch 1 would make version 2 before version 1 exists.
    let turned = csv::write(&build(NamedSchedule::PipeDream, 1, 2));
    let mut lines: Vec<&str> = turned.lines().collect();
    lines[1..].rotate_left(2);
    let turned = csv::read("own", &lines.join("\n")).unwrap_err().to_string();
    assert!(turned.contains("update 2 before update 1"), "{turned}");
}

#[test]
fn tables_that_are_refused() {
    let head = "device,part,microbatch,chunk,stage\n";
    let one = |rows: &str| format!("{head}{rows}");
    for (text, words) in [
        (String::new(), ["line 1: the table is empty", "device,part,microbatch"]),
        (
            "device,part\n0,F".into(),
            ["line 1: column `microbatch` is missing", "columns are device"],
        ),
        (
            "device,part,microbatch,color\n".into(),
            ["line 1: unknown column `color`", "columns are"],
        ),
        ("device,part,part,microbatch\n".into(), ["column `part` is there twice", "columns are"]),
        (head.to_owned(), ["no stage group holds a stage", "each replica"]),
        (one("0,F,0,0,0\n0,X,0,0,0\n"), ["line 3: unknown part `X`", "F, B, W, BW"]),
        (one("0,F,0,0\n"), ["line 2: there are 4 values for 5 columns", "columns are device,part"]),
        (one("0,F,-1,0,0\n"), ["line 2: microbatch `-1`", "whole numbers"]),
        (one("0,F,7,0,0\n0,BW,7,0,0\n"), ["line 2: microbatch 7", "has 2 turns"]),
        (
            one("0,F,0,0,0\n0,BW,0,0,1\n"),
            ["line 3: chunk 0 of stage group 0 is stage 1", "line 2 says"],
        ),
        (one("0,F,0,1,0\n0,BW,0,1,0\n"), ["chunk 1 of stage group 0, but no chunk 0", "from 0"]),
        (
            one("0,F,0,0,0\n1,F,0,0,0\n"),
            ["held 2 times: stage group 0 chunk 0, stage group 1", "keep it"],
        ),
        (
            one("0,F,0,0,0\n0,F,1,0,0\n0,BW,0,0,0\n"),
            ["line 3: stage 0 (stage group 0, chunk 0) never runs B of micro-batch 1", "add BW1"],
        ),
        (
            one("0,F,0,0,0\n0,B,0,0,0\n"),
            ["line 3: stage 0", "write BW instead of B at line 3 (B0 of stage group 0)"],
        ),
        (
            one("# hm\n0,BW,0,0,0\n0,F,0,0,0\n"),
            [
                "line 3: stage group 0, turn 0 (BW0): B of micro-batch 0 comes",
                "after line 4 (F0 of",
            ],
        ),
        (one("0,BW,0,0,0\n"), ["line 2: stage group 0", "add F0 to stage group 0 before it"]),
        (
            one("0,F,0,0,0\n0,W,0,0,0\n"),
            ["line 3: ", "add B0 to stage group 0 before it, or write BW"],
        ),
        (
            one("0,F,0,0,0\n0,B,0,0,0\n0,BW,0,0,0\n"),
            [
                "line 4: stage group 0, turn 2 (BW0): B of micro-batch 0 is done twice",
                "write W instead",
            ],
        ),
        (
            one("0,F,0,0,0\n0,F,0,0,0\n0,BW,0,0,0\n"),
            ["line 3: ", "leave out one of the two, this or line 2 (F0 of stage group 0)"],
        ),
        (
            one("0,F,0,0,0\n2,F,0,0,1\n0,BW,0,0,0\n"),
            ["stage group 1 of 3 holds no", "without a gap"],
        ),
    ] {
        let said = csv::read("mine", &text).unwrap_err().to_string();
        for word in words {
            assert!(said.contains(word), "`{word}` is not in: {said}");
        }
    }
}

/// What a refusal of a deadlock says, done to the table, makes a table that is read.
#[test]
fn a_table_that_is_stuck_says_which_line_to_move() {
    let stuck =
        "device,part,microbatch\n0,F,0\n0,BW,0\n0,F,1\n0,BW,1\n1,F,0\n1,F,1\n1,BW,0\n1,BW,1\n";
    let said = csv::read("mine", stuck).unwrap_err().to_string();
    assert!(said.starts_with("line 4: the schedule would deadlock\n"), "{said}");
    let fix = "usual fix: move line 4 (F1 of stage group 0) before line 3 (BW0 of stage group 0)";
    assert!(said.ends_with(fix), "{said}");
    let mut lines: Vec<&str> = stuck.lines().collect();
    lines.swap(2, 3);
    assert!(csv::read("mine", &lines.join("\n")).is_ok());
}

/// Of every schedule, each pair of neighbours on a device changes places: whatever is refused for that is
/// told with a line, and with something to do about it.
#[test]
fn rows_that_changed_places() {
    let (mut fine, mut moved, mut stuck) = (0, 0, 0);
    for (_, schedule) in all(3, 6) {
        let table = csv::write(&schedule);
        let lines: Vec<&str> = table.lines().collect();
        for k in 1..lines.len() - 1 {
            let mut lines = lines.clone();
            lines.swap(k, k + 1);
            let Err(error) = csv::read("mine", &lines.join("\n")) else {
                fine += 1;
                continue;
            };
            let said = error.to_string();
            let (first, fix) = (said.lines().next().unwrap(), said.lines().last().unwrap());
            assert!(first.starts_with("line "), "{said}");
            assert!(fix.trim().starts_with("usual fix: move "), "{said}");
            *if said.contains("deadlock") { &mut stuck } else { &mut moved } += 1;
        }
    }
    assert!(fine > 10 && moved > 5 && stuck > 10, "{fine} {moved} {stuck}");
}

#[test]
fn bytes_that_are_no_text() {
    assert_eq!(csv::decode("device,part # é".as_bytes()), Ok("device,part # é"));
    let said = csv::decode(b"device,part\n# caf\xe9\n").unwrap_err().to_string();
    assert!(said.starts_with("line 2: the byte 0xe9") && said.contains("in UTF-8"), "{said}");
}

/// A short table cannot ask for more memory than it has rows.
#[test]
fn a_short_table_with_large_numbers() {
    let mut text = "device,part,microbatch\n".to_owned();
    let rows = 20_000;
    for stage_group in 0..rows / 2 {
        text += &format!("{stage_group},F,0\n{stage_group},F,{}\n", rows - 1);
    }
    let said = csv::read("mine", &text).unwrap_err().to_string();
    assert!(
        said.contains("stage 0 (stage group 0, chunk 0) never runs F of micro-batch 1"),
        "{said}"
    );
}
