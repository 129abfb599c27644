//! What goes wrong with a GPU or its libraries.

use phalanx_engine::EngineError;

/// A library that is missing, or a call of one that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No file of a library could be opened.
    #[error(
        "{library} could not be opened; looked for {}\n  it is part of {package}; if it is \
         installed elsewhere, add its folder to LD_LIBRARY_PATH",
        files.join(", ")
    )]
    Missing {
        /// The library's name for people.
        library: &'static str,
        /// The files that were tried.
        files: Vec<String>,
        /// What to install.
        package: &'static str,
    },
    /// A file of a library is there, but cannot be loaded.
    #[error("{library} could not be opened: {why}\n  {file} is there; install all of {package}")]
    Unloadable {
        /// The library's name for people.
        library: &'static str,
        /// The file.
        file: String,
        /// What the system's loader said.
        why: String,
        /// What to install.
        package: &'static str,
    },
    /// The compiler of kernels is older than the GPU.
    #[error("NVRTC does not know GPUs of version {architecture}; install a newer version of it")]
    UnknownGpu {
        /// The version as compilers name it.
        architecture: String,
    },
    /// A library that is there, but too old.
    #[error("{library} has no function {function}; install a newer version: {package}")]
    Old {
        /// The library's name for people.
        library: &'static str,
        /// The function that it lacks.
        function: &'static str,
        /// What to install.
        package: &'static str,
    },
    /// A call that failed.
    #[error("{function} failed: {why}")]
    Call {
        /// The function of the library.
        function: &'static str,
        /// What the library said.
        why: String,
    },
    /// A kernel that does not compile.
    #[error("a generated kernel does not compile: {log}")]
    Compile {
        /// The compiler's messages.
        log: String,
    },
}

impl CudaError {
    /// The same while something of this name was being done.
    pub(crate) fn during(self, program: &str) -> EngineError {
        EngineError::Failed { program: program.to_owned(), why: self.to_string() }
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        error.during("GPU")
    }
}
