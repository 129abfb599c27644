//! Annotations: what strategies and users ask of values, one axis at a time.
//!
//! An annotation decides, for one value and one axis, that the axis shards a dim or replicates the
//! value. What was not decided is open, which is not the same as replicated. Each strategy
//! annotates only its own axes, so strategies compose in any order; if two decide the same thing
//! differently, the error names both.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_ir::layout::{AxisRole, Layout, Order};
use phalanx_ir::text::value_name;
use phalanx_ir::{Axis, Mesh, Port, Program, Role, ValueId};

use crate::error::{Conflict, SpmdError};

/// Who wrote the annotations that a program carries.
const THE_MODEL: &str = "the model";

/// The end of an annotation that leaves the axes open which it does not name.
const OPEN: &str = "...";

/// The decisions about the values of one segment's forward program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Annotations {
    /// The layout that readers of a value see.
    pub(crate) values: BTreeMap<ValueId, Entry>,
    /// The layout that a parameter is stored in, where it is not the one it is read in.
    pub(crate) stored: BTreeMap<ValueId, Entry>,
    /// The order in which an axis deals the elements of the dims that it shards, where that is not
    /// by blocks.
    pub(crate) orders: BTreeMap<Axis, Order>,
    /// The axes whose exchanges the segment's own code writes down: strategies decide only what enters and leaves it.
    pub(crate) local: BTreeSet<Axis>,
    /// The axes that go from dim to dim, each by an all-to-all, and are not gathered on the way.
    pub(crate) travel: BTreeSet<Axis>,
}

/// The decisions about one value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    /// For each decided axis: the dim that it shards, if any, and which strategy decided it.
    pub(crate) decided: BTreeMap<Axis, (Option<usize>, String)>,
    /// The sharding axes in the order of annotation: major to minor on each dim.
    pub(crate) order: Vec<(usize, Axis)>,
}

/// Writes annotations for one segment.
#[derive(Debug)]
pub struct Annotator<'a> {
    program: &'a Program,
    mesh: &'a Mesh,
    by: String,
    annotations: Annotations,
}

impl<'a> Annotator<'a> {
    /// Annotations of a forward program, starting with those that the model itself carries
    /// ([`phalanx_ir::Tensor::annotate`]).
    pub fn new(program: &'a Program, mesh: &'a Mesh) -> Result<Self, SpmdError> {
        let by = THE_MODEL.to_owned();
        let mut annotator = Self { program, mesh, by, annotations: Annotations::default() };
        for (value, text) in program.notes() {
            match text.strip_suffix(OPEN) {
                Some(text) => annotator.some_axes(*value, text)?,
                None => annotator.layout(*value, text)?,
            }
        }
        Ok(annotator)
    }

    /// Annotations of local form: `0:tp` shards dim 0 by the axis, `-:tp` replicates the value; other axes stay open.
    /// On a mesh without the axis there is nothing to decide, nor about what enters or leaves the segment.
    fn some_axes(&mut self, value: ValueId, text: &str) -> Result<(), SpmdError> {
        for part in text.split_whitespace() {
            let wrong = || self.bad(value, format!("`{part}` is neither DIM:AXIS nor -:AXIS"));
            let (dim, axis) = part.split_once(':').ok_or_else(wrong)?;
            let dim = match dim {
                "-" => None,
                dim => Some(dim.parse().map_err(|_| wrong())?),
            };
            if self.degree(axis) > 1 {
                self.annotations.local.extend(self.mesh.expand(axis)?);
                if !self.crosses(value) {
                    self.decide(value, axis, dim, false)?;
                }
            }
        }
        Ok(())
    }

    /// Whether strategies have no say about a value and an axis: the segment's own code has.
    fn is_local(&self, value: ValueId, axis: Axis) -> bool {
        self.by != THE_MODEL && self.annotations.local.contains(&axis) && !self.crosses(value)
    }

    /// Whether a value enters or leaves the segment.
    fn crosses(&self, value: ValueId) -> bool {
        let mut ports = self.program.inputs().iter().chain(self.program.outputs());
        ports.any(|p| p.value == value && matches!(p.role, Role::Boundary | Role::Data))
    }

    /// Names the author of the next annotations.
    pub fn by(&mut self, name: &str) -> &mut Self {
        name.clone_into(&mut self.by);
        self
    }

    /// The segment's forward program.
    pub fn program(&self) -> &'a Program {
        self.program
    }

    /// The mesh.
    pub fn mesh(&self) -> &'a Mesh {
        self.mesh
    }

    /// How many ranks an axis has, with all its parts; one if the mesh has no such axis.
    pub fn degree(&self, axis: &str) -> usize {
        self.mesh.degree(axis)
    }

    /// The parameters.
    pub fn params(&self) -> Vec<&'a Port> {
        self.program.inputs_with(Role::Param).collect()
    }

    /// Every value that flows in from or out to another segment.
    pub fn boundaries(&self) -> Vec<ValueId> {
        let program = self.program;
        let ports = program.inputs_with(Role::Boundary).chain(program.outputs_with(Role::Boundary));
        ports.map(|p| p.value).collect()
    }

    /// The axis, or all its parts, shard a dim of a value; for a parameter, the form in which it is
    /// read.
    pub fn shard(&mut self, value: ValueId, dim: usize, axis: &str) -> Result<(), SpmdError> {
        self.decide(value, axis, Some(dim), false)
    }

    /// The axis replicates a value.
    pub fn replicate(&mut self, value: ValueId, axis: &str) -> Result<(), SpmdError> {
        self.decide(value, axis, None, false)
    }

    /// The axis shards a parameter where it is stored, though it is read whole over that axis: it
    /// is gathered before each use, and its gradient scattered.
    pub fn store(&mut self, param: ValueId, dim: usize, axis: &str) -> Result<(), SpmdError> {
        self.decide(param, axis, None, false)?;
        self.decide(param, axis, Some(dim), true)
    }

    /// The axis deals the elements of every dim that it shards in this order. It is then the major
    /// axis of such a dim.
    pub fn order(&mut self, axis: &str, order: Order) -> Result<(), SpmdError> {
        let (atoms, wanted) = (self.mesh.expand(axis)?, order.name());
        let [atom] = atoms[..] else {
            let what =
                format!("`{axis}` is split into {atoms:?}, so it can't deal in {wanted} order");
            return Err(self.refuse(what));
        };
        match self.annotations.orders.insert(atom, order) {
            Some(other) if other != order => Err(self.refuse(format!(
                "`{axis}` deals elements in {} order already, not in {wanted} order",
                other.name()
            ))),
            _ => Ok(()),
        }
    }

    /// Where a value is sharded by the axis along one dim and is needed so along another, it goes there
    /// by an all-to-all, also where a gather would be one call less.
    pub fn travel(&mut self, axis: &str) -> Result<(), SpmdError> {
        self.annotations.travel.extend(self.mesh.expand(axis)?);
        Ok(())
    }

    /// Decides every axis of the mesh at once: `0:dp 1:tp` leaves the value replicated over all
    /// others.
    pub fn layout(&mut self, value: ValueId, text: &str) -> Result<(), SpmdError> {
        let rank = self.program.ty(value).shape.len();
        let layout = Layout::parse(text, rank, self.mesh)?;
        if !layout.partial().is_empty() {
            return Err(self.bad(value, "an annotation cannot ask for a partial sum".to_owned()));
        }
        if let Some(dim) = layout.dims().iter().position(|d| d.order != Order::Block) {
            let what = format!("dim {dim} has an order; orders belong to axes (Annotator::order)");
            return Err(self.bad(value, what));
        }
        for sharding in layout.dims() {
            for &axis in &sharding.axes {
                let AxisRole::Sharded(dim) = layout.role(axis) else { continue };
                self.decide(value, axis.name(), Some(dim), false)?;
            }
        }
        for (axis, _) in self.mesh.axes() {
            if layout.role(axis) == AxisRole::Replicated {
                self.decide(value, axis.name(), None, false)?;
            }
        }
        Ok(())
    }

    /// Whether something was decided about a value and an axis.
    pub fn is_decided(&self, value: ValueId, axis: &str) -> Result<bool, SpmdError> {
        let atoms = self.mesh.expand(axis)?;
        let entry = self.annotations.values.get(&value);
        Ok(entry.is_some_and(|e| atoms.iter().any(|a| e.decided.contains_key(a))))
    }

    /// How many shards a dim has by the annotations so far, stored and read together.
    pub fn shards(&self, value: ValueId, dim: usize) -> usize {
        let entries = [self.annotations.values.get(&value), self.annotations.stored.get(&value)];
        let axes = entries.into_iter().flatten().flat_map(|e| &e.order);
        axes.filter(|(d, _)| *d == dim).map(|&(_, a)| self.mesh.count(&[a])).product()
    }

    /// The finished annotations.
    pub fn finish(self) -> Annotations {
        self.annotations
    }

    /// The error of a strategy that cannot do what it is asked to.
    pub fn refuse(&self, what: impl Into<String>) -> SpmdError {
        let what = format!("{}: {}", self.by, what.into());
        SpmdError::Strategy { segment: self.program.name.clone(), what }
    }

    fn decide(
        &mut self,
        value: ValueId,
        axis: &str,
        dim: Option<usize>,
        stored: bool,
    ) -> Result<(), SpmdError> {
        let ty = self.program.ty(value);
        if let Some(dim) = dim.filter(|&d| d >= ty.shape.len()) {
            return Err(self.bad(value, format!("there is no dim {dim} in {ty}")));
        }
        let atoms = self.mesh.expand(axis)?;
        let atoms: Vec<Axis> = atoms.into_iter().filter(|&a| !self.is_local(value, a)).collect();
        let entries =
            if stored { &mut self.annotations.stored } else { &mut self.annotations.values };
        let entry = entries.entry(value).or_default();
        for atom in atoms {
            match entry.decided.get(&atom) {
                Some((known, _)) if *known == dim => {}
                Some((known, by)) => {
                    return Err(SpmdError::Conflict(Box::new(Conflict {
                        segment: self.program.name.clone(),
                        value: value_name(self.program, value),
                        axis: atom,
                        first_by: by.clone(),
                        first: wish(*known),
                        second_by: self.by.clone(),
                        second: wish(dim),
                    })));
                }
                None => {
                    entry.decided.insert(atom, (dim, self.by.clone()));
                    entry.order.extend(dim.map(|d| (d, atom)));
                }
            }
        }
        Ok(())
    }

    fn bad(&self, value: ValueId, what: String) -> SpmdError {
        SpmdError::Annotation {
            segment: self.program.name.clone(),
            value: value_name(self.program, value),
            by: self.by.clone(),
            what,
        }
    }
}

fn wish(dim: Option<usize>) -> String {
    dim.map_or_else(|| "replicated".to_owned(), |d| format!("sharded on dim {d}"))
}
