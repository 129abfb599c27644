//! Annotations as the partitioner reads them: which axes of a value are decided, by index.

use phalanx_autodiff::Joint;
use phalanx_ir::{Port, Program, Role, ValueId};

use crate::annotate::{Annotations, Entry};
use crate::mask::{Axes, Grid, MaskLayout, State};

/// What is decided about a value: everything for the axes in `closed`, nothing for the others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pin {
    pub(crate) dims: Vec<Axes>,
    pub(crate) closed: u16,
}

impl Pin {
    pub(crate) fn open(rank: usize) -> Self {
        Self { dims: vec![Axes::default(); rank], closed: 0 }
    }

    fn of(entry: Option<&Entry>, rank: usize, grid: &Grid) -> Self {
        let mut pin = Self::open(rank);
        let Some(entry) = entry else { return pin };
        for axis in entry.decided.keys().filter_map(|&a| grid.index(a)) {
            pin.closed |= 1 << axis;
        }
        for &(dim, axis) in &entry.order {
            if let Some(axis) = grid.index(axis) {
                pin.dims[dim] = pin.dims[dim].with(axis);
            }
        }
        pin
    }

    /// What one axis does, if that is decided.
    pub(crate) fn state(&self, axis: usize) -> Option<State> {
        if self.closed >> axis & 1 == 0 {
            return None;
        }
        let dim = self.dims.iter().position(|d| d.contains(axis));
        Some(dim.map_or(State::Replicated, State::Sharded))
    }

    /// Decides one more axis.
    pub(crate) fn close(&mut self, axis: usize, state: State) {
        self.closed |= 1 << axis;
        if let State::Sharded(dim) = state {
            self.dims[dim] = self.dims[dim].with(axis);
        }
    }
}

/// The pins of every value of a joint graph.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    /// What readers see.
    pub(crate) read: Vec<Option<Pin>>,
    /// How parameters are stored; where nothing is decided, as they are read.
    pub(crate) stored: Vec<Option<Pin>>,
}

impl Pins {
    pub(crate) fn new(joint: &Joint, annotations: &Annotations, grid: &Grid) -> Self {
        let program = &joint.program;
        let rank = |v: ValueId| program.ty(v).shape.len();
        let mut pins = Self {
            read: vec![None; program.values().len()],
            stored: vec![None; program.values().len()],
        };
        // What the backward reads besides is an input of the joint graph, before the results of instructions.
        let (inputs, added) = (program.inputs().len(), joint.added_inputs());
        let id = |v: ValueId| {
            let shift = if v.index() < inputs - added { 0 } else { added };
            ValueId(v.0 + shift as u32)
        };
        for (&value, entry) in &annotations.values {
            let value = id(value);
            pins.read[value.index()] = Some(Pin::of(Some(entry), rank(value), grid));
        }
        for (&value, entry) in &annotations.stored {
            let value = id(value);
            pins.stored[value.index()] = Some(Pin::of(Some(entry), rank(value), grid));
        }
        pins.close_ports(program, grid);
        pins
    }

    /// The layout in which readers see a value, as far as it is decided.
    pub(crate) fn read_layout(&self, value: usize) -> Option<MaskLayout> {
        self.read[value].as_ref().map(|p| MaskLayout { dims: p.dims.clone(), partial: 0 })
    }

    /// The layout in which a parameter is stored, as far as it is decided: the layout in which it
    /// is read, plus the axes that only store it, which are minor.
    pub(crate) fn stored_layout(&self, value: usize) -> Option<MaskLayout> {
        let (read, stored) = (self.read_layout(value)?, self.stored[value].as_ref());
        let Some(stored) = stored else { return Some(read) };
        let dims = read.dims.iter().zip(&stored.dims);
        let dims = dims.map(|(r, s)| r.only(!stored.closed).join(*s)).collect();
        Some(MaskLayout { dims, partial: 0 })
    }

    /// What other programs see must be decided on every axis: without an annotation, it is
    /// replicated. A cotangent has the layout of its boundary value.
    fn close_ports(&mut self, program: &Program, grid: &Grid) {
        let rank = |v: ValueId| program.ty(v).shape.len();
        for port in program.inputs().iter().filter(|p| p.role != Role::Cotangent) {
            let pin =
                self.read[port.value.index()].get_or_insert_with(|| Pin::open(rank(port.value)));
            if port.role != Role::Param {
                pin.closed = grid.all();
            }
        }
        let is_input = |v: ValueId| program.inputs().iter().any(|p| p.value == v);
        for port in program.outputs() {
            if !matches!(port.role, Role::Boundary | Role::Loss) || is_input(port.value) {
                continue;
            }
            let pin =
                self.read[port.value.index()].get_or_insert_with(|| Pin::open(rank(port.value)));
            pin.closed = grid.all();
        }
        for port in program.inputs_with(Role::Cotangent) {
            let boundary = (port.of.as_ref())
                .and_then(|name| program.outputs_with(Role::Boundary).find(|p| p.name == *name))
                .expect("a cotangent names its boundary value");
            self.read[port.value.index()] = self.read[boundary.value.index()].clone();
        }
    }
}

/// The input whose gradient or cotangent this output is, if it is one.
pub(crate) fn differentiated<'p>(program: &'p Program, port: &Port) -> Option<&'p Port> {
    let name = match port.role {
        Role::Gradient => Some(port.name.as_str()),
        Role::Cotangent => port.of.as_deref(),
        _ => return None,
    };
    let found = name.and_then(|name| program.input_named(name));
    Some(found.unwrap_or_else(|| panic!("{}: `{}` belongs to no input", program.name, port.name)))
}
