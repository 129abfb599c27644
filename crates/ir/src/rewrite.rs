//! Copying a program, or a part of it, while changing it.
//!
//! A rewrite mostly uses values of the old program. It walks the old instructions and decides for
//! each: [`Rewriter::keep`] it, drop it (by not keeping it), [`Rewriter::emit`] another instruction
//! that computes some of its results, or [`Rewriter::replace`] a result by another value. The
//! rewriter numbers the new values, so that the result is in canonical form.

use crate::ops::Op;
use crate::program::{Phase, Port, Program, Role, ValueId};
use crate::types::TensorType;

/// Builds a new program from an old one.
///
/// Instructions must be kept or emitted after those that compute their operands; otherwise the
/// rewrite has a bug, and the rewriter panics with the value's number.
#[derive(Debug)]
pub struct Rewriter<'a> {
    old: &'a Program,
    new: Program,
    /// For each old value: the new value that its readers read.
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

    /// Starts a program whose inputs have other types. If a reader needs the old type, an
    /// instruction that computes it from the input must be emitted first.
    pub fn with_types(old: &'a Program, ty: impl Fn(&Port) -> TensorType) -> Self {
        Self::start(old, |port| Some(ty(port)))
    }

    /// Adds an input of this name that replaces an old value. All inputs must be added before the
    /// first instruction.
    pub fn input(&mut self, name: &str, role: Role, value: ValueId) {
        let ty = self.old.ty(value).clone();
        self.map[value.index()] = Some(self.new.input(name, role, ty));
    }

    /// Appends the old instruction at this index as it is.
    pub fn keep(&mut self, index: usize) {
        self.keep_in(self.old.instrs()[index].phase, index);
    }

    /// Appends the old instruction at this index in another phase. Values that an input already
    /// replaces still come from the input: a recomputed instruction may also compute a result that
    /// was kept.
    pub fn keep_in(&mut self, phase: Phase, index: usize) {
        let instr = &self.old.instrs()[index];
        let made = self.push(instr.op.clone(), &instr.inputs, &instr.outputs, phase);
        for (old, new) in instr.outputs.iter().zip(made) {
            self.map[old.index()].get_or_insert(new);
        }
    }

    /// Appends an instruction that reads the new versions of old values and computes the old values
    /// `results`, with their types.
    pub fn emit(
        &mut self,
        op: impl Into<Op>,
        inputs: &[ValueId],
        results: &[ValueId],
        phase: Phase,
    ) {
        let made = self.push(op.into(), inputs, results, phase);
        for (old, new) in results.iter().zip(made) {
            self.map[old.index()] = Some(new);
        }
    }

    /// Appends an instruction over *new* values, with results of these types, which are new too.
    pub fn add(
        &mut self,
        op: impl Into<Op>,
        inputs: &[ValueId],
        types: Vec<TensorType>,
        phase: Phase,
    ) -> Vec<ValueId> {
        self.new.push_unchecked(op.into(), inputs, types, phase)
    }

    /// The type of a new value.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        self.new.ty(value)
    }

    /// Makes readers of the old `value` read a new one.
    pub fn bind(&mut self, value: ValueId, new: ValueId) {
        self.map[value.index()] = Some(new);
    }

    /// Makes readers of `value` read `by` instead.
    pub fn replace(&mut self, value: ValueId, by: ValueId) {
        self.map[value.index()] = Some(self.resolve(by));
    }

    /// The new value that readers of an old value read.
    ///
    /// # Panics
    /// If nothing has computed it yet.
    pub fn resolve(&self, value: ValueId) -> ValueId {
        self.map[value.index()].unwrap_or_else(|| {
            panic!("in `{}` a rewrite reads %{} before it is computed", self.old.name, value.0)
        })
    }

    /// The new program, with the old outputs.
    pub fn finish(self) -> Program {
        let outputs = self.old.outputs();
        self.finish_with(outputs)
    }

    /// The new program, with these outputs, given as old values.
    pub fn finish_with(mut self, outputs: &[Port]) -> Program {
        for port in outputs {
            let value = self.resolve(port.value);
            self.new.output_like(port, value);
        }
        self.new
    }

    /// Starts a program with those inputs that have a type.
    fn start(old: &'a Program, ty: impl Fn(&Port) -> Option<TensorType>) -> Self {
        let mut new = Program::new(old.name.clone(), old.mesh().clone());
        let mut map = vec![None; old.values().len()];
        for port in old.inputs() {
            map[port.value.index()] = ty(port).map(|ty| new.input_like(port, ty));
        }
        Self { old, new, map }
    }

    fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        results: &[ValueId],
        phase: Phase,
    ) -> Vec<ValueId> {
        let inputs: Vec<ValueId> = inputs.iter().map(|&v| self.resolve(v)).collect();
        let types = results.iter().map(|&v| self.old.ty(v).clone()).collect();
        self.new.push_unchecked(op, &inputs, types, phase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, DType};

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
    fn what_an_input_stands_for_is_read_there_although_it_is_made_again() {
        let old = chain();
        let mut rewriter = Rewriter::new(&old);
        let relu = &old.instrs()[0];
        rewriter.input("kept", Role::Residual, relu.outputs[0]);
        rewriter.keep_in(Phase::B, 0);
        rewriter.keep_in(Phase::B, 1);
        let new = rewriter.finish();
        assert_eq!(new.instrs()[0].phase, Phase::B);
        assert_eq!(new.instrs()[1].inputs, [new.input_named("kept").unwrap().value]);
        assert_eq!(new, new.canonical());
    }

    #[test]
    #[should_panic(expected = "reads %1 before it is computed")]
    fn a_dropped_value_that_is_still_read_is_a_bug() {
        let old = chain();
        Rewriter::new(&old).keep(1);
    }
}
