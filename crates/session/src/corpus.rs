//! The tokens that a configuration asks for, as batches for training and for evaluation.

use std::sync::Arc;

use phalanx_data::{
    Batch, Corpus, DataError, Digits, IdxImages, Images, Loader, LoaderConfig, MarkovCorpus,
    Samples, Split, TextFile, TokenFile, check_vocabulary,
};
use phalanx_models::{Cnn, T5, port};
use phalanx_sys::SysError;

use crate::{Field, StepData};
use phalanx_config::{DataKind, Loaded, ModelKind};
use phalanx_error::{Error, Result};

/// Tokens of the synthetic corpus. It is computed where it is read, so its length costs nothing; no
/// useful run reaches its end.
const SYNTHETIC_TOKENS: u64 = 1 << 36;

/// Opens the data of a configuration and makes sure that the model knows its tokens or takes its images.
pub fn open(loaded: &Loaded) -> Result<Samples> {
    let (data, vocab) = (&loaded.config.data, loaded.config.model.vocab.get());
    open_kind(data, vocab).map_err(|error| refused(loaded, &error))
}

/// Images of the size that the model takes.
fn fitting(images: Arc<dyn Images>) -> Result<Samples, DataError> {
    let model = Cnn::mnist();
    let sizes = |[height, width]: [usize; 2], classes| [height, width, classes];
    let (found, model) =
        (sizes(images.size(), images.classes()), sizes(model.image, model.classes));
    match found[..2] == model[..2] && found[2] <= model[2] {
        true => Ok(Samples::Images(images)),
        false => Err(DataError::Images { images: images.describe(), found, model }),
    }
}

/// A loader of training batches, starting with the first.
pub fn training(loaded: &Loaded, corpus: &Samples) -> Result<Loader> {
    training_after(loaded, corpus, 0)
}

/// The same, after this many samples.
pub fn training_after(loaded: &Loaded, corpus: &Samples, samples: u64) -> Result<Loader> {
    loader(loaded, corpus, Split::Train, samples)
}

/// The held-out batches that every evaluation of a run sees.
pub fn held_out(loaded: &Loaded, corpus: &Samples) -> Result<Vec<Batch>> {
    let data = &loaded.config.data;
    if !data.kind.has_held_out() && data.val_fraction.get() == 0.0 {
        let problem = loaded.problem("data.val_fraction", "no part of the data is held out");
        let share = phalanx_data::DEFAULT_VAL_FRACTION;
        return Err(Error::refused(
            problem
                .because("data.val_fraction = 0 trains on all of it")
                .fix(format!("--set data.val_fraction={share}, for both training and evaluation")),
        ));
    }
    let mut loader = loader(loaded, corpus, Split::Validation, 0)?;
    let wanted = loaded.config.train.eval_batches.get() as u64;
    (0..wanted.min(loader.batches_per_pass()))
        .map(|_| match loader.next_batch() {
            Ok(batch) => Ok(batch.clone()),
            Err(error) => Err(refused(loaded, &error)),
        })
        .collect()
}

/// Gives a batch of tokens or images to `use_it` as the data of a step.
pub fn with_step_data<T>(batch: &Batch, use_it: impl FnOnce(&StepData<'_>) -> T) -> T {
    let targets = Field::I32(&batch.targets);
    let fields = match batch.pixels.is_empty() {
        true => [(port::IDS, Field::I32(&batch.ids)), (port::TARGETS, targets)],
        false => [(port::X, Field::F32(&batch.pixels)), (port::Y, targets)],
    };
    use_it(&StepData {
        fields: &fields,
        count: batch.valid_tokens,
        first_sample: batch.first_sample,
        scalars: &[],
    })
}

/// The mean loss over all valid tokens of some batches; `loss` gives the mean of one batch.
pub fn mean_loss(
    batches: &[Batch],
    mut loss: impl FnMut(&StepData<'_>) -> Result<f64>,
) -> Result<f64> {
    let (mut sum, mut count) = (0.0, 0.0);
    for batch in batches.iter().filter(|batch| batch.valid_tokens > 0) {
        let tokens = batch.valid_tokens as f64;
        sum += with_step_data(batch, &mut loss)? * tokens;
        count += tokens;
    }
    Ok(sum / count)
}

fn loader(loaded: &Loaded, corpus: &Samples, split: Split, samples: u64) -> Result<Loader> {
    let config = &loaded.config;
    let settings = LoaderConfig {
        microbatches: config.microbatches(),
        split,
        val_fraction: match (config.data.kind, config.data.val_fraction.get()) {
            // The synthetic source has no end, so it always has something to evaluate on.
            (DataKind::Synthetic, 0.0) => phalanx_data::DEFAULT_VAL_FRACTION,
            (_, share) => share,
        },
        ignore_token: config.data.ignore_token.map(|token| token as i32),
        unpredicted: match config.model.kind {
            ModelKind::T5 => T5::source(config.train.seq_len.get()),
            _ => 0,
        },
        ..LoaderConfig::new(
            config.data.seed,
            config.train.seq_len.get(),
            config.train.batch_size.get(),
        )
    };
    Loader::of(corpus, settings, samples).map_err(|error| refused(loaded, &error))
}

/// The error for a problem with the data, with the key to change and what to write there instead.
fn refused(loaded: &Loaded, error: &DataError) -> Error {
    let fixed = loaded.config.model.from.is_some();
    let (key, fix) = match error {
        DataError::TokenOutOfVocabulary { vocab, .. } if fixed => (
            "data.path",
            Some(format!("use data made with the tokenizer of model.from: ids below {vocab}")),
        ),
        DataError::MarkovVocabulary { least, most, .. } => {
            ("model.vocab", Some(format!("model.vocab from {least} to {most}")))
        }
        DataError::Vocabulary { needed, .. } => {
            ("model.vocab", Some(format!("--set model.vocab={needed}, or more")))
        }
        DataError::TokenOutOfVocabulary { largest, .. } => {
            ("data.path", Some(format!("--set model.vocab={}, or more", largest + 1)))
        }
        DataError::OtherWidth { named, .. } => {
            ("data.dtype", Some(format!("leave data.dtype out, or --set data.dtype={named}")))
        }
        DataError::UnknownWidth { .. } => {
            ("data.path", Some("--set data.dtype=u16, or u32".to_owned()))
        }
        // Sequences this short are not worth suggesting: a model would see at most a word at a
        // time.
        DataError::TooShort { longest, .. } => match longest {
            0..8 => ("data.path", Some("use more data".to_owned())),
            _ => ("data.path", Some(format!("use more data, or --set train.seq_len={longest}"))),
        },
        // A run may have been moved, or be evaluated from another folder.
        DataError::File(SysError::Missing { .. }) => {
            ("data.path", Some("--set data.path=FILE, where it is now".to_owned()))
        }
        DataError::NothingToPredict { .. } => {
            ("data.ignore_token", Some("set another data.ignore_token, or none".to_owned()))
        }
        _ => ("data.path", None),
    };
    let problem = loaded.located(key, error.diagnostic().into());
    Error::refused(match fix {
        Some(fix) => problem.fix(fix),
        None => problem,
    })
}

fn open_kind(data: &phalanx_config::DataConfig, vocab: usize) -> Result<Samples, DataError> {
    // Configurations without a path were refused where one is needed.
    let path = data.path.clone().unwrap_or_default();
    let corpus: Arc<dyn Corpus> = match data.kind {
        DataKind::Synthetic => Arc::new(MarkovCorpus::new(data.seed, vocab, SYNTHETIC_TOKENS)?),
        DataKind::Text => Arc::new(TextFile::open(&path)?),
        DataKind::Tokens => Arc::new(TokenFile::open(&path, data.dtype, vocab)?),
        DataKind::Digits => return fitting(Arc::new(Digits::new(data.seed))),
        DataKind::Idx => return fitting(Arc::new(IdxImages::open(&path)?)),
    };
    check_vocabulary(&*corpus, vocab)?;
    Ok(Samples::Tokens(corpus))
}
