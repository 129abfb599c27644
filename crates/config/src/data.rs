//! `[data]`: the training data.

use std::path::PathBuf;

use phalanx_data::{MarkovCorpus, TokenWidth};

use super::key::section;
use super::setting::{Fraction, choice, words};
use super::values::Values;
use super::{ModelConfig, ModelKind};
use phalanx_error::Problem;

section! {
    /// `[data]`: where the tokens come from.
    pub struct DataConfig in "data" (run_seed: u64) {
        /// A built-in source of known entropy, a text file read as bytes, or a flat file of ids. For
        /// images: built-in digits, or a folder with the four files of MNIST.
        kind: DataKind = "synthetic"; aka "dataset" "dataset_type" "mock_data",
        /// The file, for text and tokens; the folder, for idx.
        path: Option<PathBuf> = "none"; aka "data_path" "dataset_path" "train_file" "file",
        /// Size of one id in a file of tokens, little-endian. A file name that ends in .u16 or .u32
        /// sets it; other files need this key.
        dtype: Option<TokenWidth> = "by the file's name" => None; aka "token_dtype" "token_size",
        /// Share of the file, from its end, that is kept for evaluation.
        val_fraction: Fraction = "0.05"; aka "val_split" "validation_split" "split" "eval_fraction",
        /// A target with this id does not count in the loss.
        ignore_token: Option<u32> = "none"; aka "ignore_index" "pad_token_id" "pad_token" "ignore_id",
        /// Seed of the synthetic source and of the order of samples.
        seed: u64 = "run.seed" => run_seed; aka "data_seed" "shuffle_seed",
    }
}

choice! {
    /// Kind of data.
    pub enum DataKind {
        /// An order-2 Markov source of known entropy.
        Synthetic = "synthetic",
        /// Any file, a token per byte.
        Text = "text",
        /// A flat file of ids, memory-mapped.
        Tokens = "tokens",
        /// Images of digits, drawn when they are read.
        Digits = "digits",
        /// Images and labels in the files of MNIST.
        Idx = "idx",
    }
}

impl DataKind {
    /// Whether it holds images instead of tokens.
    pub fn is_images(self) -> bool {
        matches!(self, DataKind::Digits | DataKind::Idx)
    }

    /// Whether it has a part for evaluation by itself.
    pub fn has_held_out(self) -> bool {
        matches!(self, DataKind::Synthetic | DataKind::Digits | DataKind::Idx)
    }
}

words!(TokenWidth { U16 = "u16", U32 = "u32", });

impl DataConfig {
    pub(crate) fn check(&self, model: &ModelConfig, values: &mut Values) {
        let vocab = model.vocab.get();
        let kind = self.kind;
        let from_file = !matches!(kind, DataKind::Synthetic | DataKind::Digits);
        let images = model.kind == ModelKind::Cnn;
        values.rule(&["data.kind", "model.kind"], kind.is_images() == images, || {
            let reads = if images { "images" } else { "tokens" };
            let fix = match images {
                true => "data.kind = \"digits\" (drawn here) or \"idx\" (the files of MNIST)",
                false => {
                    "data.kind = \"synthetic\", \"text\" or \"tokens\"; or model.kind = \"cnn\""
                }
            };
            Problem::new(format!(
                "data.kind = {kind} does not work with model.kind = {}",
                model.kind
            ))
            .because(format!("{} reads {reads}", model.kind))
            .fix(fix)
        });
        let has_path = self.path.is_some();
        values.rule(&["data.kind", "data.path"], has_path || !from_file, || {
            Problem::new(format!("data.kind = {kind} needs data.path, which is not set"))
                .fix("--set data.path=FILE")
        });
        values.rule(&["data.path", "data.kind"], from_file || !has_path, || {
            Problem::new(format!("data.path has no effect with data.kind = {kind}"))
                .because(format!(
                    "the {} source reads no file",
                    if images { "built-in" } else { "synthetic" }
                ))
                .fix(match images {
                    true => "data.kind = \"idx\" (a folder with the files of MNIST)",
                    false => {
                        "data.kind = \"text\" (a token per byte) or \"tokens\" (a file of ids)"
                    }
                })
        });
        let bytes_fit = kind != DataKind::Text || vocab >= 256;
        values.rule(&["model.vocab", "data.kind"], bytes_fit, || {
            let problem =
                Problem::new(format!("model.vocab = {vocab} is too small for data.kind = text"))
                    .because("text is read as bytes, and a byte has 256 values");
            match model.from {
                Some(_) => problem.fix(
                    "data.kind = \"tokens\", a file of ids that the model's own tokenizer made",
                ),
                None => problem.nearest("model.vocab = 256"),
            }
        });
        let least = MarkovCorpus::LEAST_VOCAB;
        let ids_fit = kind != DataKind::Synthetic || vocab >= least;
        values.rule(&["model.vocab", "data.kind"], ids_fit, || {
            Problem::new(format!("model.vocab = {vocab} is too small for data.kind = synthetic"))
                .because(format!("the synthetic source needs at least {least} different tokens"))
                .nearest(match model.from {
                    Some(_) => "data.kind = \"tokens\"".to_owned(),
                    None => format!("model.vocab = {least}"),
                })
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library and the command hold out the same share.
    #[test]
    fn the_held_out_share_is_the_librarys() {
        let key = DataConfig::KEYS.iter().find(|key| key.name == "data.val_fraction");
        let text = key.expect("it is a key").default;
        assert_eq!(text.parse(), Ok(phalanx_data::DEFAULT_VAL_FRACTION));
    }
}
