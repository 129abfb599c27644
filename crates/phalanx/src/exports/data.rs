//! Sources of tokens.

/// A source of tokens: yours, for example.
///
/// ```
/// use std::sync::Arc;
/// use phalanx::{Corpus, Data, DataError};
///
/// /// 0, 1, 2, …, 9, 0, 1, …
/// struct Digits;
///
/// impl Corpus for Digits {
///     fn len_tokens(&self) -> u64 { 1 << 20 }
///     fn vocab(&self) -> usize { 10 }
///     fn describe(&self) -> String { "digits in order".to_string() }
///
///     fn read(&self, at: u64, out: &mut [i32]) -> Result<(), DataError> {
///         for (token, position) in out.iter_mut().zip(at..) {
///             *token = (position % 10) as i32;
///         }
///         Ok(())
///     }
/// }
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.data(Data::Tokens(Arc::new(Digits)))
/// # }
/// ```
#[doc(inline)]
pub use phalanx_data::Corpus;
#[doc(inline)]
pub use phalanx_data::DataError;
/// Synthetic tokens whose entropy is known.
///
/// ```
/// use phalanx::{Corpus, MarkovCorpus};
///
/// let corpus = MarkovCorpus::new(0, 32, 1 << 20)?; // seed, vocabulary, tokens
/// assert_eq!(corpus.len_tokens(), 1 << 20);
/// # Ok::<(), phalanx::DataError>(())
/// ```
#[doc(inline)]
pub use phalanx_data::MarkovCorpus;
/// A file whose bytes are tokens.
///
/// ```no_run
/// use phalanx::{Data, TextFile};
///
/// let data: Data = TextFile::open("book.txt".as_ref())?.into(); // every byte is a token
/// # Ok::<(), phalanx::DataError>(())
/// ```
#[doc(inline)]
pub use phalanx_data::TextFile;
/// A file of token ids, as `data.kind = "tokens"` reads it.
///
/// ```no_run
/// use phalanx::{Data, TokenFile, TokenWidth};
///
/// // The width comes from the name, `.u16` or `.u32`, unless it is given.
/// let named: Data = TokenFile::open("book.u16".as_ref(), None, 50_257)?.into();
/// let given: Data = TokenFile::open("book.bin".as_ref(), Some(TokenWidth::U32), 50_257)?.into();
/// # Ok::<(), phalanx::DataError>(())
/// ```
#[doc(inline)]
pub use phalanx_data::{TokenFile, TokenWidth};
