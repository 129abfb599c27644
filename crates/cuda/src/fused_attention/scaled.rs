//! Causal attention as graphs: the values of all pairs of positions stay inside the fused kernel.

use phalanx_ir::DType;

use super::graph::{Element, Function, Graph, Lies, Over, Plan, TensorId, View};
use super::{AttentionLibrary, FusedShape};
use crate::error::CudaError;

/// A planned graph, its tensors in memory in the order of a call's operands, and its numbers.
pub(super) struct Attention {
    pub(super) plan: Plan,
    pub(super) tensors: Vec<TensorId>,
    pub(super) scalars: Vec<(TensorId, f32)>,
}

/// The views of a shape's tensors: batch, heads, positions, elements of a head.
struct Views {
    batch: i64,
    heads: i64,
    groups: i64,
    positions: i64,
    size: i64,
}

impl Views {
    fn rows(&self, heads: i64) -> View {
        let row = heads * self.size;
        let strides = [self.positions * row, self.size, row, 1];
        ([self.batch, heads, self.positions, self.size], strides)
    }

    fn transposed(&self, heads: i64) -> View {
        let row = heads * self.size;
        let strides = [self.positions * row, self.size, 1, row];
        ([self.batch, heads, self.size, self.positions], strides)
    }

    fn pairs(&self) -> View {
        let t = self.positions;
        ([self.batch, self.heads, t, t], [self.heads * t * t, t * t, t, 1])
    }

    fn turned_pairs(&self) -> View {
        let t = self.positions;
        ([self.batch, self.heads, t, t], [self.heads * t * t, t * t, 1, t])
    }

    fn per_row(&self) -> View {
        let t = self.positions;
        ([self.batch, self.heads, t, 1], [self.heads * t, t, 1, 1])
    }

    fn dense(&self) -> View {
        let (t, d) = (self.positions, self.size);
        ([self.batch, self.heads, t, d], [self.heads * t * d, t * d, d, 1])
    }
}

/// A graph with its numbers by value.
struct Build {
    graph: Graph,
    /// The type of queries, keys, values and probabilities.
    of: Element,
    views: Views,
    scale: f32,
    scalars: Vec<(TensorId, f32)>,
    /// From which proposal on, and bytes of workspace that were planned.
    limits: (usize, usize),
}

impl Build {
    fn new(library: &AttentionLibrary, (shape, from): (&FusedShape, usize)) -> Self {
        let FusedShape { batch, positions, heads, groups, size, .. } = *shape;
        let [batch, positions, heads, groups, size] =
            [batch, positions, heads, groups, size].map(|n| n as i64);
        Self {
            graph: Graph::new(library),
            of: if shape.of == DType::F16 { Element::F16 } else { Element::Bf16 },
            views: Views { batch, heads, groups, positions, size },
            scale: 1.0 / (size as f32).sqrt(),
            scalars: Vec::new(),
            limits: (from, shape.workspace()),
        }
    }

    fn memory(&mut self, of: Element, view: View) -> Result<TensorId, CudaError> {
        self.graph.tensor(of, view, Lies::InMemory)
    }

    fn inside(&mut self, of: Element, view: View) -> Result<TensorId, CudaError> {
        self.graph.tensor(of, view, Lies::Inside)
    }

    fn scalar(&mut self, value: f32) -> Result<TensorId, CudaError> {
        let tensor = self.graph.tensor(Element::F32, ([1; 4], [1; 4]), Lies::ByValue)?;
        self.scalars.push((tensor, value));
        Ok(tensor)
    }

    /// A value for each pair of positions.
    fn scores(&mut self) -> Result<TensorId, CudaError> {
        let view = self.views.pairs();
        self.inside(Element::F32, view)
    }

    fn unary(&mut self, function: Function, x: TensorId) -> Result<TensorId, CudaError> {
        let y = self.scores()?;
        self.graph.pointwise(function, [Some(x), None, None], y, None)?;
        Ok(y)
    }

    fn binary(
        &mut self,
        function: Function,
        x: TensorId,
        b: TensorId,
    ) -> Result<TensorId, CudaError> {
        let y = self.scores()?;
        self.graph.pointwise(function, [Some(x), Some(b), None], y, None)?;
        Ok(y)
    }

    /// Scores where the key is no later than the query, otherwise minus infinity.
    fn causal(&mut self, x: TensorId) -> Result<TensorId, CudaError> {
        let view = self.views.pairs();
        let (row, column) = (self.inside(Element::I32, view)?, self.inside(Element::I32, view)?);
        let seen = self.inside(Element::Bool, view)?;
        let never = self.scalar(f32::NEG_INFINITY)?;
        self.graph.pointwise(Function::Index, [Some(x), None, None], row, Some(2))?;
        self.graph.pointwise(Function::Index, [Some(x), None, None], column, Some(3))?;
        self.graph.pointwise(Function::NotLess, [Some(row), Some(column), None], seen, None)?;
        let y = self.scores()?;
        self.graph.pointwise(Function::Select, [Some(x), Some(never), Some(seen)], y, None)?;
        Ok(y)
    }

    /// The scaled scores of queries and transposed keys.
    fn scaled(&mut self, q: TensorId, k: TensorId) -> Result<TensorId, CudaError> {
        let raw = self.scores()?;
        self.graph.matmul(q, k, raw)?;
        let scale = self.scalar(self.scale)?;
        self.binary(Function::Multiply, raw, scale)
    }

    fn planned(
        self,
        library: &AttentionLibrary,
        tensors: Vec<TensorId>,
    ) -> Result<Option<Attention>, CudaError> {
        let plan = self.graph.plan(library, self.limits)?;
        Ok(plan.map(|plan| Attention { plan, tensors, scalars: self.scalars }))
    }
}

/// Scores, mask, softmax, product with v, and the log-sum-exp.
pub(super) fn forward(
    library: &AttentionLibrary,
    asked: (&FusedShape, usize),
) -> Result<Option<Attention>, CudaError> {
    let mut b = Build::new(library, asked);
    let (of, heads, groups) = (b.of, b.views.heads, b.views.groups);
    let (of_q, of_k, of_v) =
        (b.views.rows(heads), b.views.transposed(groups), b.views.rows(groups));
    let per_row = b.views.per_row();
    let (q, k, v) = (b.memory(of, of_q)?, b.memory(of, of_k)?, b.memory(of, of_v)?);
    let (o, lse) = (b.memory(of, of_q)?, b.memory(Element::F32, per_row)?);
    let scaled = b.scaled(q, k)?;
    let x = b.causal(scaled)?;
    let (top, sum, log) = (
        b.inside(Element::F32, per_row)?,
        b.inside(Element::F32, per_row)?,
        b.inside(Element::F32, per_row)?,
    );
    b.graph.reduce(Over::Largest, x, top)?;
    let shifted = b.binary(Function::Subtract, x, top)?;
    let e = b.unary(Function::Exp, shifted)?;
    b.graph.reduce(Over::Sum, e, sum)?;
    b.graph.pointwise(Function::Log, [Some(sum), None, None], log, None)?;
    b.graph.pointwise(Function::Add, [Some(top), Some(log), None], lse, None)?;
    let pairs = b.views.pairs();
    let p = b.inside(of, pairs)?;
    b.graph.pointwise(Function::Divide, [Some(e), Some(sum), None], p, None)?;
    b.graph.matmul(p, v, o)?;
    b.planned(library, vec![q, k, v, o, lse])
}

/// The gradients of queries, keys and values. There is no f32 sum of dq, which ranks of threads would
/// add to in any order: the library then forms dq in a fixed order, and needs a workspace for all
/// pairs of positions.
pub(super) fn backward(
    library: &AttentionLibrary,
    asked: (&FusedShape, usize),
) -> Result<Option<Attention>, CudaError> {
    let mut b = Build::new(library, asked);
    let (of, heads, groups) = (b.of, b.views.heads, b.views.groups);
    let (of_q, of_k, of_v) =
        (b.views.rows(heads), b.views.transposed(groups), b.views.rows(groups));
    let (per_row, dense, turned) = (b.views.per_row(), b.views.dense(), b.views.turned_pairs());
    let q = b.memory(of, of_q)?;
    let k = b.memory(of, of_k)?;
    let v = b.memory(of, of_k)?;
    let o = b.memory(of, of_q)?;
    let lse = b.memory(Element::F32, per_row)?;
    let dy = b.memory(of, of_q)?;
    let dq = b.memory(of, of_q)?;
    let dk = b.memory(of, of_v)?;
    let dv = b.memory(of, of_v)?;
    let delta = b.memory(Element::F32, per_row)?;
    let scale = b.scalar(b.scale)?;
    let one = b.scalar(1.0)?;
    // Row sums of do·o.
    let product = b.inside(Element::F32, dense)?;
    b.graph.pointwise(Function::Multiply, [Some(dy), Some(o), None], product, None)?;
    let sums = b.inside(Element::F32, per_row)?;
    b.graph.reduce(Over::Sum, product, sums)?;
    b.graph.pointwise(Function::Multiply, [Some(sums), Some(one), None], delta, None)?;
    // The probabilities again, from the log-sum-exp.
    let raw = b.scores()?;
    b.graph.matmul(q, k, raw)?;
    let scaled = b.binary(Function::Multiply, raw, scale)?;
    let shifted = b.binary(Function::Subtract, scaled, lse)?;
    let masked = b.causal(shifted)?;
    let p = b.unary(Function::Exp, masked)?;
    // dv = pᵀ·do, summed over the heads of a group.
    let pt = b.inside(of, turned)?;
    b.graph.reshape(p, pt)?;
    summed(&mut b, pt, dy, dv)?;
    // ds = (do·vᵀ − row sums)·p·scale.
    let dp = b.scores()?;
    b.graph.matmul(dy, v, dp)?;
    let centred = b.binary(Function::Subtract, dp, delta)?;
    let through = b.binary(Function::Multiply, centred, p)?;
    let ds = b.binary(Function::Multiply, through, scale)?;
    // dk = dsᵀ·q.
    let dst = b.inside(of, turned)?;
    b.graph.reshape(ds, dst)?;
    summed(&mut b, dst, q, dk)?;
    // dq = ds·k.
    let plain = b.inside(Element::F32, of_v)?;
    b.graph.reshape(k, plain)?;
    b.graph.matmul(ds, plain, dq)?;
    b.planned(library, vec![q, k, v, o, lse, dy, dq, dk, dv, delta])
}

/// A product with a result for each group of heads.
fn summed(b: &mut Build, x: TensorId, y: TensorId, out: TensorId) -> Result<(), CudaError> {
    if b.views.heads == b.views.groups {
        return b.graph.matmul(x, y, out);
    }
    let dense = b.views.dense();
    let each = b.inside(b.of, dense)?;
    b.graph.matmul(x, y, each)?;
    b.graph.reduce(Over::Sum, each, out)
}
