//! Models: parameters, the segments that name them, and how segments follow each other.
//!
//! A model is written once, for one device. Parameters belong to the model; segments name them by
//! local names (`attn.q`) that each instance binds to the model's (`blocks.3.attn.q`). Instances of
//! one segment share its program, so a 96-layer model is differentiated and partitioned once per
//! distinct segment.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::IrError;
use crate::ops::Deal;
use crate::program::{Program, Role};

/// How a parameter is initialised; every element is a pure function of (seed, parameter name,
/// global element index).
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Every element the same.
    Constant(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// Uniform in `[−bound, bound)`.
    Uniform(f64),
}

/// A parameter of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// The model-wide name, such as `blocks.3.attn.q`.
    pub name: String,
    /// The global shape.
    pub shape: Vec<usize>,
    /// Its initial values.
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decay: bool,
    /// To how many ranks its first dim is distributed round robin: programs read it as the elements 0, n, 2n … of the first
    /// rank, then those of the second, and so on ([`Deal`]). Its name, initial values and checkpoints are of its own
    /// order. 1: programs read that.
    pub dealt: usize,
}

impl Param {
    /// How the first dim is distributed, if it is.
    pub fn deal(&self) -> Option<Deal> {
        (self.dealt > 1).then(|| {
            let experts = *self.shape.first().expect("what is distributed has a first dim");
            Deal { experts, parts: self.dealt, per: 1 }
        })
    }

    /// Elements of the whole parameter.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// One use of a segment: its program, and the model's parameter for each of its local ones.
#[derive(Clone, PartialEq, Debug)]
pub struct Instance {
    /// The name for messages and pictures, such as `blocks.3`.
    pub name: String,
    /// Index into [`Model::segments`].
    pub segment: usize,
    /// Local parameter name → index into [`Model::params`].
    pub params: BTreeMap<String, usize>,
}

/// Parameters and a chain of segments. Boundary values are matched by name: a segment reads what an
/// earlier one returned under that name.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// The name.
    pub name: String,
    params: Vec<Param>,
    segments: Vec<Program>,
    instances: Vec<Instance>,
}

impl Model {
    /// An empty model.
    pub fn new(name: impl Into<String>) -> Self {
        let name = name.into();
        Self { name, params: Vec::new(), segments: Vec::new(), instances: Vec::new() }
    }

    /// Adds a segment's forward program and returns its index.
    pub fn segment(&mut self, program: Program) -> usize {
        self.segments.push(program);
        self.segments.len() - 1
    }

    /// Adds a parameter and returns its index; an existing name is shared if the shape is equal.
    pub fn param(&mut self, param: Param) -> Result<usize, IrError> {
        match self.params.iter().position(|p| p.name == param.name) {
            Some(found) if self.params[found].shape == param.shape => Ok(found),
            Some(found) => Err(self.bad(format!(
                "parameter `{}` has the shape {:?} here, but {:?} elsewhere",
                param.name, param.shape, self.params[found].shape
            ))),
            None => {
                self.params.push(param);
                Ok(self.params.len() - 1)
            }
        }
    }

    /// Appends an instance of a segment; `params` gives, for each local name, the model's parameter.
    pub fn append(
        &mut self,
        name: impl Into<String>,
        segment: usize,
        params: BTreeMap<String, usize>,
    ) -> Result<(), IrError> {
        let name = name.into();
        // Buffers, keys and checkpoints are named after instances.
        if self.instances.iter().any(|i| i.name == name) {
            return Err(
                self.bad(format!("two instances are called `{name}`; each needs its own name"))
            );
        }
        let program = &self.segments[segment];
        for port in program.inputs_with(Role::Param) {
            let shape = &program.ty(port.value).shape;
            match params.get(&port.name).map(|&i| &self.params[i]) {
                Some(param) if param.shape == *shape => {}
                Some(param) => {
                    return Err(self.bad(format!(
                        "`{name}` reads `{}` as {shape:?}, but `{}` is {:?}",
                        port.name, param.name, param.shape
                    )));
                }
                None => {
                    return Err(
                        self.bad(format!("`{name}` does not bind its parameter `{}`", port.name))
                    );
                }
            }
        }
        let given: BTreeSet<&str> = (self.instances.iter())
            .flat_map(|i| self.segments[i.segment].outputs_with(Role::Boundary))
            .map(|p| p.name.as_str())
            .collect();
        for port in program.inputs_with(Role::Boundary) {
            if !given.contains(port.name.as_str()) {
                return Err(self.bad(format!(
                    "`{name}` reads the boundary value `{}`, which no earlier segment returns",
                    port.name
                )));
            }
        }
        self.instances.push(Instance { name, segment, params });
        Ok(())
    }

    /// The same model with other segments, which read and return the same under the same names, and perhaps more.
    pub fn map_segments(&self, segment: impl Fn(&Program) -> Program) -> Self {
        Self { segments: self.segments.iter().map(segment).collect(), ..self.clone() }
    }

    /// The same model, whose programs read some parameters as distributed to so many ranks, which divide their first dim.
    pub fn dealing(mut self, parts: usize, which: impl Fn(&Param) -> bool) -> Self {
        for param in self.params.iter_mut().filter(|param| which(param)) {
            param.dealt = parts;
        }
        self
    }

    /// The parameters in order of first use.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The distinct segments' forward programs.
    pub fn segments(&self) -> &[Program] {
        &self.segments
    }

    /// The chain of instances.
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// The forward program of an instance.
    pub fn program(&self, instance: usize) -> &Program {
        &self.segments[self.instances[instance].segment]
    }

    /// Elements of all parameters.
    pub fn elements(&self) -> usize {
        self.params.iter().map(Param::elements).sum()
    }

    /// How many instances read each parameter: two for a tied embedding.
    pub fn users(&self) -> Vec<usize> {
        let mut users = vec![0; self.params.len()];
        for instance in &self.instances {
            let distinct: BTreeSet<usize> = instance.params.values().copied().collect();
            for param in distinct {
                users[param] += 1;
            }
        }
        users
    }

    fn bad(&self, what: String) -> IrError {
        IrError::Model { model: self.name.clone(), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_instances_cannot_share_a_name() {
        let mut model = Model::new("twins");
        let segment = model.segment(Program::new("s", crate::mesh::Mesh::single()));
        model.append("a", segment, BTreeMap::new()).unwrap();
        model.append("b", segment, BTreeMap::new()).unwrap();
        let error = model.append("a", segment, BTreeMap::new()).unwrap_err().to_string();
        assert!(error.contains("two instances are called `a`"), "{error}");
        assert_eq!(model.instances().len(), 2);
    }
}
