//! What can be wrong with data: each message says what, where, what was found, what would work.

use std::path::PathBuf;

use phalanx_sys::SysError;

use crate::TokenWidth;

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file is missing, unreadable, or changed while it was read.
    #[error(transparent)]
    File(#[from] SysError),
    /// The file holds nothing.
    #[error("{path}: the file is empty; a sample needs at least two tokens", path = path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file's size is not a whole number of tokens.
    #[error("{path}: truncated: {bytes} bytes are {whole} tokens of {width} bytes and {rest} left over; copy the file again, or set the token width it was written with", path = path.display(), whole = bytes / width, rest = bytes % width)]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Bytes per token.
        width: u64,
    },
    /// The file's name does not say how wide a token is.
    #[error("{path}: cannot tell the width of a token from this name; rename the file to end in .u16 or .u32, or set the width to u16 or u32", path = path.display())]
    UnknownWidth {
        /// The file.
        path: PathBuf,
    },
    /// The file's name tells another width than the one that was asked for.
    #[error("{path}: a name that ends in .{named} promises tokens of type {named}, but {asked} was asked for; ask for {named}, or rename the file if its name is wrong", path = path.display())]
    OtherWidth {
        /// The file.
        path: PathBuf,
        /// What its name says.
        named: TokenWidth,
        /// What was asked for.
        asked: TokenWidth,
    },
    /// A name for the width of a token that is neither u16 nor u32.
    #[error("unknown token width `{found}`; u16 and u32 would work")]
    BadWidth {
        /// The name as given.
        found: String,
    },
    /// A token is not in the model's vocabulary.
    #[error("{path}: token {token} at position {position} (byte {byte}) is not below the vocabulary of {vocab}; a vocabulary of at least {least} would hold it; if that number makes no sense, check the token width and byte order", path = path.display(), least = token + 1)]
    TokenOutOfVocabulary {
        /// The file.
        path: PathBuf,
        /// The token's index in the file.
        position: u64,
        /// The same place in bytes.
        byte: u64,
        /// What is there.
        token: u64,
        /// The vocabulary it should be below.
        vocab: usize,
    },
    /// The model's vocabulary is smaller than the corpus's.
    #[error(
        "{corpus} needs a vocabulary of at least {needed}, the model has {model}; set the model's vocabulary to {needed} or more"
    )]
    Vocabulary {
        /// The corpus, described.
        corpus: String,
        /// The corpus's vocabulary.
        needed: usize,
        /// The model's.
        model: usize,
    },
    /// A vocabulary the synthetic source cannot be built over.
    #[error("the synthetic corpus needs a vocabulary between {least} and {most}, found {found}")]
    MarkovVocabulary {
        /// The smallest that works.
        least: usize,
        /// The largest that works.
        most: usize,
        /// What was asked for.
        found: usize,
    },
    /// There is not enough data for one training and one evaluation sample.
    #[error(
        "{corpus} has {tokens} tokens, too short: one training and one evaluation sample of {seq_len} tokens and their targets need {needed} tokens; use more data, or a sequence length of at most {longest}"
    )]
    TooShort {
        /// The corpus, described.
        corpus: String,
        /// Its length.
        tokens: u64,
        /// The sequence length asked for.
        seq_len: usize,
        /// How many tokens would do.
        needed: u64,
        /// The longest sequence that this corpus allows.
        longest: u64,
    },
    /// A read past the end.
    #[error("{corpus}: {wanted} tokens at position {at} were asked for, but there are {tokens}")]
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
    #[error("{setting} = {found} cannot work: {remedy}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        found: String,
        /// What would work.
        remedy: String,
    },
    /// A batch in which every target is masked has no loss.
    #[error(
        "the batch of samples {first}..{end} has no target left: every one is the ignored token {token}; choose another `ignore_token`, or none"
    )]
    NothingToPredict {
        /// The batch's first sample.
        first: u64,
        /// One past its last sample.
        end: u64,
        /// The token that is ignored.
        token: i32,
    },
    /// The loading thread is gone: it failed before, or it could not be started.
    #[error("the loading thread stopped before sample {sample}: {reason}")]
    Stopped {
        /// The sample that will not come.
        sample: u64,
        /// Why, as far as is known.
        reason: String,
    },
}
