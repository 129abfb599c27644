//! Pipeline schedules that users wrote themselves.

use std::path::Path;

use phalanx_pipeline::{PipelineError, Schedule, csv};

use phalanx_error::{Error, Location, Problem, Result};

/// More bytes than any table has: the longest schedule has some millions of turns.
const LONGEST_TABLE: u64 = 256 << 20;

/// Reads and checks the schedule in a table; its name is `csv:FILE`.
pub fn read_schedule(file: &Path) -> Result<Schedule> {
    let bytes = phalanx_sys::read_regular(file, LONGEST_TABLE)
        .map_err(|error| Error::refused(error.diagnostic().into()))?;
    let place = |line| Location { source: file.display().to_string(), line, key: None };
    let name = format!("csv:{}", file.display());
    let read = csv::decode(&bytes).and_then(|text| csv::read(&name, text));
    read.map_err(|error| match error {
        PipelineError::Csv { line, what, help } => {
            Error::refused(Problem::new(what).because(help).at(place(Some(line))))
        }
        other => Error::from(other).at(place(None)),
    })
}
