//! Checks that a command can write its files, before it starts.

use std::path::Path;

use phalanx_sys::{Staged, SysError};

use phalanx_error::{Error, Problem, Result};

/// Refuses a file that cannot be written, with this message.
pub fn can_write(path: &Path, message: String) -> Result<()> {
    // Making a temporary file next to it is enough; it is removed when this value is dropped.
    let tried = Staged::write(path, |_| Ok(()));
    tried.map(drop).map_err(|error| {
        let told = Problem::from(error.diagnostic());
        let problem = Problem::new(message).because(told.message);
        let mut problem = told.because.into_iter().fold(problem, Problem::because);
        problem.remedy = told.remedy;
        Error::refused(match error {
            SysError::NotAFile { .. } => problem.fix("name a file, not a folder"),
            _ => problem,
        })
    })
}
