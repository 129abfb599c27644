//! `phalanx schedule`: a pipeline schedule as numbers, picture and table.

use std::path::Path;

use console::Term;
use phalanx::pipeline::picture::{self, Look, Panel};
use phalanx::pipeline::{
    Costs, Named, PipelineError, Schedule, Shape, Times, Warmup, csv, simulate,
};
use phalanx::train::error::{Error, Problem, Result};
use phalanx::train::pipeline::read_schedule;
use phalanx::train::progress::{Stream, Style};
use phalanx_sys::write_atomic;
use serde::Serialize;

use crate::args::Schedule as Asked;
use crate::out;

/// The width of lines that go elsewhere than to a terminal.
const PAGE: usize = 240;

/// Makes the schedules, plays them through, and shows or writes what is asked for.
pub(crate) fn run(asked: &Asked) -> Result<()> {
    let schedules = schedules(asked)?;
    let costs = Costs::even(Times { f: asked.tf, b: asked.tb, w: asked.tw }, asked.hop)?;
    let timelines =
        schedules.iter().map(|s| simulate(s, &costs)).collect::<Result<Vec<_>, PipelineError>>()?;
    let panels: Vec<Panel<'_>> = schedules
        .iter()
        .zip(&timelines)
        .map(|(schedule, timeline)| Panel::new(schedule, timeline))
        .collect();
    if let Some(file) = &asked.csv {
        write(file, &csv::write(&schedules[0]))?;
    }
    if let Some(file) = &asked.svg {
        write(file, &picture::svg(&panels))?;
    }
    match asked.json {
        true => panels.iter().for_each(|panel| out::json(&Numbers::new(asked, panel))),
        false => out::line(picture::text(&panels, look()).trim_end()),
    }
    Ok(())
}

/// The schedule asked for, then those it is compared with.
fn schedules(asked: &Asked) -> Result<Vec<Schedule>> {
    let main = asked.name.iter().map(|name| one(asked, name, false));
    let others = asked.compare.iter().filter(|name| asked.name.as_ref() != Some(*name));
    let all: Vec<Schedule> =
        main.chain(others.map(|name| one(asked, name, true))).collect::<Result<_>>()?;
    if let ([_, _, ..], Some(file)) = (&all[..], &asked.csv) {
        let file = file.display();
        let problem = Problem::new(format!("--csv {file} with {} schedules", all.len()));
        return Err(Error::refused(
            problem.because("a table holds one schedule").fix("leave out --compare"),
        ));
    }
    Ok(all)
}

/// A schedule by its name. One that others are compared with takes what suits it of the settings.
fn one(asked: &Asked, name: &str, compared: bool) -> Result<Schedule> {
    if let Some(file) = name.strip_prefix("csv:") {
        return from_file(asked, Path::new(file));
    }
    let named: Named = name.parse()?;
    let needed = |value: Option<usize>, key: &str| {
        value.ok_or_else(|| {
            let problem = Problem::new(format!("{name} needs --{key}"));
            Error::refused(problem.fix(format!("add --{key} with a whole number, such as 8")))
        })
    };
    let mut shape =
        Shape::new(needed(asked.stages, "stages")?, needed(asked.microbatches, "microbatches")?);
    if !compared || matches!(named, Named::Interleaved | Named::BreadthFirst) {
        shape.chunks = asked.chunks;
    }
    if !compared || named == Named::OneFOneB {
        shape = shape.warmup(Warmup::from(asked.warmup));
    }
    Ok(named.build(shape)?)
}

/// A schedule from a table, which says itself how many devices, micro-batches and chunks it has.
fn from_file(asked: &Asked, file: &Path) -> Result<Schedule> {
    let schedule = read_schedule(file)?;
    for (given, found, key) in [
        (asked.stages, schedule.devices(), "stages"),
        (asked.microbatches, schedule.microbatches(), "microbatches"),
        (asked.chunks, schedule.chunks(), "chunks"),
    ] {
        if let Some(given) = given.filter(|given| *given != found) {
            let name = schedule.name();
            let what = format!("--{key} {given}, but {name} has {found}");
            let fix = format!("leave out --{key}, or write --{key} {found}");
            return Err(Error::refused(Problem::new(what).fix(fix)));
        }
    }
    Ok(schedule)
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
    peak_in_flight: &'a [usize],
    peak_until_w: &'a [usize],
    weight_versions: &'a [usize],
}

impl<'a> Numbers<'a> {
    fn new(asked: &Asked, Panel { schedule, timeline, .. }: &Panel<'a>) -> Self {
        Numbers {
            schedule: schedule.name(),
            stages: schedule.devices(),
            microbatches: schedule.microbatches(),
            chunks: schedule.chunks(),
            tf: asked.tf,
            tb: asked.tb,
            tw: asked.tw,
            hop: asked.hop,
            makespan: timeline.makespan,
            span: timeline.span,
            bubble_ideal: timeline.bubble_ideal,
            bubble_total: timeline.bubble_total,
            peak_in_flight: &timeline.peak_in_flight,
            peak_until_w: &timeline.peak_until_w,
            weight_versions: &timeline.weight_versions,
        }
    }
}

fn look() -> Look {
    let columns = Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
    Look { width: columns.unwrap_or(PAGE), colour: Style::of(Stream::Stdout).colour }
}

fn write(file: &Path, text: &str) -> Result<()> {
    Ok(write_atomic(file, |to| to.write_all(text.as_bytes()))?)
}
