//! What a training is set up with, and what it tells.

/// What the backward pass recomputes instead of keeping it.
///
/// ```
/// use phalanx::Recompute;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.recompute(Recompute::Full)
/// # }
/// ```
#[doc(inline)]
pub use phalanx_autodiff::Recompute;
/// What went wrong: refused before it started, or failed on the way. It says where and what would
/// work, and holds the typed error behind it.
///
/// ```
/// use phalanx::{Error, Mlp, Table, Trainer};
///
/// let data = Table::new(4).input("x", vec![0.0; 4]).target("y", vec![0.0; 4]);
/// let trainer = Trainer::new(Mlp::regression(1, [], 1)).data(data).batch(4).mesh("dp=0");
/// let Err(error @ Error::Refused(_)) = trainer.run() else { panic!("no rank can train") };
/// assert!(error.cause::<phalanx::IrError>().is_some());
/// println!("{error}");
/// ```
#[doc(inline)]
pub use phalanx_error::Error;
#[doc(inline)]
pub use phalanx_error::{Problem, Remedy, Result};
/// What memory is used for, in the plan of a [`Report`](crate::Report).
///
/// ```
/// use phalanx::{Category, Report};
///
/// fn show(report: &Report) {
///     for category in Category::ALL {
///         println!("{:12} {:9} bytes", category.to_string(), report.bytes(category));
///     }
/// }
/// ```
#[doc(inline)]
pub use phalanx_script::Category;
/// The update rule.
///
/// ```
/// use phalanx::Optimizer;
///
/// let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 };
/// assert_ne!(adamw, Optimizer::adamw());
/// let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 };
/// assert_eq!(adam, Optimizer::adam());
/// assert_eq!(Optimizer::sgd(0.9), Optimizer::Sgd { momentum: 0.9, nesterov: false, decay: 0.0 });
/// ```
#[doc(inline)]
pub use phalanx_script::Optimizer;
/// The loss of a step before its update, and the norm of its gradient before clipping.
///
/// ```
/// use phalanx::StepResult;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.on_step(|taken| {
///     let StepResult { loss, grad_norm, .. } = taken.result;
///     println!("loss {loss:.3}, gradient {grad_norm:.3}");
/// })
/// # }
/// ```
#[doc(inline)]
pub use phalanx_session::StepResult;
/// A step that was taken: its number, result, learning rate and time.
///
/// ```
/// use phalanx::TrainedStep;
/// # fn set<'a>(trainer: phalanx::Trainer<'a>) -> phalanx::Trainer<'a> {
/// trainer.on_step(|taken: &TrainedStep| println!("{} took {:?}", taken.step, taken.time))
/// # }
/// ```
#[doc(inline)]
pub use phalanx_train::steps::TrainedStep;
