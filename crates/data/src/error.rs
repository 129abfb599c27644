//! What can be wrong with data: each message says what, where, what was found, what would work.

use std::fmt;
use std::path::{Path, PathBuf};

use phalanx_sys::{Diagnostic, SysError};

use crate::TokenWidth;

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file is missing, unreadable, or changed while it was read.
    File(#[from] SysError),
    /// The file is empty.
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file's size is not a whole number of tokens.
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Bytes per token.
        width: u64,
    },
    /// The file's name does not say how wide a token is.
    UnknownWidth {
        /// The file.
        path: PathBuf,
    },
    /// The file's name has another token width than the one that was asked for.
    OtherWidth {
        /// The file.
        path: PathBuf,
        /// What its name says.
        named: TokenWidth,
        /// What was asked for.
        asked: TokenWidth,
    },
    /// A name for the width of a token that is neither u16 nor u32.
    BadWidth {
        /// The name as given.
        found: String,
    },
    /// A token is not in the model's vocabulary.
    TokenOutOfVocabulary {
        /// The file.
        path: PathBuf,
        /// The token's index in the file.
        position: u64,
        /// The same place in bytes.
        byte: u64,
        /// What is there.
        token: u64,
        /// The vocabulary size, which it must be below.
        vocab: usize,
        /// The largest token that was looked at.
        largest: u64,
    },
    /// The model's vocabulary is smaller than the corpus's.
    Vocabulary {
        /// The corpus, described.
        corpus: String,
        /// The corpus's vocabulary.
        needed: usize,
        /// The model's.
        model: usize,
    },
    /// A vocabulary the synthetic source cannot be built over.
    MarkovVocabulary {
        /// The smallest that works.
        least: usize,
        /// The largest that works.
        most: usize,
        /// What was asked for.
        found: usize,
    },
    /// There is not enough data for one training and one evaluation sample.
    TooShort {
        /// The corpus, described.
        corpus: String,
        /// Its length.
        tokens: u64,
        /// The sequence length asked for.
        seq_len: usize,
        /// How many tokens would be enough.
        needed: u64,
        /// The longest sequence that this corpus allows.
        longest: u64,
    },
    /// A read past the end.
    BeyondEnd {
        /// The corpus, described.
        corpus: String,
        /// Where the read began.
        at: u64,
        /// How many tokens it wanted.
        wanted: usize,
        /// How many there are.
        tokens: u64,
    },
    /// A setting of the loader that cannot work.
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        found: String,
        /// What would work.
        remedy: String,
    },
    /// A batch in which every target is masked has no loss.
    NothingToPredict {
        /// The batch's first sample.
        first: u64,
        /// One past its last sample.
        end: u64,
        /// The token that is ignored.
        token: i32,
    },
    /// A file of images or labels is not what its header says.
    Idx {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Images that the model does not take.
    Images {
        /// The images, described.
        images: String,
        /// Their height, width and classes.
        found: [usize; 3],
        /// Those of the model.
        model: [usize; 3],
    },
    /// The loading thread could not be started.
    Thread {
        /// What the system said.
        reason: String,
    },
    /// The loading thread has ended: it failed before.
    Stopped {
        /// The sample that is missing.
        sample: u64,
        /// Why, as far as is known.
        reason: String,
    },
}

impl fmt::Display for DataError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.diagnostic().fmt(f)
    }
}

impl DataError {
    /// The error in its parts.
    pub fn diagnostic(&self) -> Diagnostic {
        match self {
            Self::File(error) => error.diagnostic(),
            Self::Empty { path } => in_file(path, "the file is empty")
                .because("a sample needs at least two tokens")
                .fix("name a file with data in it"),
            Self::Truncated { path, bytes, width } => truncated(path, *bytes, *width),
            Self::UnknownWidth { path } => {
                in_file(path, "the file name does not say how many bytes a token has")
                    .fix("rename the file to end in .u16 or .u32, or set the width to u16 or u32")
            }
            Self::OtherWidth { path, named, asked } => other_width(path, *named, *asked),
            Self::BadWidth { found } => {
                Diagnostic::new(format!("unknown token width `{found}`")).fix("use u16 or u32")
            }
            Self::TokenOutOfVocabulary { path, position, byte, token, vocab, largest } => {
                let found = format!("token {token} at position {position} (byte {byte})");
                let largest_is = match largest > token {
                    true => format!("the largest token is {largest}; "),
                    false => String::new(),
                };
                in_file(path, &format!("{found} is not below the vocabulary of {vocab}"))
                    .because(format!(
                        "{largest_is}ids that make no sense mean another token width or byte order"
                    ))
                    .fix(format!("use a vocabulary of at least {}", largest + 1))
            }
            Self::Vocabulary { corpus, needed, model } => {
                let found = format!("the model has {model}");
                Diagnostic::new(format!(
                    "{corpus} needs a vocabulary of at least {needed}, but {found}"
                ))
                .fix(format!("set the model's vocabulary to {needed} or more"))
            }
            Self::MarkovVocabulary { least, most, found } => {
                Diagnostic::new(format!("the synthetic corpus cannot have a vocabulary of {found}"))
                    .fix(format!("use a vocabulary between {least} and {most}"))
            }
            Self::TooShort { corpus, tokens, seq_len, needed, longest } => {
                let samples = match longest {
                    // All pieces are for training, so one is enough.
                    _ if *needed == *seq_len as u64 + 1 => "one sample",
                    _ => "one training and one evaluation sample",
                };
                Diagnostic::new(format!(
                    "{corpus} is too short: it has {}",
                    counted(*tokens, "token")
                ))
                .because(format!(
                    "{samples} of {seq_len} tokens and their targets need {needed} tokens"
                ))
                .fix(format!("use more data, or a sequence length of at most {longest}"))
            }
            Self::BeyondEnd { corpus, at, wanted, tokens } => {
                let asked = format!("{wanted} tokens at position {at} were asked for");
                Diagnostic::new(format!("{corpus}: {asked}, but there are {tokens}"))
            }
            Self::Setting { setting, found, remedy } => {
                Diagnostic::new(format!("{setting} = {found} cannot work")).fix(remedy)
            }
            Self::NothingToPredict { first, end, token } => Diagnostic::new(format!(
                "the batch of samples {first}..{end} has no target that counts"
            ))
            .because(format!("every target is the ignored token {token}"))
            .fix("set another `ignore_token`, or none"),
            Self::Idx { path, what } => in_file(path, what).fix(
                "fetch the file again and unpack it; MNIST has 60000 and 10000 images of 28 × 28",
            ),
            Self::Images { images, found, model } => {
                let words = |[height, width, classes]: &[usize; 3]| {
                    format!("{height} × {width} pixels and {classes} classes")
                };
                Diagnostic::new(format!("{images}: they have {}", words(found)))
                    .because(format!("the model takes {}", words(model)))
                    .fix("images of that size, with classes from 0 on")
            }
            Self::Thread { reason } => {
                Diagnostic::new(format!("the system refuses a thread that loads data: {reason}"))
                    .fix("use fewer ranks or threads, or allow more (ulimit -u, ulimit -v)")
            }
            Self::Stopped { sample, reason } => Diagnostic::new(format!(
                "the loading thread stopped before sample {sample}: {reason}"
            )),
        }
    }
}

/// `1 token`, `2 tokens`.
fn counted(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

fn in_file(path: &Path, what: &str) -> Diagnostic {
    Diagnostic::new(format!("{}: {what}", path.display()))
}

fn truncated(path: &Path, bytes: u64, width: u64) -> Diagnostic {
    let (whole, rest) = (bytes / width, bytes % width);
    in_file(
        path,
        &format!("truncated: {bytes} bytes are no whole number of tokens of {width} bytes"),
    )
    .because(format!("whole tokens: {whole}; bytes left over: {rest}"))
    .fix("copy the file again, or set the token width it was written with")
}

fn other_width(path: &Path, named: TokenWidth, asked: TokenWidth) -> Diagnostic {
    in_file(path, &format!("this file does not hold tokens of type {asked}"))
        .because(format!("its name ends in .{named}, so its tokens are of type {named}"))
        .fix(format!("ask for {named}, or rename the file if its name is wrong"))
}
