//! Steps of attention over the keys that are on a rank now, which may be those of another one: written from
//! the definition over places in the whole, so masks and dropped keys are those of one rank.

use std::ops::Range;

use phalanx_ir::ops::{Attention, KeyForm};
use phalanx_ir::random::keeps;
use phalanx_ir::{Instr, Mesh, Op, Program, TensorType};

use super::blocks::{Block, offset};

/// The results of an instruction on every rank, by result and rank; nothing if it is no step of a ring.
pub(super) fn steps(
    program: &Program,
    instr: &Instr,
    values: &[Vec<Block>],
) -> Option<Vec<Vec<Block>>> {
    let on_ranks: Vec<Vec<Block>> = (0..program.mesh().ranks())
        .map(|rank| {
            let blocks: Vec<&Block> =
                instr.inputs.iter().map(|v| &values[v.index()][rank]).collect();
            on_rank(program, instr, &blocks, rank)
        })
        .collect::<Option<_>>()?;
    let mut results = vec![Vec::new(); instr.outputs.len()];
    for blocks in on_ranks {
        results.iter_mut().zip(blocks).for_each(|(result, block)| result.push(block));
    }
    Some(results)
}

fn on_rank(program: &Program, instr: &Instr, blocks: &[&Block], rank: usize) -> Option<Vec<Block>> {
    let mesh = program.mesh();
    let (ins, outs) = (&instr.inputs, &instr.outputs);
    // Padding is not a number; what is added to starts with zeros.
    let start = |result: usize| zeros(program.ty(outs[result]), mesh, rank);
    let pair =
        |q: usize, k: usize| Pair { q: program.ty(ins[q]), k: program.ty(ins[k]), mesh, rank };
    Some(match &instr.op {
        Op::Attend(op) => {
            let so_far = if op.goes_on { &blocks[3..5] } else { &[] };
            let random = blocks.get(3 + so_far.len()).copied();
            let step = Step { pair: pair(0, 1), of: &op.of, random };
            step.attend(&blocks[..3], so_far, [start(0), start(1)])
        }
        Op::AttendGrad(op) => {
            let sums = (0..3).map(|i| if op.goes_on { blocks[6 + i].clone() } else { start(i) });
            let random = blocks.get(if op.goes_on { 9 } else { 6 }).copied();
            let step = Step { pair: pair(0, 1), of: &op.of, random };
            step.attend_grad(&blocks[..6], sums.collect())
        }
        Op::KeyProduct(op) => {
            let out = blocks.get(2).map_or_else(|| start(0), |block| (*block).clone());
            let (x, y) = match op.form {
                KeyForm::Scores => (program.ty(ins[0]), program.ty(ins[1])),
                KeyForm::Weighted => (program.ty(outs[0]), program.ty(ins[1])),
                KeyForm::Sums => (program.ty(ins[1]), program.ty(outs[0])),
            };
            let pair = Pair { q: x, k: y, mesh, rank };
            vec![pair.product(op.form, op.causal, [blocks[0], blocks[1]], out)]
        }
        _ => return None,
    })
}

/// A rank's block of zeros, whose padding is not a number.
fn zeros(ty: &TensorType, mesh: &Mesh, rank: usize) -> Block {
    let (shape, valid) = (ty.local_shape(mesh), ty.local_valid(mesh, rank));
    let data = super::blocks::indices(&shape).map(|index| {
        let is_valid = index.iter().zip(&valid).all(|(i, n)| i < n);
        if is_valid { 0.0 } else { f64::NAN }
    });
    Block { data: data.collect(), shape }
}

/// Rows of queries `[b,s,h,d]`, and the rows of keys `[b,t,g,d]` that are here.
struct Pair<'a> {
    q: &'a TensorType,
    k: &'a TensorType,
    mesh: &'a Mesh,
    rank: usize,
}

/// A query: sequence, head and place, on this rank.
type Query = [usize; 3];

impl Pair<'_> {
    fn queries(&self) -> impl Iterator<Item = Query> {
        let valid = self.q.local_valid(self.mesh, self.rank);
        let (heads, places) = (valid[2], valid[1]);
        (0..valid[0])
            .flat_map(move |b| (0..heads).flat_map(move |h| (0..places).map(move |i| [b, h, i])))
    }

    fn keys(&self) -> Range<usize> {
        0..self.k.local_valid(self.mesh, self.rank)[1]
    }

    /// The places of a query's sequence, head and position, and of a key, in the whole.
    fn whole(&self, [b, h, i]: Query, j: usize) -> [usize; 4] {
        let of = |ty: &TensorType, dim, at| ty.part(dim, self.mesh, self.rank).global(at);
        [of(self.q, 0, b), of(self.q, 2, h), of(self.q, 1, i), of(self.k, 1, j)]
    }

    /// The last query sees the last key.
    fn sees(&self, query: Query, j: usize) -> bool {
        let [_, _, i, j] = self.whole(query, j);
        j + self.q.shape[1] <= i + self.k.shape[1]
    }

    /// The key head of a query head: equal shares of those that are here.
    fn head(&self, h: usize) -> usize {
        h * self.k.local_shape(self.mesh)[2] / self.q.local_shape(self.mesh)[2]
    }

    fn at_query(&self, block: &Block, [b, h, i]: Query, x: usize) -> usize {
        offset(&block.shape, &[b, i, h, x])
    }

    fn at_key(&self, block: &Block, [b, h, _]: Query, j: usize, x: usize) -> usize {
        offset(&block.shape, &[b, j, self.head(h), x])
    }

    fn width(&self) -> Range<usize> {
        0..self.q.shape[3]
    }

    fn product(&self, form: KeyForm, causal: bool, [a, b]: [&Block; 2], mut out: Block) -> Block {
        for query in self.queries() {
            for j in self.keys() {
                let [b0, h, i] = query;
                let column = self.whole(query, j)[3];
                let score = |block: &Block| offset(&block.shape, &[b0, h, i, column]);
                match form {
                    KeyForm::Scores => {
                        let dot = self.dot((a, query), b, j);
                        let at = score(&out);
                        let hidden = causal && !self.sees(query, j);
                        out.data[at] = if hidden { f64::NEG_INFINITY } else { dot };
                    }
                    KeyForm::Weighted => self.width().for_each(|x| {
                        let at = self.at_query(&out, query, x);
                        out.data[at] += a.data[score(a)] * b.data[self.at_key(b, query, j, x)];
                    }),
                    KeyForm::Sums => self.width().for_each(|x| {
                        let at = self.at_key(&out, query, j, x);
                        out.data[at] += a.data[score(a)] * b.data[self.at_query(b, query, x)];
                    }),
                }
            }
        }
        out
    }

    /// A row of queries times a row of keys.
    fn dot(&self, (rows, query): (&Block, Query), keys: &Block, j: usize) -> f64 {
        let at = |x| rows.data[self.at_query(rows, query, x)];
        self.width().map(|x| at(x) * keys.data[self.at_key(keys, query, j, x)]).sum()
    }
}

/// A step of an attention that keeps no scores.
struct Step<'a> {
    pair: Pair<'a>,
    of: &'a Attention,
    random: Option<&'a Block>,
}

impl Step<'_> {
    fn scale(&self) -> f64 {
        1.0 / (self.pair.q.shape[3] as f64).sqrt()
    }

    fn score(&self, q: &Block, k: &Block, query: Query, j: usize) -> f64 {
        match self.of.causal && !self.pair.sees(query, j) {
            true => f64::NEG_INFINITY,
            false => self.pair.dot((q, query), k, j) * self.scale(),
        }
    }

    /// The factor by which dropout multiplies a probability.
    fn kept(&self, query: Query, j: usize) -> f64 {
        let Some(random) = self.random.filter(|_| self.of.dropout > 0.0) else { return 1.0 };
        let key: [i32; 5] = std::array::from_fn(|i| random.data[i] as i32);
        let [b, h, i, j] = self.pair.whole(query, j);
        let element = (h * self.pair.q.shape[1] + i) * self.pair.k.shape[1] + j;
        let p = self.of.dropout;
        let keeps = keeps(key, self.of.site, b as u64, element as u64, p);
        if keeps { 1.0 / (1.0 - p) } else { 0.0 }
    }

    fn attend(&self, qkv: &[&Block], so_far: &[&Block], out: [Block; 2]) -> Vec<Block> {
        let [mut o, mut totals] = out;
        let pair = &self.pair;
        for query in pair.queries() {
            let row = offset(&totals.shape, &query);
            let before = so_far.get(1).map_or(f64::NEG_INFINITY, |block| block.data[row]);
            let scores: Vec<f64> =
                pair.keys().map(|j| self.score(qkv[0], qkv[1], query, j)).collect();
            let largest = scores.iter().copied().fold(before, f64::max);
            let share = |score: f64, of: f64| match score == f64::NEG_INFINITY {
                true => 0.0,
                false => (score - of).exp(),
            };
            let sum: f64 = scores.iter().chain([&before]).map(|&s| share(s, largest)).sum();
            let total = if sum > 0.0 { largest + sum.ln() } else { f64::NEG_INFINITY };
            totals.data[row] = total;
            for x in pair.width() {
                let at = pair.at_query(&o, query, x);
                let earlier = so_far.first().map_or(0.0, |block| block.data[at]);
                let here = scores.iter().enumerate().map(|(j, &score)| {
                    let value = qkv[2].data[pair.at_key(qkv[2], query, j, x)];
                    share(score, total) * self.kept(query, j) * value
                });
                o.data[at] = share(before, total) * earlier + here.sum::<f64>();
            }
        }
        vec![o, totals]
    }

    /// The gradient by the keys that are here is added to sums of dq, dk and dv. Operands: q, k, v, o, the
    /// log-sum-exp and do.
    fn attend_grad(&self, operands: &[&Block], mut sums: Vec<Block>) -> Vec<Block> {
        let &[q, k, v, o, totals, dy] = operands else { unreachable!("it has six operands") };
        let pair = &self.pair;
        for query in pair.queries() {
            let total = totals.data[offset(&totals.shape, &query)];
            let along: f64 = (pair.width())
                .map(|x| pair.at_query(o, query, x))
                .map(|at| dy.data[at] * o.data[at])
                .sum();
            for j in pair.keys() {
                let score = self.score(q, k, query, j);
                let p = if score == f64::NEG_INFINITY { 0.0 } else { (score - total).exp() };
                let kept = self.kept(query, j);
                let dp = kept * pair.dot((dy, query), v, j);
                let ds = p * (dp - along) * self.scale();
                for x in pair.width() {
                    let (of_q, of_k) = (pair.at_query(q, query, x), pair.at_key(k, query, j, x));
                    sums[0].data[of_q] += ds * k.data[of_k];
                    sums[1].data[of_k] += ds * q.data[of_q];
                    sums[2].data[of_k] += p * kept * dy.data[of_q];
                }
            }
        }
        sums
    }
}
