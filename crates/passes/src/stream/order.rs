//! In which order clusters of chains and all other instructions are emitted, if there is one.
//!
//! A cluster needs all operands of its chains before any of its results exists. So two chains cannot go
//! together if one reads what the other makes, at once or through anything else, which may be another
//! cluster.

use phalanx_ir::{Graph, Program};

use super::chains::{Chain, Fold};

/// What is emitted next.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Item {
    /// The old instruction at this index.
    Keep(usize),
    /// The cluster of this number.
    Cluster(usize),
}

/// The order nearest to that of the program: a cluster comes with its last product, or before what first
/// needs a result of it. `None` if clusters need each other.
pub(super) fn ordered(
    program: &Program,
    graph: &Graph<'_>,
    clusters: &[Vec<Chain>],
) -> Option<Vec<Item>> {
    let mut order = Order::new(program, graph, clusters);
    let possible = (0..program.instrs().len()).all(|at| match order.place[at] {
        Some(place) if order.last[place.cluster] != at => true,
        _ => order.visit(at),
    });
    possible.then_some(order.items)
}

/// Which chain an instruction belongs to.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    cluster: usize,
    chain: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Mark {
    New,
    /// What it needs is being emitted.
    Open,
    Done,
}

struct Order<'a> {
    program: &'a Program,
    graph: &'a Graph<'a>,
    /// By instruction.
    place: Vec<Option<Place>>,
    /// By cluster: its instructions, ascending, and the last product.
    members: Vec<Vec<usize>>,
    last: Vec<usize>,
    /// By instruction; of a cluster that of its first one.
    marks: Vec<Mark>,
    items: Vec<Item>,
}

impl<'a> Order<'a> {
    fn new(program: &'a Program, graph: &'a Graph<'a>, clusters: &[Vec<Chain>]) -> Self {
        let count = program.instrs().len();
        let mut place = vec![None; count];
        let mut members = vec![Vec::new(); clusters.len()];
        for (cluster, chains) in clusters.iter().enumerate() {
            for (number, chain) in chains.iter().enumerate() {
                let scatter = match chain.fold {
                    Fold::Scatter { at, .. } => Some(at),
                    Fold::Add | Fold::Place { .. } => None,
                };
                for at in chain.products.iter().map(|product| product.at).chain(scatter) {
                    place[at] = Some(Place { cluster, chain: number });
                    members[cluster].push(at);
                }
            }
            members[cluster].sort_unstable();
        }
        let last = clusters.iter().map(|chains| chains.iter().map(Chain::last).max().unwrap_or(0));
        let last = last.collect();
        Self { program, graph, place, members, last, marks: vec![Mark::New; count], items: vec![] }
    }

    /// Emits an instruction, or its cluster, after all that it needs; false if that needs it, too.
    fn visit(&mut self, at: usize) -> bool {
        let (members, item) = match self.place[at] {
            None => (vec![at], Item::Keep(at)),
            Some(Place { cluster, .. }) => (self.members[cluster].clone(), Item::Cluster(cluster)),
        };
        let first = members[0];
        match self.marks[first] {
            Mark::Done => return true,
            Mark::Open => return false,
            Mark::New => self.marks[first] = Mark::Open,
        }
        for &member in &members {
            for &value in &self.program.instrs()[member].inputs {
                let Some(maker) = self.graph.maker(value) else { continue };
                // Products of a chain are added to each other.
                let inside =
                    self.place[member].is_some() && self.place[maker] == self.place[member];
                if !inside && !self.visit(maker) {
                    return false;
                }
            }
        }
        self.marks[first] = Mark::Done;
        self.items.push(item);
        true
    }
}
