//! A schedule as a table, for spreadsheets, other programs, and users' own schedules.
//!
//! ```text
//! device,part,microbatch,chunk,stage,replica,version
//! 0,F,0,0,0,0,0
//! 0,BW,0,0,0,0,0
//! ```
//!
//! `stage_group` is the number of the stage group. Rows of one stage group are in the order in which it
//! runs them; rows of different groups may be mixed. The first line names the columns, in any
//! order. `stage_group`, `part` and `microbatch` are required; `chunk`, `replica` and `version` are 0 if
//! they are missing, and `stage` is then `chunk · stage_groups + stage_group`. `pair` is 1 where a turn and the next one of its stage
//! group are a pair, else 0; the column is written if there are pairs. `empty` is 1 where a turn computes on zeros, under a
//! number of its own from the last micro-batch's on, else 0; it is written if there are such turns. `round`, the same in all rows of a
//! stage, is how many micro-batches one update of the stage takes; without it weights are updated once, at the end. With it a version
//! counts the updates of the stage from the start of the step, and is negative for those before it. Blank lines and lines that
//! start with `#` are ignored. The table is checked when it is read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use phalanx_script::Part;

use crate::check::Numbers;
use crate::error::{PipelineError, Result};
use crate::flow::At;
use crate::placement::{HeldStage, Placement};
use crate::rounds::{self, VersionRead};
use crate::schedule::Schedule;
use crate::turn::Turn;
use crate::words::counted;
use crate::written::Written;

const COLUMNS: [&str; 10] = [
    "device",
    "part",
    "microbatch",
    "chunk",
    "stage",
    "replica",
    "version",
    "round",
    "pair",
    "empty",
];
const NEEDED: [&str; 3] = ["device", "part", "microbatch"];
const PARTS: [Part; 5] = [Part::F, Part::B, Part::W, Part::BW, Part::FBW];

/// The table of a schedule.
pub fn write(schedule: &Schedule) -> String {
    let (pairs, updates) = (schedule.has_pairs(), schedule.updates());
    let written = |name: &&&str| match **name {
        "pair" => pairs,
        "round" => updates.is_some(),
        "empty" => schedule.has_empty(),
        _ => true,
    };
    let mut table = COLUMNS.iter().filter(written).copied().collect::<Vec<_>>().join(",") + "\n";
    for (at, turn) in schedule.all() {
        let Turn { part, microbatch, chunk, version } = turn;
        let held = schedule.placement().held(at.stage_group, chunk);
        let HeldStage { stage, replica } = held.unwrap_or(HeldStage { stage: 0, replica: 0 });
        let stage_group = at.stage_group;
        // Writing to a string cannot fail.
        let _ = write!(table, "{stage_group},{part},{microbatch},{chunk},{stage},{replica}");
        let _ = match updates {
            Some(own) => {
                let [version, taken] = [own.version(stage, microbatch), own.taken_by(stage) as i64];
                write!(table, ",{version},{taken}")
            }
            None => write!(table, ",{version}"),
        };
        let flags =
            [(pairs, schedule.is_first(at)), (schedule.has_empty(), schedule.is_empty(&turn))];
        for (_, flag) in flags.into_iter().filter(|(written, _)| *written) {
            let _ = write!(table, ",{}", u8::from(flag));
        }
        table.push('\n');
    }
    table
}

/// The text of a table that was read from a file.
pub fn decode(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).or_else(|error| {
        let good = &bytes[..error.valid_up_to()];
        let line = 1 + good.iter().filter(|byte| **byte == b'\n').count();
        let found = bytes.get(good.len()).copied().unwrap_or_default();
        refuse(
            line,
            format!("the byte {found:#04x} is not UTF-8 text"),
            "usual fix: save the table as CSV in UTF-8; plain letters and digits are enough"
                .to_owned(),
        )
    })
}

/// The schedule that a table describes, with this name.
pub fn read(name: &str, text: &str) -> Result<Schedule> {
    let rows = rows(text)?;
    let stage_groups = rows.iter().map(|row| row.stage_group + 1).max().unwrap_or(0);
    let numbers = numbers(&rows)?;
    let (mut turns, mut lines) = (vec![Vec::new(); stage_groups], vec![Vec::new(); stage_groups]);
    let mut held: BTreeMap<(usize, usize), (HeldStage, usize)> = BTreeMap::new();
    let (mut pairs, mut reads) = (BTreeSet::new(), Vec::new());
    for row in &rows {
        let Row { line, stage_group, stage, replica, turn, version, pair, round, .. } = *row;
        let stage = stage.unwrap_or(turn.chunk * stage_groups + stage_group);
        let found = HeldStage { stage, replica };
        let (first, earlier) = *held.entry((stage_group, turn.chunk)).or_insert((found, line));
        if first != found {
            let what =
                format!("chunk {} of stage group {stage_group} is {}", turn.chunk, words(found));
            let first = words(first);
            let help = format!(
                "line {earlier} says that it is {first}\n  \
                 nearest that work: {first} in both, or another chunk"
            );
            return Err(PipelineError::Csv { line, what, help });
        }
        let at = At { stage_group, index: turns[stage_group].len() };
        reads.push(VersionRead { line, at, version, round: round.unwrap_or(0) });
        if pair {
            pairs.insert(at);
        }
        turns[stage_group].push(turn);
        lines[stage_group].push(line);
    }
    let mut chunks = vec![Vec::new(); stage_groups];
    for ((stage_group, chunk), (found, line)) in held {
        let before = chunks[stage_group].len();
        if chunk != before {
            let what = format!(
                "there is chunk {chunk} of stage group {stage_group}, but no chunk {before}"
            );
            let help = format!(
                "chunks of a stage group are counted from 0\n  \
                 nearest that work: chunk {before} instead of {chunk}"
            );
            return Err(PipelineError::Csv { line, what, help });
        }
        chunks[stage_group].push(found);
    }
    let written = Written::Table(&lines);
    let schedule = Schedule::numbered(name, numbers, Placement::new(chunks)?, turns, written)?;
    let schedule = match has_rounds(&rows) {
        false => schedule,
        true => {
            let updates = rounds::updates(&schedule, &reads)?;
            schedule.updating(updates).running(written)?
        }
    };
    if pairs.is_empty() { Ok(schedule) } else { schedule.in_pairs(pairs) }
}

/// How many micro-batches there are, and how many numbers of empty ones after them.
fn numbers(rows: &[Row]) -> Result<Numbers> {
    let numbers = |empty: bool| {
        rows.iter().filter(move |row| row.empty == empty).map(|row| row.turn.microbatch)
    };
    let end = |empty: bool| numbers(empty).max().map_or(0, |most| most + 1);
    let real = end(false);
    let mixed = rows.iter().find(|row| row.empty && row.turn.microbatch < real);
    match mixed {
        None => Ok(Numbers { real, empty: end(true).saturating_sub(real) }),
        Some(row) => refuse(
            row.line,
            format!("micro-batch {} is empty here, but not elsewhere", row.turn.microbatch),
            format!(
                "empty ones are counted after all others\n  nearest that work: {real} or above, or \
                 empty 0"
            ),
        ),
    }
}

/// Whether the table says how many micro-batches an update takes.
fn has_rounds(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.round.is_some())
}

#[derive(Clone, Copy)]
struct Row {
    line: usize,
    stage_group: usize,
    stage: Option<usize>,
    replica: usize,
    turn: Turn,
    /// The version that it reads: below 0 for versions from before the step.
    version: i64,
    round: Option<usize>,
    /// Whether it and the next turn of its stage group are a pair.
    pair: bool,
    /// Whether it computes on zeros.
    empty: bool,
}

fn rows(text: &str) -> Result<Vec<Row>> {
    let mut lines = text
        .trim_start_matches('\u{feff}')
        .lines()
        .zip(1..)
        .filter(|(text, _)| !text.trim().is_empty() && !text.starts_with('#'));
    let Some((head, line)) = lines.next() else {
        return refuse(
            1,
            "the table is empty".to_owned(),
            format!("the first line is {}", COLUMNS.join(",")),
        );
    };
    let head = columns(head, line)?;
    let lines: Vec<(&str, usize)> = lines.collect();
    // Every number in a schedule is below the number of its turns, so nothing larger than the table
    // is allocated.
    lines.iter().map(|(text, line)| row(text, *line, &head, lines.len())).collect()
}

/// The names in the first line.
fn columns(text: &str, line: usize) -> Result<Vec<&str>> {
    let found: Vec<&str> = text.split(',').map(str::trim).collect();
    let help = || format!("columns are {}", COLUMNS.join(","));
    for (index, name) in found.iter().enumerate() {
        if !COLUMNS.contains(name) {
            return refuse(line, format!("unknown column `{name}`"), help());
        }
        if found[..index].contains(name) {
            return refuse(line, format!("column `{name}` is there twice"), help());
        }
    }
    match NEEDED.iter().find(|name| !found.contains(name)) {
        Some(missing) => refuse(line, format!("column `{missing}` is missing"), help()),
        None => Ok(found),
    }
}

fn row(text: &str, line: usize, head: &[&str], most: usize) -> Result<Row> {
    let cells: Vec<&str> = text.split(',').map(str::trim).collect();
    if cells.len() != head.len() {
        let what = format!("there are {} values for {} columns", cells.len(), head.len());
        return refuse(line, what, format!("columns are {}", head.join(",")));
    }
    let cell = |name: &str| head.iter().position(|h| *h == name).map(|column| cells[column]);
    let number = |name: &str| -> Result<Option<usize>> {
        let Some(text) = cell(name) else { return Ok(None) };
        match text.parse::<usize>() {
            Ok(number) if number < most => Ok(Some(number)),
            Ok(number) => {
                let help = format!(
                    "the table has {}, and all numbers must be below that\n  \
                     nearest that work: {name} {}",
                    counted(most, "turn"),
                    most.saturating_sub(1)
                );
                refuse(line, format!("{name} {number} is too large"), help)
            }
            Err(_) => {
                let help = "write whole numbers, counted from 0".to_owned();
                refuse(line, format!("{name} `{text}` is not a whole number"), help)
            }
        }
    };
    let letters = cell("part").unwrap_or_default();
    let Some(part) = PARTS.into_iter().find(|part| part.to_string() == letters) else {
        let help = "parts are F, B, W, BW for both, or FBW for all at once".to_owned();
        return refuse(line, format!("unknown part `{letters}`"), help);
    };
    let earlier = cell("version").filter(|_| head.contains(&"round"));
    let earlier = earlier.and_then(|text| text.strip_prefix('-')?.parse::<u32>().ok());
    let version = match earlier {
        // Each stage has a turn, and none is more updates late than there are stages.
        Some(before) if before as usize > most => {
            let help =
                format!("the table has {}\n  nearest that work: -{most}", counted(most, "turn"));
            return refuse(line, format!("version -{before} is too old"), help);
        }
        Some(before) => -i64::from(before),
        None => number("version")?.unwrap_or(0) as i64,
    };
    // Below 0 all versions are equal at the start of a run.
    let shown = usize::try_from(version).unwrap_or(0);
    let turn = Turn {
        part,
        microbatch: number("microbatch")?.unwrap_or(0),
        chunk: number("chunk")?.unwrap_or(0),
        version: shown,
    };
    let round = number("round")?;
    let (stage_group, stage) = (number("device")?.unwrap_or(0), number("stage")?);
    let replica = number("replica")?.unwrap_or(0);
    let [pair, empty] = [number("pair")?, number("empty")?].map(|flag| flag.unwrap_or(0) > 0);
    Ok(Row { line, stage_group, stage, replica, turn, version, round, pair, empty })
}

fn words(held: HeldStage) -> String {
    match held {
        HeldStage { stage, replica: 0 } => format!("stage {stage}"),
        HeldStage { stage, replica } => format!("stage {stage} of replica {replica}"),
    }
}

fn refuse<T>(line: usize, what: String, help: String) -> Result<T> {
    Err(PipelineError::Csv { line, what, help })
}
