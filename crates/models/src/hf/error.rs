//! What can be wrong with a model folder: each error says where, what was found, what would work.

use std::fmt;
use std::path::{Path, PathBuf};

use phalanx_sys::{Diagnostic, SysError};

/// What is found where something is missing.
pub(super) const ABSENT: &str = "nothing";

/// Why a model folder or weight file was not read or not written.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// The operating system refused to read.
    Read(#[source] SysError),
    /// The operating system refused to write (a full disk, for example). The previous file of that
    /// name, if there was one, is untouched.
    Write(#[source] SysError),
    /// A folder without weights in a format that can be read.
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// The names of the files in it.
        found: String,
    },
    /// A file is truncated, damaged, or not of the kind its name says.
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is in it.
        found: String,
        /// What should be in it.
        expected: String,
    },
    /// A setting is missing, of the wrong type, or impossible.
    Key {
        /// The file.
        path: PathBuf,
        /// The key, with the keys around it.
        key: String,
        /// Its value.
        found: String,
        /// What would work.
        expected: String,
    },
    /// A setting asks for a variant that is not implemented.
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key, with the keys around it.
        key: String,
        /// Its value.
        found: String,
        /// The values that are.
        supported: String,
    },
    /// A tensor has elements that are no floating-point numbers.
    Elements {
        /// The file.
        path: PathBuf,
        /// The tensor's name in that file.
        tensor: String,
        /// The type of its elements.
        found: String,
    },
    /// A tensor is missing, not expected, or has the wrong shape, type or content.
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in that file.
        tensor: String,
        /// What the file holds.
        found: String,
        /// What the specification asks for.
        expected: String,
    },
}

impl fmt::Display for HfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.diagnostic().fmt(f)
    }
}

impl HfError {
    /// The error in its parts.
    pub fn diagnostic(&self) -> Diagnostic {
        match self {
            HfError::Read(error) | HfError::Write(error) => error.diagnostic(),
            HfError::NoWeights { dir, found } => Diagnostic::new(format!(
                "{} holds no model.safetensors and no model.safetensors.index.json",
                dir.display()
            ))
            .because(format!("found: {found}"))
            .fix(
                "weights in other formats can be converted by loading them with transformers and \
                 calling save_pretrained",
            ),
            HfError::Corrupt { path, found, expected } => {
                Diagnostic::new(format!("{} is damaged: {found}", path.display()))
                    .because(format!("expected {expected}"))
                    .fix("copy or download it again")
            }
            HfError::Key { path, key, found, expected } => {
                let told = match found.as_str() {
                    ABSENT => format!("{}: `{key}` is missing", path.display()),
                    _ => format!("{}: `{key}`: found {found}", path.display()),
                };
                Diagnostic::new(told)
                    .because(format!("expected {expected}"))
                    .fix("copy the file again, or correct it")
            }
            HfError::Unsupported { path, key, found, supported } => {
                Diagnostic::new(format!("{}: `{key}` = {found} is not supported", path.display()))
                    .because(format!("supported: {supported}"))
                    .fix(format!("take a model whose `{key}` is supported"))
            }
            HfError::Elements { path, tensor, found } => Diagnostic::new(format!(
                "{}: tensor `{tensor}` has elements of type {found}",
                path.display()
            ))
            .because("weights that are trained are F32, F64, BF16 or F16")
            .fix(
                "take the version of the model that is not quantised, or load it in transformers \
                 with torch_dtype=torch.bfloat16 and call save_pretrained",
            ),
            HfError::Tensor { path, tensor, found, expected } => {
                let told = match found.strip_prefix(ABSENT) {
                    Some(more) => format!("{}: tensor `{tensor}` is missing{more}", path.display()),
                    None => format!("{}: tensor `{tensor}`: found {found}", path.display()),
                };
                Diagnostic::new(told)
                    .because(format!("expected {expected}"))
                    .fix("weights and config.json must be of one model: copy both again")
            }
        }
    }

    /// Whether the input was wrong (nothing has been started), and not the attempt to write.
    pub fn is_bad_input(&self) -> bool {
        !matches!(self, HfError::Write(_))
    }

    pub(super) fn read(path: &Path, source: std::io::Error) -> Self {
        HfError::Read(SysError::on_file(path, "reading it", source))
    }

    pub(super) fn corrupt(
        path: &Path,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        HfError::Corrupt { path: path.into(), found: found.into(), expected: expected.into() }
    }

    pub(super) fn key(
        path: &Path,
        key: &str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        HfError::Key {
            path: path.into(),
            key: key.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }

    /// A tensor that is not what it should be.
    pub fn tensor(
        path: &Path,
        tensor: &str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        HfError::Tensor {
            path: path.into(),
            tensor: tensor.into(),
            found: found.into(),
            expected: expected.into(),
        }
    }
}
