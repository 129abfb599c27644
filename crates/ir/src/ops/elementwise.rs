//! Ops that compute each element from the elements at the same place.
//!
//! Operands with fewer dims align at the right and are repeated along the leading dims, so a bias
//! or a scalar needs no explicit broadcast.

mod binary;
mod choice;
mod constant;
mod unary;

use super::{Op, OpDef, Shaped, arity};
use crate::attr::{AttrReader, Attrs};
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

pub use binary::{Binary, BinaryKind};
pub use choice::{Compare, CompareKind, Select};
pub use constant::{Cast, Fill, Scale, Shift};
pub use unary::{Unary, UnaryGrad, UnaryKind};

/// What an elementwise op must define; the rest of [`OpDef`] follows: it aligns all dims, works on
/// packed units like on tensors, and can accumulate into its result. Ops for which one of these is
/// not true ([`Compare`], [`Select`], [`Fill`]) implement [`OpDef`] themselves.
pub(super) trait Elementwise {
    /// How many operands it usually takes.
    const ARITY: usize;

    /// How many operands this one takes at least.
    fn arity(&self) -> usize {
        Self::ARITY
    }

    /// Whether it takes this many operands: some ops have one that may be left out.
    fn takes(&self, operands: usize) -> bool {
        operands == self.arity()
    }

    /// See [`OpDef::name`].
    fn name(&self) -> &'static str;

    /// See [`OpDef::attrs`].
    fn attrs(&self) -> Attrs {
        Attrs::new()
    }

    /// Result element types and shapes for the right number of operands.
    fn results(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        Ok(vec![same(ins)?])
    }

    /// The sets of operands that it is jointly linear in.
    fn linear(&self) -> &'static [&'static [usize]] {
        &[]
    }

    /// See [`OpDef::vjp`].
    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError>;

    /// See [`OpDef::in_place`].
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    /// See [`OpDef::accumulates`].
    fn accumulates(&self) -> bool {
        true
    }

    /// See [`OpDef::is_update`].
    fn is_update(&self) -> bool {
        false
    }
}

impl<T: Elementwise> OpDef for T {
    fn name(&self) -> &'static str {
        Elementwise::name(self)
    }

    fn attrs(&self) -> Attrs {
        Elementwise::attrs(self)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        if !self.takes(ins.len()) {
            arity(ins, self.arity())?;
        }
        self.results(ins)
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        Rule::elementwise(ins, outs).linear(self.linear())
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Elementwise::vjp(self, g)
    }

    fn accepts_units(&self) -> bool {
        true
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        Elementwise::in_place(self)
    }

    fn accumulates(&self, _result: usize) -> bool {
        Elementwise::accumulates(self)
    }

    fn is_update(&self) -> bool {
        Elementwise::is_update(self)
    }
}

/// Reads the ops of this family, most of whose names are their kinds.
pub(super) fn read(name: &str, attrs: &mut AttrReader) -> Option<Result<Op, String>> {
    (unary::read(name).or_else(|| binary::read(name)).or_else(|| choice::read(name)).map(Ok))
        .or_else(|| constant::read(name, attrs))
}

/// An enum of functions, each with its name in program text.
macro_rules! kinds {
    ($(#[$meta:meta])* $kind:ident: $text:ty {
        $($(#[$doc:meta])* $variant:ident = $name:expr,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[allow(missing_docs, reason = "the names are the functions")]
        pub enum $kind { $($(#[$doc])* $variant),* }

        impl $kind {
            /// Every kind.
            pub const ALL: [$kind; [$($kind::$variant),*].len()] = [$($kind::$variant),*];

            const fn text(self) -> $text {
                match self { $($kind::$variant => $name),* }
            }
        }
    };
}
use kinds;

/// The element type and shape of an op whose operands must agree, the first being the largest.
fn same(ins: &[&TensorType]) -> Result<Shaped, String> {
    let first = ins[0];
    for other in &ins[1..] {
        if other.dtype != first.dtype || !first.shape.ends_with(&other.shape) {
            return Err(format!(
                "operands are {first} and {other}; element types must be equal and the second \
                 shape a suffix of the first (cast, reshape or swap them)"
            ));
        }
    }
    Ok((first.dtype, first.shape.clone()))
}
