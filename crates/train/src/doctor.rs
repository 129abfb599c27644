//! What is the matter with a run: who the others wait for, and what that rank was doing. It reads the
//! recorder of a job that is alive, and otherwise what the run's folder has kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use phalanx_checkpoint::{Checkpoint, newest_and_damaged};
use phalanx_comm::FlightRecorder;
use phalanx_error::{Error, Problem, Result};
use phalanx_recovery::{Life, RankSight, blame};
use phalanx_session::folders::CHECKPOINTS;
use phalanx_session::launch::{FLIGHT, JOB, report, sights};
use phalanx_sys::process::{exists, is_stopped};
use serde_json::{Value, json};

use crate::resume::shortly;
use crate::rundir::{CONFIG, METRICS};

/// A run at work does something at least this often, or it is worth a look.
const LIVELY: Duration = Duration::from_secs(1);

/// What was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Examination {
    /// One sentence: the rank to look at, or that all is well.
    pub sentence: String,
    /// What else is known, a line each.
    pub lines: Vec<String>,
    /// All of it, for programs.
    pub json: Value,
}

/// Examines the run in a folder.
pub fn examine(run: &Path) -> Result<Examination> {
    if !run.join(CONFIG).is_file() {
        let problem = Problem::new(format!("{} is not the folder of a run", run.display()));
        return Err(Error::refused(problem.fix("give a folder such as runs/NAME")));
    }
    let (steps, ended) = progress(run);
    let (newest, damaged) = newest_and_damaged(&run.join(CHECKPOINTS));
    let checkpoint = newest.and_then(|path| Checkpoint::open(&path).ok());
    let checkpoint = checkpoint.map(|checkpoint| checkpoint.manifest().step);
    let saved = match checkpoint {
        Some(step) => format!("its newest whole checkpoint is after step {step}"),
        None => "it has no checkpoint".to_owned(),
    };
    let state = format!("{steps} steps are in {METRICS}; {saved}");
    let (alive, sentence, mut lines, ranks) = match recorder(run) {
        Some(recorder) => living(&recorder),
        None => {
            let (sentence, ranks) = dead(run, ended);
            (false, sentence, Vec::new(), ranks)
        }
    };
    lines.push(state);
    lines.extend(damaged.iter().map(shortly));
    if !alive && !ended && checkpoint.is_some() {
        lines.push(format!("to go on: phalanx train --resume {}", run.display()));
    }
    let json = json!({
        "alive": alive, "ended": ended, "sentence": sentence, "steps": steps,
        "checkpoint": checkpoint, "job": ranks,
    });
    Ok(Examination { sentence, lines, json })
}

/// The steps that the metrics have, and whether the run has ended as it should.
fn progress(run: &Path) -> (u64, bool) {
    let text = fs::read_to_string(run.join(METRICS)).unwrap_or_default();
    let lines: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let steps = lines.iter().filter_map(|line| line["step"].as_u64()).max().unwrap_or(0);
    (steps, lines.last().is_some_and(|line| !line["summary"].is_null()))
}

/// The recorder of the job that trains the run now, if one does.
fn recorder(run: &Path) -> Option<FlightRecorder> {
    let text = fs::read_to_string(run.join(JOB)).ok()?;
    let known: Value = serde_json::from_str(&text).ok()?;
    let (launcher, fd) = (known["launcher"].as_u64()?, known["recorder"].as_u64()?);
    let path = PathBuf::from(format!("/proc/{launcher}/fd/{fd}"));
    let recorder = FlightRecorder::open_path(&path).ok()?;
    // Another job may have got the number of that process.
    let own = fs::canonicalize(recorder.job().folder()).ok()?;
    (own == fs::canonicalize(run).ok()?).then_some(recorder)
}

fn living(recorder: &FlightRecorder) -> (bool, String, Vec<String>, Value) {
    let spread = recorder.job().is_spread();
    let sights = sights(recorder, |rank, process| match process as u32 {
        0 => Life::Runs,
        // A process of another host, which has the number there.
        _ if spread && recorder.rank(rank).is_stopped() => Life::Stopped,
        _ if spread => Life::Runs,
        process if !exists(process) => Life::Ended("has ended".to_owned()),
        process if is_stopped(process) => Life::Stopped,
        _ => Life::Runs,
    });
    let quiet = sights.iter().map(|sight| sight.quiet).min().unwrap_or_default();
    let whole = sights.iter().all(|sight| sight.life == Life::Runs);
    let found = blame(&sights).filter(|_| !whole || quiet >= LIVELY);
    let json = report(recorder, &sights, found.as_ref());
    let step = sights.iter().map(|sight| sight.step).max().unwrap_or(0);
    let sentence = match found {
        Some(found) => found.sentence,
        None if quiet >= LIVELY => {
            let time = quiet.as_secs_f64();
            format!(
                "no rank has begun anything for {time:.1} s, and none waits for another; step {step}"
            )
        }
        None => format!("all ranks are at work, in step {step}"),
    };
    (true, sentence, sights.iter().enumerate().map(line).collect(), json)
}

fn line((rank, sight): (usize, &RankSight)) -> String {
    let RankSight { process, step, inside, action, waits_for, quiet, .. } = sight;
    let state = match (&sight.life, waits_for) {
        (Life::Ended(how), _) => how.clone(),
        (Life::Stopped, _) => "is stopped".to_owned(),
        (Life::Runs, Some(other)) => format!("waits for rank {other}"),
        (Life::Runs, None) if sight.meets => "waits for all others".to_owned(),
        (Life::Runs, None) => "works".to_owned(),
    };
    let place = match inside {
        true => format!("step {step}, `{action}`"),
        false => format!("after step {step}"),
    };
    let time = quiet.as_secs_f64();
    format!(
        "rank {rank}: process {process} {state}; {place}; {time:.1} s since its last action or call"
    )
}

/// What a run without a living job has left.
fn dead(run: &Path, ended: bool) -> (String, Value) {
    if ended {
        return ("the run has ended as it should".to_owned(), Value::Null);
    }
    let text = fs::read_to_string(run.join(FLIGHT)).unwrap_or_default();
    let flight: Value = serde_json::from_str(&text).unwrap_or_default();
    let sentence = match flight["sentence"].as_str() {
        Some(sentence) => format!("the job is not alive; what was found last: {sentence}"),
        None => {
            "the job is not alive, and left no record: it had no launcher, or was ended with it"
                .to_owned()
        }
    };
    (sentence, flight)
}
