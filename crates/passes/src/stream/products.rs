//! Products whose operands come block by block: SUMMA's three products, and gathers of sequences that
//! run beside the products which read them.
//!
//! A product along one of its letters is a sum or a row of smaller products. Where an operand is
//! gathered along the letter, each step broadcasts one block of it instead; where the result is
//! scattered along it, each step sums its block on the rank that keeps it. Operands that are there
//! whole are cut. So two blocks are there at a time (the next one is on its way), not the whole; the
//! bytes are the same.
//!
//! Products that read the same gathered value, or are added to each other, go through their blocks
//! together. Sums over steps are in the accumulator type and rounded once.

use phalanx_ir::ops::{Cast, Collective, CollectiveKind, Fill, Matmul};
use phalanx_ir::{Axis, Graph, Op, Phase, Program, Rewriter, TensorType, ValueId};

use super::chains::{Chain, Fold, Operand, Product, clusters};
use super::order::{Item, ordered};

/// Turns products whose operands or results are gathered or scattered over these axes into steps.
pub(super) fn stream_products(program: &Program, axes: &[Axis]) -> Program {
    let graph = Graph::new(program);
    let clusters = clusters(program, &graph, axes);
    let order = ordered(program, &graph, &clusters).expect("clusters were found to be possible");
    let mut rewriter = Rewriter::new(program);
    for item in order {
        match item {
            Item::Keep(index) => rewriter.keep(index),
            Item::Cluster(number) => {
                let chains = &clusters[number];
                let phase = program.instrs()[chains[0].last()].phase;
                Cluster { program, chains, phase }.emit(&mut rewriter);
            }
        }
    }
    rewriter.finish()
}

/// Chains of products that go through their blocks together.
struct Cluster<'a> {
    program: &'a Program,
    chains: &'a [Chain],
    phase: Phase,
}

/// What a chain has computed so far.
#[derive(Clone, Copy)]
enum State {
    Nothing,
    Value(ValueId),
}

impl Cluster<'_> {
    fn emit(&self, to: &mut Rewriter<'_>) {
        let mut states: Vec<State> = self.chains.iter().map(|c| self.first(to, c)).collect();
        // Blocks of padding alone come last, and nobody needs them.
        for step in 0..self.chains[0].steps {
            let mut blocks = Blocks { cluster: self, step, made: Vec::new() };
            // All blocks of a step come first, so that those of the next one can be on their way.
            for product in self.chains.iter().flat_map(|chain| &chain.products) {
                product.operands.iter().for_each(|operand| blocks.bring(to, operand));
            }
            for (chain, state) in self.chains.iter().zip(&mut states) {
                *state = State::Value(blocks.advance(to, chain, *state));
            }
        }
        for (chain, state) in self.chains.iter().zip(states) {
            let State::Value(value) = state else { continue };
            self.bind(to, chain, value);
        }
    }

    /// What the steps of a chain start from.
    fn first(&self, to: &mut Rewriter<'_>, chain: &Chain) -> State {
        let result = match chain.fold {
            Fold::Add => {
                let Some(addend) = chain.addend else { return State::Nothing };
                let wide = self.wide(self.program.ty(addend));
                return State::Value(self.cast(to, addend, wide));
            }
            Fold::Scatter { at, .. } => self.program.instrs()[at].outputs[0],
            Fold::Place { .. } => chain.result(self.program),
        };
        State::Value(self.zeros(to, self.program.ty(result)))
    }

    fn zeros(&self, to: &mut Rewriter<'_>, ty: &TensorType) -> ValueId {
        let sums: Vec<Axis> = ty.layout.partial().iter().copied().collect();
        let whole = ty.layout.with_partial(Default::default());
        let whole = ty.with_layout(whole.expect("a value may be no sum"));
        let fill = Fill { dtype: ty.dtype, shape: ty.shape.clone(), value: 0.0 };
        let zeros = to.add(fill, &[], vec![whole], self.phase)[0];
        if sums.is_empty() {
            return zeros;
        }
        let summand = Collective::new(CollectiveKind::ToPartial, sums);
        to.add(summand, &[zeros], vec![ty.clone()], self.phase)[0]
    }

    fn bind(&self, to: &mut Rewriter<'_>, chain: &Chain, value: ValueId) {
        let result = match chain.fold {
            Fold::Scatter { at, .. } => self.program.instrs()[at].outputs[0],
            Fold::Add | Fold::Place { .. } => chain.result(self.program),
        };
        let ty = self.program.ty(result).clone();
        let value = match to.ty(value).dtype == ty.dtype {
            true => value,
            false => to.add(Cast { to: ty.dtype }, &[value], vec![ty], self.phase)[0],
        };
        to.bind(result, value);
    }

    fn wide(&self, ty: &TensorType) -> TensorType {
        ty.with_dtype(ty.dtype.accumulator())
    }

    fn cast(&self, to: &mut Rewriter<'_>, old: ValueId, ty: TensorType) -> ValueId {
        let value = to.resolve(old);
        match self.program.ty(old).dtype == ty.dtype {
            true => value,
            false => to.add(Cast { to: ty.dtype }, &[value], vec![ty], self.phase)[0],
        }
    }
}

/// The blocks of one step.
struct Blocks<'a> {
    cluster: &'a Cluster<'a>,
    step: usize,
    made: Vec<(Operand, ValueId)>,
}

impl Blocks<'_> {
    /// Brings a block of an operand here, once.
    fn bring(&mut self, to: &mut Rewriter<'_>, operand: &Operand) {
        if self.made.iter().any(|(made, _)| made == operand) {
            return;
        }
        let block = self.step;
        let (value, kind, axes) = match operand {
            Operand::Free(_) => return,
            Operand::Gathered { own, dim, axes, .. } => {
                (*own, CollectiveKind::BroadcastBlock { dim: *dim, block }, axes.clone())
            }
            Operand::Whole { value, dim, of } => {
                (*value, CollectiveKind::TakeBlock { dim: *dim, block, of: *of }, vec![])
            }
        };
        let value = to.resolve(value);
        let collective = Collective::new(kind, axes);
        let ty = self.typed(&collective, to.ty(value));
        let made = to.add(collective, &[value], vec![ty], self.cluster.phase)[0];
        self.made.push((operand.clone(), made));
    }

    fn advance(&self, to: &mut Rewriter<'_>, chain: &Chain, state: State) -> ValueId {
        let mut sum = match (&chain.fold, state, chain.addend) {
            (Fold::Add, State::Value(value), _) => Some(value),
            (Fold::Add, State::Nothing, _) | (_, _, None) => None,
            (Fold::Scatter { dim, .. } | Fold::Place { dim }, _, Some(addend)) => {
                let take =
                    CollectiveKind::TakeBlock { dim: *dim, block: self.step, of: chain.blocks };
                let (take, value) = (Collective::new(take, vec![]), to.resolve(addend));
                let ty = self.typed(&take, to.ty(value));
                Some(to.add(take, &[value], vec![ty], self.cluster.phase)[0])
            }
        };
        for product in &chain.products {
            sum = Some(self.multiply(to, chain, product, sum));
        }
        let (Some(sum), State::Value(rest)) = (sum, state) else {
            return sum.expect("a chain has a product");
        };
        let (kind, axes) = match &chain.fold {
            Fold::Add => return sum,
            Fold::Scatter { dim, axes, .. } => {
                (CollectiveKind::ReduceBlock { dim: *dim, block: self.step }, axes.clone())
            }
            Fold::Place { dim } => {
                let (dim, block) = (*dim, self.step);
                (CollectiveKind::PutBlock { dim, block, of: chain.blocks }, vec![])
            }
        };
        let ty = to.ty(rest).clone();
        let into = Collective::new(kind, axes);
        to.add(into, &[sum, rest], vec![ty], self.cluster.phase)[0]
    }

    /// One product of this step's blocks.
    fn multiply(
        &self,
        to: &mut Rewriter<'_>,
        chain: &Chain,
        product: &Product,
        sum: Option<ValueId>,
    ) -> ValueId {
        let instr = &self.cluster.program.instrs()[product.at];
        let Op::Matmul(old) = &instr.op else { panic!("a product is a matmul") };
        let result = self.cluster.program.ty(instr.outputs[0]);
        let ty = match &chain.fold {
            Fold::Add => self.cluster.wide(result),
            Fold::Scatter { dim, .. } | Fold::Place { dim } => {
                let kind =
                    CollectiveKind::TakeBlock { dim: *dim, block: self.step, of: chain.blocks };
                self.typed(&Collective::new(kind, vec![]), result)
            }
        };
        let mut operands: Vec<ValueId> =
            product.operands.iter().map(|operand| self.value(to, operand)).collect();
        operands.extend(sum);
        let op = Matmul { spec: old.spec.clone(), out: ty.dtype, add: sum.is_some() };
        to.add(op, &operands, vec![ty], self.cluster.phase)[0]
    }

    fn value(&self, to: &Rewriter<'_>, operand: &Operand) -> ValueId {
        match operand {
            Operand::Free(value) => to.resolve(*value),
            _ => {
                let made = self.made.iter().find(|(made, _)| made == operand);
                made.expect("blocks of a step were brought").1
            }
        }
    }

    fn typed(&self, collective: &Collective, ty: &TensorType) -> TensorType {
        let result = collective.result(ty, self.cluster.program.mesh());
        result.expect("blocks were found to be possible")
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::{Axis, Program, verify};

    use crate::testing::check_on;

    fn read(lines: &str) -> Program {
        crate::testing::read(&format!("mesh tp=2\nprogram p {{\n{lines}\n}}\n"))
    }

    fn over(program: &Program, axes: &[&str]) -> Program {
        let axes: Vec<Axis> = axes.iter().map(|axis| Axis::new(axis).unwrap()).collect();
        crate::dead_code(&crate::stream(program, &axes))
    }

    fn over_square(program: &Program) -> Program {
        over(program, &["r", "c"])
    }

    /// F: blocks of both operands, and a sum in the accumulator type.
    #[test]
    fn a_product_of_gathered_operands_is_a_sum_over_blocks() {
        check_on(
            "r=2 c=2",
            "
            x: boundary bf16[8,4]{0:r 1:c}
            w: param bf16[4,12]{0:r 1:c}
            %1 = all_gather<c>(x, dim=1) : bf16[8,4]{0:r}
            %2 = all_gather<r>(w, dim=0) : bf16[4,12]{1:c}
            %3 = matmul(%1, %2, spec=mk,ke->me, out=bf16, add=false) : bf16[8,12]{0:r 1:c}
            return y: boundary %3",
            over_square,
            "
            %1 = broadcast_block<c>(x, dim=1, block=0) : bf16[8,2]{0:r}
            %2 = broadcast_block<r>(w, dim=0, block=0) : bf16[2,12]{1:c}
            %4 = matmul(%1, %2, spec=mk,ke->me, out=f32, add=false) : f32[8,12]{0:r 1:c}
            %5 = broadcast_block<c>(x, dim=1, block=1) : bf16[8,2]{0:r}
            %6 = broadcast_block<r>(w, dim=0, block=1) : bf16[2,12]{1:c}
            %7 = matmul(%5, %6, %4, spec=mk,ke->me, out=f32, add=true) : f32[8,12]{0:r 1:c}
            %3 = cast(%7, to=bf16) : bf16[8,12]{0:r 1:c}",
        );
    }

    /// B: each block of the result is summed on the rank that keeps it. The last block has one column.
    #[test]
    fn a_scattered_product_is_summed_block_by_block() {
        check_on(
            "r=2 c=2",
            "
            d: boundary f32[8,12]{0:r 1:c}
            w: param f32[3~4,12]{0:r 1:c}
            %1 = all_gather<r>(w, dim=0) : f32[3~4,12]{1:c}
            %2 = matmul(d, %1, spec=me,ke->mk, out=f32, add=false) : f32[8,3~4]{0:r P:c}
            %3 = reduce_scatter<c>(%2, dim=1) : f32[8,3~4]{0:r 1:c}
            return y: boundary %3",
            over_square,
            "
            %1 = fill(dtype=f32, shape=8x3, value=0) : f32[8,3~4]{0:r 1:c}
            %2 = broadcast_block<r>(w, dim=0, block=0) : f32[2,12]{1:c}
            %4 = matmul(d, %2, spec=me,ke->mk, out=f32, add=false) : f32[8,2]{0:r P:c}
            %5 = reduce_block<c>(%4, %1, dim=1, block=0) : f32[8,3~4]{0:r 1:c}
            %6 = broadcast_block<r>(w, dim=0, block=1) : f32[1~2,12]{1:c}
            %7 = matmul(d, %6, spec=me,ke->mk, out=f32, add=false) : f32[8,1~2]{0:r P:c}
            %3 = reduce_block<c>(%7, %5, dim=1, block=1) : f32[8,3~4]{0:r 1:c}",
        );
    }

    /// A gathered sequence: two products go through it together, although something reads the first.
    #[test]
    fn products_of_one_gathered_value_go_together() {
        check_on(
            "tp=2",
            "
            x: boundary f32[2,4,6]{1:tp}
            v: param f32[6,8]{1:tp}
            w: param f32[6,8]{1:tp}
            %1 = all_gather<tp>(x, dim=1) : f32[2,4,6]
            %2 = matmul(%1, v, spec=bsk,ke->bse, out=f32, add=false) : f32[2,4,8]{2:tp}
            %3 = tanh(%2) : f32[2,4,8]{2:tp}
            %4 = matmul(%1, w, spec=bsk,ke->bse, out=f32, add=false) : f32[2,4,8]{2:tp}
            %5 = mul(%3, %4) : f32[2,4,8]{2:tp}
            return y: boundary %5",
            |program| over(program, &["tp"]),
            "
            %1 = fill(dtype=f32, shape=2x4x8, value=0) : f32[2,4,8]{2:tp}
            %6 = fill(dtype=f32, shape=2x4x8, value=0) : f32[2,4,8]{2:tp}
            %7 = broadcast_block<tp>(x, dim=1, block=0) : f32[2,2,6]
            %8 = matmul(%7, v, spec=bsk,ke->bse, out=f32, add=false) : f32[2,2,8]{2:tp}
            %9 = put_block(%8, %1, dim=1, block=0, of=2) : f32[2,4,8]{2:tp}
            %10 = matmul(%7, w, spec=bsk,ke->bse, out=f32, add=false) : f32[2,2,8]{2:tp}
            %11 = put_block(%10, %6, dim=1, block=0, of=2) : f32[2,4,8]{2:tp}
            %12 = broadcast_block<tp>(x, dim=1, block=1) : f32[2,2,6]
            %13 = matmul(%12, v, spec=bsk,ke->bse, out=f32, add=false) : f32[2,2,8]{2:tp}
            %2 = put_block(%13, %9, dim=1, block=1, of=2) : f32[2,4,8]{2:tp}
            %14 = matmul(%12, w, spec=bsk,ke->bse, out=f32, add=false) : f32[2,2,8]{2:tp}
            %4 = put_block(%14, %11, dim=1, block=1, of=2) : f32[2,4,8]{2:tp}
            %3 = tanh(%2) : f32[2,4,8]{2:tp}
            %5 = mul(%3, %4) : f32[2,4,8]{2:tp}",
        );
    }

    /// Two products read one gathered value, and the second also reads the first one's result: it starts
    /// when that is whole.
    #[test]
    fn a_product_of_anothers_result_does_not_go_with_it() {
        let result = over(
            &read(
                "
            x: boundary f32[4,6]{0:tp}
            w: param f32[6,8]{1:tp}
            %1 = all_gather<tp>(x, dim=0) : f32[4,6]
            %2 = matmul(%1, w, spec=sk,ke->se, out=f32, add=false) : f32[4,8]{1:tp}
            %3 = matmul(%1, %2, spec=sk,se->ke, out=f32, add=false) : f32[6,8]{1:tp}
            return y: boundary %3",
            ),
            &["tp"],
        );
        verify(&result).unwrap();
        // The gathered value would be brought here twice, so it stays.
        assert!(result.to_string().contains("all_gather<tp>(x, dim=0)"), "{result}");
    }

    /// Two pairs of products, each with its own gathered value: the second of one pair reads what the
    /// first of the other makes, and the other way round. They cannot all go together.
    #[test]
    fn clusters_that_would_need_each_other_do_not_form() {
        let text = "
            x: boundary f32[4,6]{0:tp}
            z: boundary f32[4,6]{0:tp}
            w: param f32[6,6]
            %1 = all_gather<tp>(x, dim=0) : f32[4,6]
            %2 = all_gather<tp>(z, dim=0) : f32[4,6]
            %3 = matmul(%1, w, spec=sk,ke->se, out=f32, add=false) : f32[4,6]
            %4 = matmul(%2, w, spec=sk,ke->se, out=f32, add=false) : f32[4,6]
            %5 = tanh(%3) : f32[4,6]
            %6 = tanh(%4) : f32[4,6]
            %7 = matmul(%2, %5, spec=sk,se->ke, out=f32, add=false) : f32[6,6]
            %8 = matmul(%1, %6, spec=sk,se->ke, out=f32, add=false) : f32[6,6]
            return y: boundary %7
            return u: boundary %8";
        let result = over(&read(text), &["tp"]);
        verify(&result).unwrap();
        let gathers = result.to_string().matches("all_gather").count();
        assert_eq!(gathers, 1, "one pair goes together:\n{result}");
    }

    /// A cluster whose operand is made after its first result is read, by another cluster that comes late.
    #[test]
    fn a_cluster_waits_for_the_one_that_it_reads() {
        let text = "
            x: boundary f32[4,6]{0:tp}
            z: boundary f32[4,6]{0:tp}
            w: param f32[6,6]
            %1 = all_gather<tp>(x, dim=0) : f32[4,6]
            %2 = all_gather<tp>(z, dim=0) : f32[4,6]
            %3 = matmul(%1, w, spec=sk,ke->se, out=f32, add=false) : f32[4,6]
            %4 = matmul(%2, w, spec=sk,ke->se, out=f32, add=false) : f32[4,6]
            %5 = tanh(%3) : f32[4,6]
            %6 = matmul(%1, %4, spec=sk,se->ke, out=f32, add=false) : f32[6,6]
            %7 = matmul(%2, w, spec=sk,ke->se, out=f32, add=false) : f32[4,6]
            return y: boundary %5
            return u: boundary %6
            return v: boundary %7";
        let result = over(&read(text), &["tp"]);
        verify(&result).unwrap();
        assert!(!result.to_string().contains("all_gather"), "{result}");
    }
}
