//! Refuses sizes that cannot work before any program is built, by name and with what would work.

use phalanx_ir::IrError;
use phalanx_ir::ops::AttentionKind;

/// Larger than any tensor in memory, and small enough that products of sizes do not overflow.
const MOST_ELEMENTS: usize = 1 << 48;

/// The checks of one model.
pub(crate) struct Check {
    pub(crate) model: &'static str,
}

impl Check {
    /// Every size is at least 1.
    pub(crate) fn sizes(&self, sizes: &[(&str, usize)]) -> Result<(), IrError> {
        for (name, size) in sizes {
            self.that(*size > 0, || format!("{name} = 0: it must be at least 1"))?;
        }
        Ok(())
    }

    /// A tensor of these dims could exist.
    pub(crate) fn tensor(&self, dims: &[(&str, usize)]) -> Result<(), IrError> {
        let elements = dims.iter().try_fold(1usize, |n, (_, d)| n.checked_mul(*d));
        self.that(elements.is_some_and(|n| n <= MOST_ELEMENTS), || {
            let factors: Vec<String> = dims.iter().map(|(n, d)| format!("{n} = {d}")).collect();
            let most = MOST_ELEMENTS.ilog2();
            format!(
                "{} multiply to more than 2^{most} elements: choose smaller ones",
                factors.join(" × ")
            )
        })
    }

    /// The scores of attention could exist, where they are stored.
    pub(crate) fn scores(
        &self,
        kind: AttentionKind,
        dims: &[(&str, usize)],
    ) -> Result<(), IrError> {
        match kind {
            AttentionKind::Flash => Ok(()),
            AttentionKind::Materialised => self.tensor(dims),
        }
    }

    /// `part` divides `whole`.
    pub(crate) fn divides(
        &self,
        (part_name, part): (&str, usize),
        (whole_name, whole): (&str, usize),
    ) -> Result<(), IrError> {
        self.that(whole.is_multiple_of(part), || {
            let works = |d: &usize| whole.is_multiple_of(*d);
            let below = (1..part).rev().find(works);
            let above = (part + 1..=whole).find(works);
            let near: Vec<String> = (below.into_iter().chain(above))
                .map(|d| format!("{part_name} = {d}"))
                .collect();
            format!(
                "{part_name} = {part} does not divide {whole_name} = {whole}; nearest that work: {}",
                near.join(" or ")
            )
        })
    }

    /// Heads consist of pairs.
    pub(crate) fn pairs(&self, head_dim: usize) -> Result<(), IrError> {
        self.that(head_dim.is_multiple_of(2), || {
            let near = match head_dim {
                1 => "nearest that works: 2".to_owned(),
                _ => format!("nearest that work: {} or {}", head_dim - 1, head_dim + 1),
            };
            format!(
                "head_dim = {head_dim} is odd, but rotary positions rotate pairs of elements; \
                {near}"
            )
        })
    }

    /// A sequence fits into the context.
    pub(crate) fn context(&self, seq: usize, context: usize) -> Result<(), IrError> {
        self.that(seq <= context, || {
            format!(
                "sequences of {seq} tokens are longer than context = {context}; \
                 shorten them, or build the model with context = {seq}"
            )
        })
    }

    /// A number is finite and above zero.
    pub(crate) fn positive(&self, name: &str, value: f64) -> Result<(), IrError> {
        self.that(value.is_finite() && value > 0.0, || {
            format!("{name} = {value}: it must be a finite number above 0")
        })
    }

    /// A dropout probability.
    pub(crate) fn dropout(&self, p: f64) -> Result<(), IrError> {
        self.that((0.0..1.0).contains(&p), || {
            format!("dropout = {p}: it must be at least 0 and below 1")
        })
    }

    pub(crate) fn that(&self, holds: bool, what: impl FnOnce() -> String) -> Result<(), IrError> {
        match holds {
            true => Ok(()),
            false => Err(IrError::Model { model: self.model.to_owned(), what: what() }),
        }
    }
}
