//! Experts: choices, places and rows, with one group dim, with two, and with none; more choices than
//! places, and enough places for all.

use phalanx_ir::ops::{
    Assign, Combine, Deal, Dispatch, GateGrad, GroupedMatmul, GroupedMatmulGrad, Histogram, Queue,
    TopK, TopKGrad,
};
use phalanx_reference::RefTensor;

use super::{Cases, F64, apply, normal, positive};

impl Cases {
    pub(super) fn routing(&mut self) {
        let (experts, tokens, k) = (5, 6, 2);
        for (groups, capacity) in [(vec![3], 2), (vec![2, 3], 3), (vec![], 2), (vec![2], 12)] {
            let of = |last: &[usize]| [groups.as_slice(), &[tokens], last].concat();
            let scores = normal("scores", &of(&[experts]));
            let chosen = apply(&TopK { k }.into(), std::slice::from_ref(&scores));
            let (dy, index) = (normal("dy", &of(&[k])), &chosen[1]);
            self.add(TopK { k }, &[&scores]);
            self.add(TopKGrad { size: experts }, &[index, &dy]);
            self.places(&groups, capacity, index);
        }
        // Equal numbers, and more choices than one.
        let equal = RefTensor::new(F64, &[2, 4], &[1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        for k in [1, 3, 4] {
            self.add(TopK { k }, &[equal.as_ref().unwrap()]);
        }
    }

    /// What follows from the chosen experts of some groups.
    fn places(&mut self, groups: &[usize], capacity: usize, index: &RefTensor) {
        let (experts, tokens, k, width) = (5, 6, 2, 3);
        let choices = [groups, &[tokens, k]].concat();
        let assign = Assign { experts, capacity };
        let slot = &apply(&assign.into(), std::slice::from_ref(index))[0];
        let stands: Vec<bool> = (0..choices.iter().product()).map(|i| i % 3 != 1).collect();
        let stands = RefTensor::from_bool(&choices, &stands).unwrap();
        self.add(assign, &[index]);
        self.add(assign, &[index, &stands]);
        self.add(Histogram { size: experts, per: 1, out: F64 }, &[index]);
        self.add(Histogram { size: experts, per: capacity, out: F64 }, &[slot]);
        for parts in [1, experts] {
            self.add(Deal { experts, parts, per: 1 }, &[index]);
            self.add(Deal { experts, parts, per: capacity }, &[slot]);
        }
        // Parts of several experts, and numbers that are none.
        let numbers: Vec<i32> = (0..).take(choices.iter().product()).collect();
        let numbers = RefTensor::from_i32(&choices, &numbers).unwrap();
        self.add(Deal { experts: 6, parts: 2, per: 3 }, &[&numbers]);
        let x = normal("x", &[groups, &[tokens, width]].concat());
        let y = normal("y", &[&[experts], groups, &[capacity, width]].concat());
        let gates = positive("gates", &choices);
        let dispatch = Dispatch { experts, capacity };
        self.add(dispatch, &[&x, slot]);
        self.add(dispatch, &[&x, slot, &gates]);
        self.add(Combine, &[&y, slot]);
        self.add(Combine, &[&y, slot, &gates]);
        self.add(GateGrad, &[&x, &y, slot]);
        // With room for all, and with less than some regions need.
        for (parts, room) in [(1, 12), (5, 6), (1, 7), (5, 2)] {
            self.add(Queue { experts, parts, room }, &[index]);
            self.add(Queue { experts, parts, room }, &[index, &stands]);
        }
    }

    /// Packed rows: in one part and in two, with one run of an expert and with several; an expert that has
    /// none, a region that has none, regions that are full and that are not.
    pub(super) fn grouped(&mut self) {
        let all = [
            (vec![1, 3], 4, 7, vec![2, 0, 1, 4, 0, 0, 0, 0, 1, 1, 1, 1]),
            (vec![2, 2], 4, 5, vec![1, 0, 2, 1, 0, 3, 0, 0, 5, 0, 0, 0, 0, 1, 1, 1]),
            (vec![2], 6, 40, vec![20, 1, 19, 0, 38, 1]),
            (vec![3, 2, 1], 3, 3, vec![1, 3, 0, 2, 1, 1]),
        ];
        for (regions, experts, room, counts) in all {
            let (d, f) = (6, 5);
            let of = |last: &[usize]| [regions.as_slice(), last].concat();
            let runs = counts.len() / regions.iter().product::<usize>();
            let counts = RefTensor::from_i32(&of(&[runs]), &counts).unwrap();
            let (x, y) = (normal("x", &of(&[room, d])), normal("y", &of(&[room, f])));
            let w = normal("w", &[experts, d, f]);
            self.add(GroupedMatmul { transposed: false }, &[&x, &w, &counts]);
            self.add(GroupedMatmul { transposed: true }, &[&y, &w, &counts]);
            self.add(GroupedMatmulGrad { experts, out: F64 }, &[&x, &y, &counts]);
        }
    }
}
