//! Which products can go block by block, along which of their letters, and which of them together.

use std::collections::BTreeSet;

use phalanx_ir::ops::{Collective, CollectiveKind, Matmul};
use phalanx_ir::{Axis, Graph, Op, Program, TensorType, ValueId};

use super::order::ordered;

/// Products that are added to each other, along one letter each.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Chain {
    /// In the order in which they are added.
    pub(super) products: Vec<Product>,
    /// What the first one is added to.
    pub(super) addend: Option<ValueId>,
    pub(super) fold: Fold,
    /// How many blocks there are.
    pub(super) blocks: usize,
    /// How many of them are not padding alone.
    pub(super) steps: usize,
}

/// How the results of steps become one.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Fold {
    /// Their sum: the letter is contracted.
    Add,
    /// Each is summed on the rank that keeps the block.
    Scatter { at: usize, dim: usize, axes: Vec<Axis> },
    /// Each is a block of the result.
    Place { dim: usize },
}

/// A product of a chain.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Product {
    /// Which instruction it is.
    pub(super) at: usize,
    pub(super) operands: [Operand; 2],
}

/// How an operand has the letter.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Operand {
    /// Not at all.
    Free(ValueId),
    /// It is gathered along it, from this value.
    Gathered { own: ValueId, whole: ValueId, dim: usize, axes: Vec<Axis> },
    /// It holds all of it.
    Whole { value: ValueId, dim: usize, of: usize },
}

impl Chain {
    /// The instruction of the last product.
    pub(super) fn last(&self) -> usize {
        self.products.iter().map(|product| product.at).max().unwrap_or(0)
    }

    /// The value that the last product computes.
    pub(super) fn result(&self, program: &Program) -> ValueId {
        program.instrs()[self.last()].outputs[0]
    }

    /// The gathered values that it reads.
    fn gathered(&self) -> impl Iterator<Item = ValueId> {
        self.products.iter().flat_map(|product| &product.operands).filter_map(|operand| {
            match operand {
                Operand::Gathered { whole, .. } => Some(*whole),
                _ => None,
            }
        })
    }

    /// How many collectives it does block by block.
    fn collectives(&self) -> usize {
        self.gathered().count() + usize::from(matches!(self.fold, Fold::Scatter { .. }))
    }
}

/// Chains of products, those together that share a gathered value. No gathered value is brought here
/// twice: one that anything else reads stays gathered.
pub(super) fn clusters(program: &Program, graph: &Graph<'_>, axes: &[Axis]) -> Vec<Vec<Chain>> {
    let mut kept = BTreeSet::new();
    loop {
        let finder = Finder { program, graph, axes, kept: &kept };
        let clusters = finder.grouped(finder.chains());
        let shared = finder.shared(&clusters);
        if shared.is_empty() {
            return clusters;
        }
        kept.extend(shared);
    }
}

struct Finder<'a> {
    program: &'a Program,
    graph: &'a Graph<'a>,
    /// Over which blocks may come.
    axes: &'a [Axis],
    /// Gathered values that stay.
    kept: &'a BTreeSet<ValueId>,
}

impl Finder<'_> {
    fn matmul(&self, at: usize) -> Option<&Matmul> {
        match &self.program.instrs()[at].op {
            Op::Matmul(product) => Some(product),
            _ => None,
        }
    }

    /// The chains of a program, by their last product.
    fn chains(&self) -> Vec<Chain> {
        let mut chains: Vec<Chain> = Vec::new();
        // The last product of a chain comes last, so chains are found from the end.
        for at in (0..self.program.instrs().len()).rev() {
            let taken = chains.iter().flat_map(|c| &c.products).any(|product| product.at == at);
            if !taken {
                chains.extend(self.ending_at(at));
            }
        }
        chains.reverse();
        chains
    }

    /// The chain that ends with this product, along the letter that does most collectives.
    fn ending_at(&self, at: usize) -> Option<Chain> {
        let [a, b, _] = self.matmul(at)?.spec.letters();
        let counts = self.counts(at);
        let letters = a.chars().chain(b.chars().filter(|&letter| !a.contains(letter)));
        let chains = letters
            .flat_map(|letter| counts.iter().map(move |&blocks| (letter, blocks)))
            .filter_map(|(letter, blocks)| self.chain(at, letter, blocks))
            .filter(|chain| chain.collectives() > 0);
        chains.reduce(|best, other| match other.collectives() > best.collectives() {
            true => other,
            false => best,
        })
    }

    /// The numbers of blocks that a product's operands are gathered of and its result is scattered to.
    fn counts(&self, at: usize) -> BTreeSet<usize> {
        let instr = &self.program.instrs()[at];
        let makers = instr.inputs.iter().filter_map(|&value| self.graph.maker(value));
        let readers = self.graph.readers(instr.outputs[0]).iter().copied();
        (makers.chain(readers).filter_map(|other| self.collective(other)))
            .map(|collective| self.program.mesh().count(&collective.axes))
            .collect()
    }

    /// A collective over axes along which blocks may come.
    fn collective(&self, at: usize) -> Option<&Collective> {
        let Op::Collective(collective) = &self.program.instrs()[at].op else { return None };
        let here = |axis: &Axis| self.axes.contains(axis);
        let whole = !collective.start && collective.pieces == 1;
        (whole && !collective.axes.is_empty() && collective.axes.iter().all(here))
            .then_some(collective)
    }

    fn chain(&self, at: usize, letter: char, blocks: usize) -> Option<Chain> {
        let instr = &self.program.instrs()[at];
        let result = instr.outputs[0];
        let (product, steps) = self.product(at, letter, blocks)?;
        let dim = self.matmul(at)?.spec.letters()[2].find(letter);
        let fold = match dim {
            None => Fold::Add,
            Some(dim) => {
                self.steps(self.program.ty(result), dim, blocks)?;
                self.scatter(result, dim, blocks).unwrap_or(Fold::Place { dim })
            }
        };
        let addend = instr.inputs.get(2).copied();
        let mut chain = Chain { products: vec![product], addend, fold, blocks, steps };
        while let Some(before) = self.before(&chain, dim) {
            chain.addend = self.program.instrs()[before.at].inputs.get(2).copied();
            chain.products.insert(0, before);
        }
        Some(chain)
    }

    /// The product that a chain is added to, if it can go block by block with it.
    fn before(&self, chain: &Chain, dim: Option<usize>) -> Option<Product> {
        let (value, reader) = (chain.addend?, chain.products[0].at);
        let (at, instr) = self.graph.making(value)?;
        let letters = self.matmul(at)?.spec.letters();
        let together = instr.phase == self.program.instrs()[reader].phase
            && self.graph.read_only_by(value, &[reader]);
        let along = |letter: char| {
            let (product, steps) = self.product(at, letter, chain.blocks)?;
            (steps == chain.steps).then_some(product)
        };
        let found = match dim {
            Some(dim) => along(letters[2].chars().nth(dim)?),
            None => {
                let contracted = letters[0].chars().filter(|&letter| !letters[2].contains(letter));
                let gathers =
                    |p: &Product| p.operands.iter().any(|o| matches!(o, Operand::Gathered { .. }));
                contracted.filter_map(along).find(gathers)
            }
        };
        found.filter(|_| together)
    }

    /// A product along a letter, and in how many steps it is done.
    fn product(&self, at: usize, letter: char, blocks: usize) -> Option<(Product, usize)> {
        let instr = &self.program.instrs()[at];
        let letters = self.matmul(at)?.spec.letters();
        let mut steps = None;
        let mut operand = |i: usize| {
            let value = instr.inputs[i];
            let Some(dim) = letters[i].find(letter) else { return Some(Operand::Free(value)) };
            let (operand, found) = self.operand(value, dim, blocks)?;
            let same = *steps.get_or_insert(found) == found;
            same.then_some(operand)
        };
        let operands = [operand(0)?, operand(1)?];
        Some((Product { at, operands }, steps?))
    }

    fn operand(&self, value: ValueId, dim: usize, blocks: usize) -> Option<(Operand, usize)> {
        let gather = || {
            let (at, made) = self.graph.making(value)?;
            let collective = self.collective(at)?;
            let fits = collective.kind == CollectiveKind::AllGather { dim }
                && self.program.mesh().count(&collective.axes) == blocks
                && !self.kept.contains(&value);
            fits.then(|| (made.inputs[0], collective.axes.clone()))
        };
        let Some((own, axes)) = gather() else {
            let steps = self.steps(self.program.ty(value), dim, blocks)?;
            return Some((Operand::Whole { value, dim, of: blocks }, steps));
        };
        let block = |block| {
            let kind = CollectiveKind::BroadcastBlock { dim, block };
            Collective::new(kind, axes.clone())
        };
        let steps = self.filled(self.program.ty(own), block, blocks)?;
        Some((Operand::Gathered { own, whole: value, dim, axes }, steps))
    }

    /// How many of these blocks of what ranks hold of a dim are not padding alone.
    fn steps(&self, ty: &TensorType, dim: usize, of: usize) -> Option<usize> {
        let block = |block| Collective::new(CollectiveKind::TakeBlock { dim, block, of }, vec![]);
        self.filled(ty, block, of)
    }

    /// How many blocks have elements; none if they are not blocks of this type.
    fn filled(
        &self,
        ty: &TensorType,
        block: impl Fn(usize) -> Collective,
        of: usize,
    ) -> Option<usize> {
        let types: Option<Vec<TensorType>> =
            (0..of).map(|i| block(i).result(ty, self.program.mesh()).ok()).collect();
        Some(types?.iter().take_while(|ty| ty.elements() > 0).count())
    }

    /// How a result is scattered along a dim, if nothing else is done with it.
    fn scatter(&self, result: ValueId, dim: usize, blocks: usize) -> Option<Fold> {
        let &[at] = self.graph.readers(result) else { return None };
        let Collective { kind, axes, .. } = self.collective(at)?;
        let scattered = self.program.ty(self.program.instrs()[at].outputs[0]);
        let whole = Collective::new(CollectiveKind::ReduceBlock { dim, block: 0 }, axes.clone());
        let part = self.program.ty(result);
        let take = CollectiveKind::TakeBlock { dim, block: 0, of: blocks };
        let part = Collective::new(take, vec![]).result(part, self.program.mesh()).ok()?;
        let fits = *kind == CollectiveKind::ReduceScatter { dim }
            && self.graph.read_only_by(result, &[at])
            && self.program.mesh().count(axes) == blocks
            && whole.result_of(&[&part, scattered], self.program.mesh()).is_ok();
        fits.then(|| Fold::Scatter { at, dim, axes: axes.clone() })
    }

    /// Chains that share a gathered value, where none of them needs a result of another.
    fn grouped(&self, chains: Vec<Chain>) -> Vec<Vec<Chain>> {
        let mut clusters: Vec<Vec<Chain>> = Vec::new();
        for chain in chains {
            let joined = (0..clusters.len()).filter(|&at| self.alike(&clusters[at], &chain));
            let joined = joined.map(|at| {
                let mut joined = clusters.clone();
                joined[at].push(chain.clone());
                joined
            });
            let possible = |all: &Vec<Vec<Chain>>| ordered(self.program, self.graph, all).is_some();
            let found = joined.into_iter().find(possible);
            match found {
                Some(joined) => clusters = joined,
                None => clusters.push(vec![chain]),
            }
        }
        clusters
    }

    /// Whether a chain reads a gathered value of others, in the same phase and the same steps.
    fn alike(&self, cluster: &[Chain], chain: &Chain) -> bool {
        let phase = |chain: &Chain| self.program.instrs()[chain.last()].phase;
        let of = |chain: &Chain| (phase(chain), chain.blocks, chain.steps);
        let values: BTreeSet<ValueId> = cluster.iter().flat_map(Chain::gathered).collect();
        chain.gathered().any(|value| values.contains(&value))
            && cluster.iter().all(|other| of(other) == of(chain))
    }

    /// Gathered values that are read outside the cluster that would bring them block by block.
    fn shared(&self, clusters: &[Vec<Chain>]) -> BTreeSet<ValueId> {
        let mut shared = BTreeSet::new();
        for cluster in clusters {
            let products: Vec<&Product> = cluster.iter().flat_map(|c| &c.products).collect();
            for value in cluster.iter().flat_map(Chain::gathered) {
                let by_blocks = |&at: &usize| {
                    products.iter().any(|product| {
                        let whole = |operand: &Operand| match operand {
                            Operand::Gathered { whole, .. } => *whole != value,
                            Operand::Free(other) | Operand::Whole { value: other, .. } => {
                                *other != value
                            }
                        };
                        let blocks = product.operands.iter().filter(|o| !whole(o));
                        let mut gathered = blocks.map(|o| matches!(o, Operand::Gathered { .. }));
                        product.at == at && gathered.all(|gathered| gathered)
                    })
                };
                let inside = self.graph.readers(value).iter().all(by_blocks);
                if !inside || self.graph.returned(value) {
                    shared.insert(value);
                }
            }
        }
        shared
    }
}
