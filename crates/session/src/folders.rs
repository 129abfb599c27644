//! Distinguishes the two kinds of folder that hold a model, so that the error for the wrong kind
//! can say what to write instead.

use std::path::Path;

use phalanx_error::{Error, Problem, Result};

/// The name of the resolved configuration within a run's folder.
pub const RUN_CONFIG: &str = "config.toml";

/// The folder of a run's checkpoints, within the run's folder.
pub const CHECKPOINTS: &str = "checkpoints";

/// The file in a run's folder that says where its time went.
pub const LEDGER: &str = "ledger.json";

/// Who wrote a folder with a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FolderKind {
    /// Hugging Face's libraries, or `phalanx export`.
    HuggingFace,
    /// A training run.
    Run,
}

impl FolderKind {
    /// The file that only folders of this form have.
    pub fn mark(self) -> &'static str {
        match self {
            FolderKind::HuggingFace => "config.json",
            FolderKind::Run => RUN_CONFIG,
        }
    }

    fn other(self) -> Self {
        match self {
            FolderKind::HuggingFace => FolderKind::Run,
            FolderKind::Run => FolderKind::HuggingFace,
        }
    }

    fn name(self) -> &'static str {
        match self {
            FolderKind::HuggingFace => "a Hugging Face folder",
            FolderKind::Run => "the folder of a run",
        }
    }

    /// Refuses a folder that does not exist, and a folder of the other form; for the latter,
    /// `instead` says what to write, with `DIR` for its path.
    pub fn expect(self, dir: &Path, instead: &str) -> Result<()> {
        let (shown, other) = (dir.display().to_string(), self.other());
        if !dir.is_dir() {
            let found = match dir.exists() {
                true => "is a file, not a folder",
                false if dir.is_symlink() => "is a link to a folder that does not exist",
                false => "does not exist",
            };
            return Err(Error::refused(
                Problem::new(format!("{shown} {found}"))
                    .because(format!("expected {}, with {} in it", self.name(), self.mark()))
                    .fix("check the path; relative ones start at the current folder"),
            ));
        }
        if dir.join(self.mark()).exists() || !dir.join(other.mark()).exists() {
            return Ok(());
        }
        let problem = Problem::new(format!("{shown} is {}, not {}", other.name(), self.name()))
            .because(format!("it has {}, but no {}", other.mark(), self.mark()));
        Err(Error::refused(problem.fix(instead.replace("DIR", &shown))))
    }
}
