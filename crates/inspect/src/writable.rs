//! Files that a command is going to write, tried before it starts.

use std::path::Path;

use phalanx_sys::Staged;

use phalanx_error::{Error, Problem, Result};

/// Refuses a file that could not be written, in these words.
pub fn can_write(path: &Path, message: String) -> Result<()> {
    // A temporary file beside it is all that is needed; it goes away with this value.
    let tried = Staged::write(path, |_| Ok(()));
    tried.map(drop).map_err(|error| {
        let told = Problem::from(error.told());
        let problem = Problem::new(message).because(told.message);
        let problem = told.because.into_iter().fold(problem, Problem::because);
        Error::refused(problem.fix("name a file in a folder that exists and can be written to"))
    })
}
