//! Room for packed rows where experts are on several ranks.
//!
//! Rows are packed for each rank that has experts, in regions of fixed size. Nobody knows before a step how many rows go
//! where; but routers that are trained to balance send every rank about its even share, and the worst choices need up
//! to `parts` times as much. So a region has room for a multiple of the even share, the slack. Rows that find no room
//! are counted. A step with such rows must change nothing, and is taken again with the next bound: twice the slack, and
//! at last the worst choices. The numbers of a step that is applied do not depend on the bound: what lies behind the
//! last row of a region is never read.
//!
//! So are places of experts where they are as many as a step needs ([`Capacity::Fitting`]; Tutel's dynamic capacity: Hwang
//! et al., 2022): the slack is the capacity factor, and the worst choices are those of a group that all take one expert.
//!
//! The choices of many tokens are more even than those of a few, so the samples of a rank share a region where sequences are
//! not cut into groups.

use phalanx_ir::ops::Queue;
use phalanx_ir::{Builder, Tensor};

use super::{Experts, Places};
use crate::architecture::{Purpose, port};

/// How many places an expert has in each group of tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Capacity {
    /// So many times the even share; who comes later is dropped.
    Factor(f64),
    /// Nobody is dropped, and nobody has a place of his own: rows are packed by expert.
    Dropless,
    /// The least of some factors with which nobody is dropped in a step.
    Fitting,
}

impl Capacity {
    /// The multiple of the even share, where it is given.
    pub(super) fn factor(self) -> Option<f64> {
        match self {
            Capacity::Factor(factor) => Some(factor),
            Capacity::Dropless | Capacity::Fitting => None,
        }
    }
}

impl Experts {
    /// Room for the worst choices, as a multiple of the even share; of the layers where it is largest.
    pub fn worst_slack(&self) -> f64 {
        let (k, parts) = (self.router.choices(), self.parts.max(1));
        let of = |count: usize| match self.capacity {
            Capacity::Fitting => count as f64 / k.max(1) as f64,
            _ => (parts * k.min(count / parts)) as f64 / k.max(1) as f64,
        };
        self.late.map_or(of(self.count), |late| of(self.count).max(of(late.count)))
    }

    /// The same experts with the next bound; none if they have room for the worst choices, or a given factor.
    pub(crate) fn with_more_room(&self) -> Option<Self> {
        if let Capacity::Factor(_) = self.capacity {
            return None;
        }
        let (slack, worst) = (self.slack?, self.worst_slack());
        let next = Some(2.0 * slack).filter(|next| *next < worst);
        (slack < worst).then(|| Self { slack: next, ..self.clone() })
    }

    /// The same experts, all of which every rank reads, if steps may do that: no rank has more rows than its tokens choose.
    pub(crate) fn with_rows_at_home(&self) -> Option<Self> {
        self.may_stay.then(|| Self { parts: 1, slack: None, may_stay: false, ..self.clone() })
    }

    /// Batch, groups and tokens where rows are packed: samples that share a region are one long group.
    pub(super) fn regions_of(&self, [batch, groups, tokens]: [usize; 3]) -> [usize; 3] {
        match self.regions.filter(|own| groups == 1 && *own > 0 && batch.is_multiple_of(*own)) {
            Some(regions) if self.parts > 1 => [regions, 1, batch / regions * tokens],
            _ => [batch, groups, tokens],
        }
    }

    /// How the rows of a group are packed. Only training has bounds: an evaluation cannot be taken again.
    pub(super) fn queue(&self, tokens: usize, purpose: Purpose) -> Queue {
        let k = self.router.choices();
        let worst = Queue::worst(self.count, self.parts, [tokens, k]);
        let slack = self.slack.filter(|_| purpose == Purpose::Train);
        let even = (tokens * k) as f64 / self.parts.max(1) as f64;
        let room = slack.map_or(worst.room, |slack| (slack * even).ceil() as usize);
        Queue { room: room.clamp(1, worst.room.max(1)), ..worst }
    }

    /// Tells how many rows found no room: the choices of each group, less the slots that are in a region.
    pub(super) fn tell_lacking<'b>(
        &self,
        b: &'b Builder,
        chosen: Tensor<'b>,
        slot: Tensor<'b>,
        of: Queue,
    ) {
        let tokens = slot.shape()[2];
        if of.room == Queue::worst(self.count, self.parts, [tokens, self.router.choices()]).room {
            return;
        }
        let placed = slot.histogram(of.parts, of.room, chosen.dtype());
        // Region by region, so that differences of large sums do not hide a row.
        let (batch, regions) = (chosen.shape()[0], slot.shape()[0]);
        let wanted = chosen.sum(&[1, 2]).reshape([regions, batch / regions]).sum(&[1]);
        let lacking = wanted - placed.sum(&[1, 2]);
        b.loss(port::LACKING, lacking.sum_all());
    }
}

impl Experts {
    /// Where logits of any sequence are wanted, nobody is dropped: a place that a later token's
    /// first choice takes from an earlier one's second would show the future.
    pub(super) fn capacity_for(&self, purpose: Purpose) -> Capacity {
        match purpose {
            Purpose::Train => self.capacity,
            Purpose::Evaluate => self.eval_capacity.unwrap_or(self.capacity),
            Purpose::Predict => Capacity::Dropless,
        }
    }

    /// Whether rows are packed by expert. What is no step cannot be taken again with more places, so there they are,
    /// too, where places are as many as are needed.
    pub(super) fn is_packed(&self, purpose: Purpose) -> bool {
        match self.capacity_for(purpose) {
            Capacity::Factor(_) => false,
            Capacity::Dropless => true,
            Capacity::Fitting => purpose != Purpose::Train,
        }
    }

    /// Tells how many choices found no place at their experts, unless there are places for all.
    pub(super) fn tell_unplaced<'b>(
        b: &'b Builder,
        chosen: Tensor<'b>,
        placed: Tensor<'b>,
        Places { tokens, capacity, .. }: Places,
    ) {
        if capacity < tokens {
            b.loss(port::LACKING, (chosen - placed).sum_all());
        }
    }
}

#[cfg(test)]
mod tests {
    use phalanx_ir::DType;
    use phalanx_reference::{RefTensor, run};

    use super::*;
    use crate::architecture::BatchShape;
    use crate::experts::Router;

    fn bounded(parts: usize, router: Router, slack: f64) -> Experts {
        let slack = Some(slack);
        Experts {
            parts,
            slack,
            capacity: Capacity::Dropless,
            aux_loss: 0.0,
            ..Experts::new(4, 1, router)
        }
    }

    #[test]
    fn bounds_double_up_to_the_worst_choices() {
        let bounds = |parts, router, slack| -> Vec<usize> {
            let mut all = vec![];
            let mut next = Some(bounded(parts, router, slack));
            while let Some(own) = next {
                all.push(own.queue(24, Purpose::Train).room);
                let worst = 24 * own.router.choices().min(own.count / own.parts);
                assert_eq!(own.queue(24, Purpose::Evaluate).room, worst);
                next = own.with_more_room();
            }
            all
        };
        // Of 48 choices 12 are a fourth; no token chooses an expert twice.
        assert_eq!(bounds(4, Router::TopK { k: 2 }, 1.25), [15, 24]);
        assert_eq!(bounds(4, Router::Switch, 1.25), [8, 15, 24]);
        assert_eq!(bounds(2, Router::TopK { k: 2 }, 1.0), [24, 48]);
        assert_eq!(bounds(1, Router::TopK { k: 2 }, 1.25), [48]);
        // Where places are given, tokens beyond are dropped.
        let places =
            Experts { capacity: Capacity::Factor(1.25), ..bounded(4, Router::Switch, 1.25) };
        assert_eq!(places.with_more_room(), None);
    }

    /// As many places as are needed: from the first factor, doubled, up to a place for every token of a group.
    #[test]
    fn places_double_up_to_one_for_every_token() {
        let mut next = Some(Experts {
            capacity: Capacity::Fitting,
            ..bounded(1, Router::TopK { k: 2 }, 1.25)
        });
        let (mut places, mut rows) = (vec![], vec![]);
        while let Some(own) = next {
            places.push(own.places(24, Purpose::Train).capacity);
            rows.push(own.is_packed(Purpose::Train) || !own.is_packed(Purpose::Evaluate));
            next = own.with_more_room();
        }
        // Of 48 choices 12 are a fourth; a token takes an expert once.
        assert_eq!(places, [15, 24]);
        assert_eq!(rows, [false; 2]);
    }

    /// Eight tokens of width two take the expert whose column of the router points most in their direction: five the first,
    /// two the second, none the third, one the fourth. A part of two experts has room for half of the eight.
    #[test]
    fn rows_without_room_are_counted() {
        let (lacking, empty) = counted(bounded(2, Router::Switch, 1.0));
        // What found no room is carried by the residual stream alone, until the step is taken again: the last of the first
        // expert's, and both of the second's.
        assert_eq!((lacking, empty), (3.0, vec![1, 6, 7]));
    }

    /// The same tokens: an expert has places for half as many again as the even share of two.
    #[test]
    fn choices_without_places_are_counted() {
        let own = Experts { capacity: Capacity::Fitting, ..bounded(1, Router::Switch, 1.5) };
        assert_eq!(counted(own), (2.0, vec![5, 7]));
    }

    /// How many of the eight tokens found no room, and which ones experts gave nothing.
    fn counted(experts: Experts) -> (f64, Vec<usize>) {
        let b = Builder::new("experts", DType::F64);
        let x = b.data("x", DType::F64, [1, 8, 2]);
        let shape = BatchShape { batch: 1, seq: 8 };
        b.probe("y", experts.apply(&b, x, shape, Purpose::Train));
        let tensor = |shape: &[usize], values: &[f64]| RefTensor::from_f64(shape, values).unwrap();
        let (right, up, down) = ([1.0, 0.0], [0.0, 1.0], [0.0, -1.0]);
        let tokens = [right, up, right, right, down, right, up, right].concat();
        let ones = || tensor(&[4, 2, 1], &[1.0; 8]);
        let inputs = [
            ("x", tensor(&[1, 8, 2], &tokens)),
            ("experts.router", tensor(&[2, 4], &[9.0, 0.0, -9.0, 0.0, 0.0, 9.0, 0.0, -9.0])),
            ("experts.gate", ones()),
            ("experts.up", ones()),
            ("experts.down", tensor(&[4, 1, 2], &[1.0; 8])),
        ];
        let found = run(&b.finish().unwrap(), &inputs).unwrap();
        let of = |name: &str| found.iter().find(|(own, _)| own == name).unwrap().1.values();
        let y = of("y");
        (of(port::LACKING)[0], (0..8).filter(|token| y[2 * token] == 0.0).collect())
    }
}
