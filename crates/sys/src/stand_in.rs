//! Files that are there instead of the file that was meant: a download that went wrong.

use std::path::Path;

use crate::SysError;

/// What a file really is, by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StandIn {
    /// A pointer of git-lfs: a few lines of text that name the real file.
    GitLfs,
    /// A web page, such as the answer to a download without permission.
    Html,
    /// A zip archive: PyTorch writes its `.bin` and `.pt` files in this form.
    Zip,
}

impl StandIn {
    /// What the first bytes of a file show; `None` if they show nothing of this kind.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let text = bytes.trim_ascii_start();
        let begins = |word: &[u8]| {
            text.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word))
        };
        match () {
            () if bytes.starts_with(b"version https://git-lfs") => Some(Self::GitLfs),
            () if begins(b"<!doctype html") || begins(b"<html") => Some(Self::Html),
            () if bytes.starts_with(b"PK\x03\x04") => Some(Self::Zip),
            () => None,
        }
    }

    /// The error of such a file.
    pub fn error(self, path: &Path) -> SysError {
        SysError::StandIn { path: path.to_path_buf(), found: self }
    }

    /// What it is, and what to do about it.
    pub(crate) fn told(self) -> (&'static str, &'static str) {
        match self {
            Self::GitLfs => ("a pointer of git-lfs, not the file itself", "git lfs pull"),
            Self::Html => (
                "a web page, not the file itself",
                "download it again, from the address of the file itself, logged in if necessary",
            ),
            Self::Zip => (
                "a zip archive, as PyTorch writes it",
                "load it with transformers and call save_pretrained, which writes safetensors",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stand_ins_are_known_by_their_first_bytes() {
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00";
        assert_eq!(StandIn::of(pointer), Some(StandIn::GitLfs));
        assert_eq!(StandIn::of(b"\n<!DOCTYPE HTML><html>"), Some(StandIn::Html));
        assert_eq!(StandIn::of(b"PK\x03\x04abc"), Some(StandIn::Zip));
        for other in [&b""[..], b"<", b"version 2", b"{\"a\": 1}", b"PK"] {
            assert_eq!(StandIn::of(other), None);
        }
    }
}
