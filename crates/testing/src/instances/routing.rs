//! Experts: choices, places and rows, with one group dim, with two, and with none; more choices than
//! places, and enough places for all.

use phalanx_ir::ops::{Assign, Combine, Dispatch, GateGrad, Histogram, TopK, TopKGrad};
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
        let x = normal("x", &[groups, &[tokens, width]].concat());
        let y = normal("y", &[&[experts], groups, &[capacity, width]].concat());
        let gates = positive("gates", &choices);
        let dispatch = Dispatch { experts, capacity };
        self.add(dispatch, &[&x, slot]);
        self.add(dispatch, &[&x, slot, &gates]);
        self.add(Combine, &[&y, slot]);
        self.add(Combine, &[&y, slot, &gates]);
        self.add(GateGrad, &[&x, &y, slot]);
    }
}
