//! Units: parameters packed into flat buffers, so that updates and later collectives touch few,
//! large pieces.

use std::ops::Range;

use phalanx_ir::{DType, Model};

use crate::slots::ALIGN;

/// One parameter's place in its unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// The parameter's number in the model.
    pub param: usize,
    /// Its first element in the unit.
    pub offset: usize,
    /// Its elements.
    pub elements: usize,
}

/// Parameters that are updated together: of one segment instance, with or without decay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    /// The name, such as `blocks.3.decay`.
    pub name: String,
    /// Whether weight decay applies.
    pub decay: bool,
    /// The parameters, in order.
    pub members: Vec<Member>,
    /// Elements in all, padding included. Padding is zero and stays zero.
    pub elements: usize,
}

impl Unit {
    /// The bytes between and after its members, in elements of this type.
    pub fn padding(&self, dtype: DType) -> Vec<Range<usize>> {
        let starts = self.members.iter().skip(1).map(|m| m.offset).chain([self.elements]);
        (self.members.iter().zip(starts))
            .map(|(m, next)| (m.offset + m.elements) * dtype.size()..next * dtype.size())
            .filter(|range| !range.is_empty())
            .collect()
    }
}

/// Groups a model's parameters by the first instance that reads them and by decay. Each member
/// starts on a cache line whatever the element type.
pub fn units(model: &Model) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut seen = vec![false; model.params().len()];
    for instance in model.instances() {
        for decay in [true, false] {
            let mut unit = Unit {
                name: format!("{}.{}", instance.name, if decay { "decay" } else { "plain" }),
                decay,
                members: Vec::new(),
                elements: 0,
            };
            let mut params: Vec<usize> = instance.params.values().copied().collect();
            params.sort_unstable();
            for param in params {
                let spec = &model.params()[param];
                if spec.decay != decay || std::mem::replace(&mut seen[param], true) {
                    continue;
                }
                let elements = spec.elements();
                unit.members.push(Member { param, offset: unit.elements, elements });
                unit.elements += elements.next_multiple_of(ALIGN / 2);
            }
            if !unit.members.is_empty() {
                units.push(unit);
            }
        }
    }
    units
}
