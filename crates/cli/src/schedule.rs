//! `phalanx schedule`: a pipeline schedule as numbers, picture and table.

use std::path::{Path, PathBuf};

use console::Term;
use phalanx::error::{Error, Problem, Result};
use phalanx::inspect::writable::can_write;
use phalanx::pipeline::picture::{self, Panel, TextOptions};
use phalanx::pipeline::{
    NamedSchedule, PipelineError, RoundConcat, Schedule, ScheduleShape, Times, TurnCosts, Warmup,
    csv, simulate,
};
use phalanx::session::custom::read_schedule;
use phalanx::train::progress::{OutputStream, Style};
use phalanx_sys::{Staged, disk::goal_of};
use serde::Serialize;

use crate::args::Schedule as Asked;
use crate::{out, plan};

/// The line width when the output is not a terminal.
const PAGE: usize = 240;

/// The width of a terminal that does not report its own.
const USUAL: usize = 80;

/// Builds the schedules, simulates them, and shows or writes what is asked for.
pub(crate) fn run(asked: &Asked) -> Result<()> {
    if let Some(planner) = asked.plan {
        return plan::run(asked, planner);
    }
    check_files(asked)?;
    let schedules = schedules(asked)?;
    check_drawable(asked, &schedules)?;
    check_table(asked, &schedules[0])?;
    let timelines = schedules
        .iter()
        .map(|schedule| simulate(schedule, &costs(asked, schedule)?))
        .collect::<Result<Vec<_>, PipelineError>>()?;
    let panels: Vec<Panel<'_>> = schedules
        .iter()
        .zip(&timelines)
        .map(|(schedule, timeline)| Panel::new(schedule, timeline))
        .collect();
    let table = asked.csv.as_ref().map(|file| (file, csv::write(&schedules[0])));
    let drawing = asked.svg.as_ref().map(|file| (file, picture::svg(&panels)));
    let staged = [table, drawing].into_iter().flatten();
    let staged = staged.map(|(file, text)| Staged::write(file, |to| to.write_all(text.as_bytes())));
    staged.collect::<Result<Vec<_>, _>>()?.into_iter().try_for_each(Staged::put_in_place)?;
    match asked.json {
        true => panels.iter().for_each(|panel| out::json(&Numbers::new(asked, panel))),
        false => out::line(picture::text(&panels, look()).trim_end()),
    }
    Ok(())
}

/// The times of turns. Holders that take turns are there because their stage takes so many times as long as others.
fn costs(asked: &Asked, schedule: &Schedule) -> Result<TurnCosts, PipelineError> {
    let Asked { tf: f, tb: b, tw: w, hop, .. } = *asked;
    if !takes_turns(schedule) {
        return TurnCosts::even(Times { f, b, w }, hop);
    }
    let stage = |holders: &usize| {
        let count = *holders as f64;
        Times { f: count * f, b: count * b, w: count * w }
    };
    TurnCosts::uneven(schedule.placement().holders().iter().map(stage).collect(), hop)
}

/// Whether holders of a stage take micro-batches in turn.
fn takes_turns(schedule: &Schedule) -> bool {
    let updates = schedule.updates();
    updates.is_some_and(|updates| updates.holders.iter().any(|count| *count > 1))
}

/// Refuses a table of a schedule for which a table has no columns.
fn check_table(asked: &Asked, schedule: &Schedule) -> Result<()> {
    match asked.csv.is_some() && !schedule.moves().is_empty() {
        false => Ok(()),
        true => Err(Error::refused(
            Problem::new(format!("a table cannot say what {} parks where", schedule.name()))
                .because("--csv writes turns alone, and a run of them would keep as much as 1f1b")
                .fix("name the schedule where it is to run, or draw it with --svg"),
        )),
    }
}

/// Refuses files that cannot be written, and two outputs to the same file.
fn check_files(asked: &Asked) -> Result<()> {
    let files = [("--svg", &asked.svg), ("--csv", &asked.csv)];
    for (key, file) in files {
        let Some(file) = file else { continue };
        can_write(file, format!("{key} {} cannot be written", file.display()))?;
    }
    let place = |file: &PathBuf| goal_of(file).ok();
    match (&asked.svg, &asked.csv) {
        (Some(svg), Some(csv)) if place(svg) == place(csv) => {
            let what =
                format!("--svg {} and --csv {} are the same file", svg.display(), csv.display());
            let problem = Problem::new(what).because("one file cannot hold both");
            let table = csv.with_extension("csv");
            let fix = match place(&table) == place(svg) {
                true => format!("--svg {}", svg.with_extension("svg").display()),
                false => format!("--csv {}", table.display()),
            };
            Err(Error::refused(problem.nearest(fix)))
        }
        _ => Ok(()),
    }
}

/// The most rows of a picture.
const MOST_ROWS: usize = 4096;

/// Refuses pictures that nobody could look at.
fn check_drawable(asked: &Asked, schedules: &[Schedule]) -> Result<()> {
    let rows: usize = schedules.iter().map(Schedule::stage_groups).sum();
    if rows <= MOST_ROWS || asked.json && asked.svg.is_none() {
        return Ok(());
    }
    let problem = Problem::new(format!("a picture of {rows} stage groups cannot be drawn"))
        .because(format!("each is a row, and {MOST_ROWS} rows are the most"));
    Err(Error::refused(problem.fix("--json prints the numbers; --csv FILE writes the table")))
}

/// The schedule asked for, then those it is compared with.
fn schedules(asked: &Asked) -> Result<Vec<Schedule>> {
    let others = asked.compare.iter().filter(|name| asked.name.as_ref() != Some(*name));
    let main = asked.name.iter().map(|name| Wanted::new(name, false));
    let wanted: Vec<Wanted> =
        main.chain(others.map(|name| Wanted::new(name, true))).collect::<Result<_>>()?;
    if let ([_, _, ..], Some(file)) = (&wanted[..], &asked.csv) {
        let file = file.display();
        let problem = Problem::new(format!("--csv {file} cannot hold {} schedules", wanted.len()));
        return Err(Error::refused(
            problem.because("a table holds one schedule").fix("leave out --compare"),
        ));
    }
    check_read(asked, &wanted)?;
    // A table has its own shape, and other schedules are compared with it in that shape.
    let table = wanted.iter().find_map(|wanted| match &wanted.order {
        Order::Own(schedule) => Some(schedule.as_ref()),
        Order::Named(_) => None,
    });
    wanted.iter().map(|wanted| wanted.build(asked, table)).collect()
}

/// A schedule by its name.
struct Wanted {
    name: String,
    order: Order,
    /// Whether it was named by `--compare`: then it uses only the settings that apply to it.
    compared: bool,
}

enum Order {
    Named(NamedSchedule),
    /// From a table.
    Own(Box<Schedule>),
}

impl Wanted {
    fn new(name: &str, compared: bool) -> Result<Self> {
        let order = match name.strip_prefix("csv:") {
            Some(file) => Order::Own(Box::new(from_file(file)?)),
            None => Order::Named(name.parse()?),
        };
        Ok(Wanted { name: name.to_owned(), order, compared })
    }

    fn build(&self, asked: &Asked, table: Option<&Schedule>) -> Result<Schedule> {
        let named = match &self.order {
            Order::Own(schedule) => {
                return fits(asked, schedule).map(|()| schedule.as_ref().clone());
            }
            Order::Named(named) => *named,
        };
        let needed = |value: Option<usize>, key: &str| {
            value.ok_or_else(|| {
                let problem = Problem::new(format!("{named} needs --{key}"));
                Error::refused(problem.fix(format!("add --{key} with a whole number, such as 8")))
            })
        };
        let dealt =
            !asked.holders.is_empty() && (!self.compared || named == NamedSchedule::PipeDream);
        let held =
            dealt.then(|| asked.holders.iter().fold(0, |sum: usize, k| sum.saturating_add(*k)));
        if let (Some(stages), true) = (asked.stages, dealt)
            && stages != asked.holders.len()
        {
            let found = asked.holders.len();
            let problem =
                Problem::new(format!("--holders has {found} numbers, but --stages is {stages}"));
            let fix = format!("leave out --stages, or write --stages {found}");
            return Err(Error::refused(problem.because("each stage has one").fix(fix)));
        }
        let stages = held.or(asked.stages).or(table.map(Schedule::stage_groups));
        let microbatches = asked.microbatches.or(table.map(Schedule::microbatches));
        let mut shape =
            ScheduleShape::new(needed(stages, "stages")?, needed(microbatches, "microbatches")?);
        if !self.compared || named.takes_chunks() {
            shape.chunks = asked.chunks;
        }
        if !self.compared || named == NamedSchedule::OneFOneB {
            shape = shape.warmup(asked.warmup);
        }
        if !self.compared || named == NamedSchedule::Chimera {
            shape = shape.pairs(asked.pairs).concat(asked.concat);
        }
        if !self.compared || named == NamedSchedule::ZbAuto {
            shape = shape.memory(asked.memory).until_w(asked.mw);
        }
        if !self.compared || named == NamedSchedule::PipeDream {
            shape = shape.vertical_sync(asked.vertical_sync);
        }
        if dealt {
            shape.holders.clone_from(&asked.holders);
        }
        // The first batches both read the first weights; the third reads newer ones.
        // A table is what one step runs.
        if named == NamedSchedule::PipeDream2bw && asked.csv.is_none() {
            shape = shape.steps(3);
        }
        let Asked { tf: f, tb: b, tw: w, hop, .. } = *asked;
        Ok(named.build_for(shape, &TurnCosts::even(Times { f, b, w }, hop)?)?)
    }
}

/// Refuses settings that none of the schedules uses.
fn check_read(asked: &Asked, wanted: &[Wanted]) -> Result<()> {
    // A schedule that was not named by `--compare` takes all settings, or refuses them itself.
    let by = |suits: &dyn Fn(NamedSchedule) -> bool| {
        wanted.iter().any(|wanted| match wanted.order {
            Order::Named(named) => !wanted.compared || suits(named),
            Order::Own(_) => false,
        })
    };
    let refuse = |key: &str, value: String, why: &str, instead: &str| {
        let names: Vec<&str> = wanted.iter().map(|wanted| wanted.name.as_str()).collect();
        let what = format!("--{key} {value} has no effect with {}", names.join(", "));
        let fix = format!("leave out --{key}, or {instead}");
        Err(Error::refused(Problem::new(what).because(why).fix(fix)))
    };
    match asked.chunks {
        Some(v) if !by(&|named| named.takes_chunks() || named.usual_chunks() == v) => refuse(
            "chunks",
            v.to_string(),
            "a table states which chunks each stage group holds, and most schedules have a fixed \
            number",
            "interleaved or breadth-first",
        ),
        _ if matches!(asked.warmup, Warmup::Pb)
            && !by(&|named| named == NamedSchedule::OneFOneB) =>
        {
            refuse(
                "warmup",
                "pb".to_owned(),
                "a table states how many micro-batches each stage starts with, and only 1f1b has \
                a choice",
                "1f1b",
            )
        }
        _ if (asked.pairs, asked.concat) != (1, RoundConcat::Direct)
            && !by(&|named| named == NamedSchedule::Chimera) =>
        {
            let (key, value) = match asked.pairs {
                1 => ("concat", format!("{:?}", asked.concat).to_lowercase()),
                pairs => ("pairs", pairs.to_string()),
            };
            let why = "a table states which replicas each stage group holds, and only chimera has several";
            refuse(key, value, why, "chimera")
        }
        _ if asked.vertical_sync && !by(&|named| named == NamedSchedule::PipeDream) => {
            let why = "only pipedream has a choice of versions of the weights";
            refuse("vertical-sync", String::new(), why, "pipedream")
        }
        _ if !asked.holders.is_empty() && !by(&|named| named == NamedSchedule::PipeDream) => {
            let counts: Vec<String> = asked.holders.iter().map(usize::to_string).collect();
            let why = "only pipedream deals micro-batches to the holders of a stage";
            refuse("holders", counts.join("-"), why, "pipedream")
        }
        _ if (asked.memory, asked.mw) != (1.0, 1.0)
            && !by(&|named| named == NamedSchedule::ZbAuto) =>
        {
            let (key, value) = match asked.memory {
                1.0 => ("mw", asked.mw),
                memory => ("memory", memory),
            };
            let why = "only zb-auto is searched for a memory; the others have their own";
            refuse(key, value.to_string(), why, "zb-auto")
        }
        _ => Ok(()),
    }
}

/// The schedule in a table.
fn from_file(file: &str) -> Result<Schedule> {
    if file.is_empty() {
        let problem = Problem::new("`csv:` has no file name");
        return Err(Error::refused(
            problem.fix("write a file after the colon, such as csv:mine.csv"),
        ));
    }
    read_schedule(Path::new(file))
}

/// Refuses numbers of stage groups and micro-batches that differ from the table's.
fn fits(asked: &Asked, schedule: &Schedule) -> Result<()> {
    for (given, found, key) in [
        (asked.stages, schedule.stage_groups(), "stages"),
        (asked.microbatches, schedule.microbatches(), "microbatches"),
    ] {
        if let Some(given) = given.filter(|given| *given != found) {
            let name = schedule.name();
            let what = format!("--{key} {given}, but {name} has {found}");
            let fix = format!("leave out --{key}, or write --{key} {found}");
            return Err(Error::refused(Problem::new(what).fix(fix)));
        }
    }
    Ok(())
}

/// The numbers of a schedule, in the order in which they are printed.
#[derive(Serialize)]
struct Numbers<'a> {
    schedule: &'a str,
    stages: usize,
    microbatches: usize,
    chunks: usize,
    tf: f64,
    tb: f64,
    tw: f64,
    hop: f64,
    makespan: f64,
    span: f64,
    bubble_ideal: f64,
    bubble_total: f64,
    work: f64,
    peak_in_flight: &'a [usize],
    peak_until_w: &'a [usize],
    weight_versions: &'a [usize],
}

impl<'a> Numbers<'a> {
    fn new(asked: &Asked, Panel { schedule, timeline, .. }: &Panel<'a>) -> Self {
        Numbers {
            schedule: schedule.name(),
            stages: schedule.stage_groups(),
            microbatches: schedule.microbatches() / schedule.pieces(),
            chunks: schedule.placement().share(0, 0),
            tf: asked.tf,
            tb: asked.tb,
            tw: asked.tw,
            hop: asked.hop,
            makespan: timeline.makespan,
            span: timeline.span,
            bubble_ideal: timeline.bubble_ideal,
            bubble_total: timeline.bubble_total,
            work: schedule.work(),
            peak_in_flight: &timeline.peak_in_flight,
            peak_until_w: &timeline.peak_until_w,
            weight_versions: &timeline.weight_versions,
        }
    }
}

/// On a terminal the picture has the terminal's width, folded if needed; elsewhere lines are long.
fn look() -> TextOptions {
    let term = Term::stdout();
    let told = term.size_checked().map(|(_, columns)| usize::from(columns));
    let columns = term.is_term().then(|| columns(told, std::env::var("COLUMNS").ok().as_deref()));
    TextOptions {
        width: columns.unwrap_or(PAGE),
        colour: Style::of(OutputStream::Stdout).colour,
        fold: columns.is_some(),
    }
}

/// The width of a terminal: what it reports, else the environment variable, else a usual width.
fn columns(told: Option<usize>, variable: Option<&str>) -> usize {
    let said = || variable.and_then(|text| text.trim().parse().ok());
    told.filter(|columns| *columns > 0)
        .or_else(|| said().filter(|columns| *columns > 0))
        .unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_tells_its_width_or_the_variable_does() {
        assert_eq!(columns(Some(132), Some("60")), 132);
        assert_eq!([columns(Some(0), Some("60")), columns(None, Some(" 60 "))], [60, 60]);
        assert_eq!([columns(None, Some("0")), columns(Some(0), Some("x"))], [80, 80]);
        assert_eq!(columns(None, None), 80);
    }
}
