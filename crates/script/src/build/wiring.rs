//! Which instances produce and read the values that flow between instances: a table, because every
//! turn asks for it.

use std::collections::HashMap;
use std::sync::Arc;

use phalanx_ir::{Model, Role};

use crate::build::Compiled;
use crate::schedule::Part;

/// The flow of boundary values through a model's instances, and of their cotangents back.
#[derive(Debug, Default)]
pub(crate) struct Wiring {
    /// For each boundary value: the instances whose forward produces it, in order.
    givers: HashMap<Arc<str>, Vec<usize>>,
    /// For each boundary value: the instances whose forward reads it, in order.
    readers: HashMap<Arc<str>, Vec<usize>>,
    /// For each boundary value: the instances whose backward produces summands of its cotangent, in
    /// order.
    differentiate: HashMap<Arc<str>, Vec<usize>>,
}

impl Wiring {
    pub(crate) fn new(model: &Model, compiled: &Compiled) -> Self {
        let mut wiring = Self::default();
        for (number, instance) in model.instances().iter().enumerate() {
            let forward = compiled.program(instance.segment, Part::F);
            for port in forward.inputs_with(Role::Boundary) {
                wiring.readers.entry(port.name.as_str().into()).or_default().push(number);
            }
            for port in forward.outputs_with(Role::Boundary) {
                wiring.givers.entry(port.name.as_str().into()).or_default().push(number);
            }
            for port in compiled.program(instance.segment, Part::BW).outputs_with(Role::Cotangent) {
                let boundary = port.of.as_deref().expect("a cotangent names its boundary value");
                wiring.differentiate.entry(boundary.into()).or_default().push(number);
            }
        }
        wiring
    }

    /// The last instance before this one that produces a boundary value.
    pub(crate) fn producer(&self, instance: usize, boundary: &str) -> Option<usize> {
        let givers = self.givers.get(boundary)?;
        let earlier = givers.partition_point(|&giver| giver < instance);
        earlier.checked_sub(1).map(|last| givers[last])
    }

    /// The instances that produce summands of the cotangent of an instance's boundary value.
    pub(crate) fn differentiated(&self, instance: usize, boundary: &str) -> &[usize] {
        self.of(&self.differentiate, instance, boundary)
    }

    /// The instances that read an instance's boundary value in their forward.
    pub(crate) fn readers(&self, instance: usize, boundary: &str) -> &[usize] {
        self.of(&self.readers, instance, boundary)
    }

    /// Those that read a value from this instance, so none after the next instance that produces it.
    fn of<'a>(
        &self,
        users: &'a HashMap<Arc<str>, Vec<usize>>,
        instance: usize,
        boundary: &str,
    ) -> &'a [usize] {
        let Some(all) = users.get(boundary) else { return &[] };
        let next = self.givers.get(boundary).and_then(|givers| {
            givers.get(givers.partition_point(|&giver| giver <= instance)).copied()
        });
        let from = all.partition_point(|&user| user <= instance);
        let to = next.map_or(all.len(), |next| all.partition_point(|&user| user <= next));
        &all[from..to.max(from)]
    }
}
