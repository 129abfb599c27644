//! Tensor code of experts: choices, places, and rows that go there and come back.

use super::Tensor;
use crate::ops::{Assign, Combine, Deal, Dispatch, GroupedMatmul, Histogram, Queue, TopK};

impl<'b> Tensor<'b> {
    /// The `k` largest elements of each row, and their indices.
    pub fn top_k(self, k: usize) -> (Tensor<'b>, Tensor<'b>) {
        let results = self.builder.apply_all(TopK { k }, &[self]);
        (results[0], results[1])
    }

    /// A slot for each (token, choice) of these indices of experts; choices that do not stand get
    /// none.
    pub fn assign(self, experts: usize, capacity: usize, stands: Option<Tensor<'b>>) -> Tensor<'b> {
        let operands: Vec<Tensor<'b>> = [Some(self), stands].into_iter().flatten().collect();
        self.builder.apply(Assign { experts, capacity }, &operands)
    }

    /// The rows of tokens, packed by the experts of each of these parts, with a slot for each (token,
    /// choice) of these indices; and how many rows each expert has. Choices that do not stand get none.
    pub fn queue(
        self,
        index: Tensor<'b>,
        of: Queue,
        stands: Option<Tensor<'b>>,
    ) -> (Tensor<'b>, Tensor<'b>, Tensor<'b>) {
        let operands: Vec<Tensor<'b>> = [Some(index), stands].into_iter().flatten().collect();
        let results = self.builder.apply_all(of, &operands);
        (self.dispatch(results[0], of.parts, of.room), results[0], results[1])
    }

    /// Packed rows times the matrices of their experts.
    pub fn grouped_matmul(self, weights: Tensor<'b>, counts: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(GroupedMatmul { transposed: false }, &[self, weights, counts])
    }

    /// The same numbers with the places of experts that are distributed to ranks, where there were experts.
    pub fn deal(self, of: Deal) -> Tensor<'b> {
        self.builder.apply(of, &[self])
    }

    /// How often each number below `size` comes in each group, after division by `per`.
    pub fn histogram(self, size: usize, per: usize, out: crate::DType) -> Tensor<'b> {
        self.builder.apply(Histogram { size, per, out }, &[self])
    }

    /// The rows of tokens at their slots: `[experts, …, capacity, d]`.
    pub fn dispatch(self, slot: Tensor<'b>, experts: usize, capacity: usize) -> Tensor<'b> {
        self.builder.apply(Dispatch { experts, capacity }, &[self, slot])
    }

    /// The sum of the rows at each token's slots, times its gates.
    pub fn combine(self, slot: Tensor<'b>, gates: Tensor<'b>) -> Tensor<'b> {
        self.builder.apply(Combine, &[self, slot, gates])
    }
}
