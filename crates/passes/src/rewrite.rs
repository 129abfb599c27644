//! Copying a program while changing it.
//!
//! A pass speaks only of values of the old program. It walks the old instructions and decides for
//! each: [`Rewriter::keep`] it, drop it (by not keeping it), [`Rewriter::emit`] another
//! instruction that makes some of its results, or [`Rewriter::replace`] a result by another value.
//! The rewriter numbers the new values, so that the result is in canonical form.

use phalanx_ir::{Op, Phase, Port, Program, TensorType, ValueId};

/// A new program that grows out of an old one.
///
/// Instructions must be kept or emitted after those that make their operands; a pass that breaks
/// this has a bug, and the rewriter panics with the value's number.
#[derive(Debug)]
pub struct Rewriter<'a> {
    old: &'a Program,
    new: Program,
    /// For each old value, what readers of it now read.
    map: Vec<Option<ValueId>>,
}

impl<'a> Rewriter<'a> {
    /// Starts a program of the same name, mesh and inputs.
    pub fn new(old: &'a Program) -> Self {
        Self::with_inputs(old, |_| true)
    }

    /// Starts a program with only those inputs that `keep` accepts.
    pub fn with_inputs(old: &'a Program, keep: impl Fn(&Port) -> bool) -> Self {
        Self::start(old, |port| keep(port).then(|| old.ty(port.value).clone()))
    }

    /// Starts a program whose inputs have other types. Where a reader needs the old one, an
    /// instruction that makes it from the input must be emitted first.
    pub fn with_types(old: &'a Program, ty: impl Fn(&Port) -> TensorType) -> Self {
        Self::start(old, |port| Some(ty(port)))
    }

    /// Starts a program with those inputs that have a type.
    fn start(old: &'a Program, ty: impl Fn(&Port) -> Option<TensorType>) -> Self {
        let mut new = Program::new(old.name.clone(), old.mesh().clone());
        let mut map = vec![None; old.values().len()];
        for port in old.inputs() {
            map[port.value.index()] =
                ty(port).map(|ty| new.input(port.name.clone(), port.role, ty));
        }
        Self { old, new, map }
    }

    /// Appends the old instruction at this index as it is.
    pub fn keep(&mut self, index: usize) {
        let instr = &self.old.instrs()[index];
        self.emit(instr.op.clone(), &instr.inputs, &instr.outputs, instr.phase);
    }

    /// Appends an instruction that reads what old values became and makes the old values
    /// `results`, with their types.
    pub fn emit(
        &mut self,
        op: impl Into<Op>,
        inputs: &[ValueId],
        results: &[ValueId],
        phase: Phase,
    ) {
        let inputs: Vec<ValueId> = inputs.iter().map(|&v| self.resolve(v)).collect();
        let types = results.iter().map(|&v| self.old.ty(v).clone()).collect();
        let made = self.new.push_unchecked(op.into(), &inputs, types, phase);
        for (old, new) in results.iter().zip(made) {
            self.map[old.index()] = Some(new);
        }
    }

    /// Makes readers of `value` read `by` instead.
    pub fn replace(&mut self, value: ValueId, by: ValueId) {
        self.map[value.index()] = Some(self.resolve(by));
    }

    /// The new value that readers of an old value read.
    ///
    /// # Panics
    /// If nothing has made it yet.
    pub fn resolve(&self, value: ValueId) -> ValueId {
        self.map[value.index()].unwrap_or_else(|| {
            panic!("in `{}` a rewrite reads %{} before anything makes it", self.old.name, value.0)
        })
    }

    /// The new program, with the old outputs.
    pub fn finish(mut self) -> Program {
        for port in self.old.outputs() {
            let value = self.resolve(port.value);
            self.new.output(port.name.clone(), port.role, value);
        }
        self.new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_ir::{Builder, DType};

    fn chain() -> Program {
        let b = Builder::new("chain", DType::F32);
        let x = b.boundary("x", [4]);
        b.output("y", x.relu().tanh());
        b.finish().unwrap()
    }

    #[test]
    fn keeping_everything_changes_nothing() {
        let old = chain();
        let mut rewriter = Rewriter::new(&old);
        (0..old.instrs().len()).for_each(|i| rewriter.keep(i));
        assert_eq!(rewriter.finish(), old);
    }

    #[test]
    fn a_replaced_value_leaves_its_readers() {
        let old = chain();
        let mut rewriter = Rewriter::new(&old);
        let relu = &old.instrs()[0];
        rewriter.replace(relu.outputs[0], relu.inputs[0]);
        rewriter.keep(1);
        let new = rewriter.finish();
        assert_eq!(new.instrs().len(), 1);
        assert_eq!(new.instrs()[0].inputs, [ValueId(0)]);
        assert_eq!(new, new.canonical());
    }

    #[test]
    #[should_panic(expected = "reads %1 before anything makes it")]
    fn a_dropped_value_that_is_still_read_is_a_bug() {
        let old = chain();
        Rewriter::new(&old).keep(1);
    }
}
