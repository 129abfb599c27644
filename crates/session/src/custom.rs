//! Pipeline schedules that users wrote themselves.

use std::path::Path;

use phalanx_pipeline::{PipelineError, Schedule, csv};

use phalanx_error::{Error, Location, Problem, Result};

/// Reads and checks the schedule in a table; its name is `csv:FILE`.
pub fn read_schedule(file: &Path) -> Result<Schedule> {
    let bytes = std::fs::read(file)
        .map_err(|error| Error::refused(Problem::io("cannot read", file, &error)))?;
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
