//! A program: a straight-line typed list of instructions over global shapes.

use std::collections::HashMap;

use crate::dtype::DType;
use crate::error::IrError;
use crate::mesh::Mesh;
use crate::ops::{Op, OpDef};
use crate::rule::Rule;
use crate::types::{Form, TensorType};
use crate::verify;

/// A value of a program: an input, or a result of an instruction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueId(pub u32);

impl ValueId {
    /// The value's position in [`Program::values`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The role of a program's input or output in the script that runs it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Role {
    /// A value that flows from one segment to the next.
    Boundary,
    /// A parameter, in the layout it is read in.
    Param,
    /// Part of a batch: token ids, targets.
    Data,
    /// A scalar of the step: learning rate, 1/valid tokens, clip coefficient.
    Scalar,
    /// The key of an instance's random numbers for a micro-batch.
    Random,
    /// A value that one phase keeps for a later one.
    Residual,
    /// The gradient of a boundary value.
    Cotangent,
    /// A parameter's gradient: the first of a step overwrites its buffer, later ones add.
    Gradient,
    /// Optimizer state, or a parameter as the optimizer sees it; updated in place.
    State,
    /// A term of the loss.
    Loss,
    /// A value that can be read after a run: logits, a norm.
    Probe,
}

impl Role {
    /// Every role, in no particular order.
    pub const ALL: [Role; 11] = [
        Role::Boundary,
        Role::Param,
        Role::Data,
        Role::Scalar,
        Role::Random,
        Role::Residual,
        Role::Cotangent,
        Role::Gradient,
        Role::State,
        Role::Loss,
        Role::Probe,
    ];

    /// The word in program text.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Boundary => "boundary",
            Role::Param => "param",
            Role::Data => "data",
            Role::Scalar => "scalar",
            Role::Random => "random",
            Role::Residual => "residual",
            Role::Cotangent => "cotangent",
            Role::Gradient => "gradient",
            Role::State => "state",
            Role::Loss => "loss",
            Role::Probe => "probe",
        }
    }
}

/// Which phase of a joint graph an instruction belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Phase {
    /// Forward.
    #[default]
    F,
    /// Gradients of inputs: what the previous stage waits for.
    B,
    /// Gradients of weights: may be deferred.
    W,
}

/// A named input or output.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    /// The name by which scripts and other programs know it.
    pub name: String,
    /// The value.
    pub value: ValueId,
    /// Its role in the script.
    pub role: Role,
    /// Of a cotangent: the name of the boundary value whose gradient it is.
    pub of: Option<String>,
}

impl Port {
    /// The cotangent of a boundary value. Its name is only for people; `of` names the boundary
    /// value.
    fn cotangent(boundary: &str, value: ValueId) -> Self {
        let of = Some(boundary.to_owned());
        Self { name: format!("d.{boundary}"), value, role: Role::Cotangent, of }
    }
}

/// One instruction.
#[derive(Clone, PartialEq, Debug)]
pub struct Instr {
    /// The op with its attributes.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<ValueId>,
    /// Its results.
    pub outputs: Vec<ValueId>,
    /// The phase it belongs to.
    pub phase: Phase,
}

/// A straight-line typed program over global shapes, the same on every rank of its mesh.
///
/// Values are in single assignment form: each is an input or the result of one instruction, and
/// every operand is defined before it is used. [`Program::push`] ensures that, and checks types.
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// The name, for messages and pictures.
    pub name: String,
    mesh: Mesh,
    values: Vec<TensorType>,
    inputs: Vec<Port>,
    instrs: Vec<Instr>,
    outputs: Vec<Port>,
    notes: Vec<(ValueId, String)>,
}

impl Program {
    /// An empty program on a mesh.
    pub fn new(name: impl Into<String>, mesh: Mesh) -> Self {
        Self {
            name: name.into(),
            mesh,
            values: Vec::new(),
            inputs: Vec::new(),
            instrs: Vec::new(),
            outputs: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The mesh it runs on.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The types of all values, by [`ValueId::index`].
    pub fn values(&self) -> &[TensorType] {
        &self.values
    }

    /// The type of a value.
    pub fn ty(&self, value: ValueId) -> &TensorType {
        &self.values[value.index()]
    }

    /// The inputs in declaration order.
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// The instructions in order.
    pub fn instrs(&self) -> &[Instr] {
        &self.instrs
    }

    /// The outputs in declaration order.
    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// The layouts that the author asks for, as text: the names of axes are known only when the
    /// program is partitioned. Notes belong to this program: gradients, partitioning and passes
    /// read them or drop them.
    pub fn notes(&self) -> &[(ValueId, String)] {
        &self.notes
    }

    /// Asks for a layout of a value.
    pub fn note(&mut self, value: ValueId, layout: impl Into<String>) {
        self.notes.push((value, layout.into()));
    }

    /// The input of this name.
    pub fn input_named(&self, name: &str) -> Option<&Port> {
        self.inputs.iter().find(|p| p.name == name)
    }

    /// The output of this name.
    pub fn output_named(&self, name: &str) -> Option<&Port> {
        self.outputs.iter().find(|p| p.name == name)
    }

    /// Inputs with a role, in order.
    pub fn inputs_with(&self, role: Role) -> impl Iterator<Item = &Port> {
        self.inputs.iter().filter(move |p| p.role == role)
    }

    /// Outputs with a role, in order.
    pub fn outputs_with(&self, role: Role) -> impl Iterator<Item = &Port> {
        self.outputs.iter().filter(move |p| p.role == role)
    }

    /// Declares an input.
    pub fn input(&mut self, name: impl Into<String>, role: Role, ty: TensorType) -> ValueId {
        let value = self.fresh(ty);
        self.inputs.push(Port { name: name.into(), value, role, of: None });
        value
    }

    /// Declares the cotangent of a boundary value as an input.
    pub fn cotangent_input(&mut self, boundary: &str, ty: TensorType) -> ValueId {
        let value = self.fresh(ty);
        self.inputs.push(Port::cotangent(boundary, value));
        value
    }

    /// Declares an input with the name and the role of another program's port.
    pub fn input_like(&mut self, port: &Port, ty: TensorType) -> ValueId {
        let value = self.fresh(ty);
        self.inputs.push(Port { value, ..port.clone() });
        value
    }

    /// Declares an output.
    pub fn output(&mut self, name: impl Into<String>, role: Role, value: ValueId) {
        self.outputs.push(Port { name: name.into(), value, role, of: None });
    }

    /// Declares the cotangent of a boundary value as an output.
    pub fn cotangent_output(&mut self, boundary: &str, value: ValueId) {
        self.outputs.push(Port::cotangent(boundary, value));
    }

    /// Declares an output with the name and the role of another program's port.
    pub fn output_like(&mut self, port: &Port, value: ValueId) {
        self.outputs.push(Port { value, ..port.clone() });
    }

    /// Appends an instruction; its result types follow from the op's rule.
    pub fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        phase: Phase,
    ) -> Result<Vec<ValueId>, IrError> {
        let types: Vec<&TensorType> = inputs.iter().map(|&v| self.ty(v)).collect();
        let results = self.result_types(&op, inputs, &types)?;
        let outputs = results.into_iter().map(|ty| self.fresh(ty)).collect::<Vec<_>>();
        self.instrs.push(Instr { op, inputs: inputs.to_vec(), outputs: outputs.clone(), phase });
        Ok(outputs)
    }

    /// Appends an instruction whose result types are given, unchecked: for the parser and for tests
    /// of the verifier, which need wrong programs.
    pub fn push_unchecked(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        types: Vec<TensorType>,
        phase: Phase,
    ) -> Vec<ValueId> {
        let outputs = types.into_iter().map(|ty| self.fresh(ty)).collect::<Vec<_>>();
        self.instrs.push(Instr { op, inputs: inputs.to_vec(), outputs: outputs.clone(), phase });
        outputs
    }

    /// A constant of this type and value.
    pub fn constant(
        &mut self,
        dtype: DType,
        shape: &[usize],
        value: f64,
        phase: Phase,
    ) -> Result<ValueId, IrError> {
        let op = Op::Fill(crate::ops::Fill { dtype, shape: shape.to_vec(), value });
        Ok(self.push(op, &[], phase)?[0])
    }

    /// The same program with values numbered as its text lists them: inputs first, then results.
    pub fn canonical(&self) -> Self {
        let order = (self.inputs.iter().map(|p| p.value))
            .chain(self.instrs.iter().flat_map(|i| i.outputs.iter().copied()));
        let mut new = vec![ValueId(u32::MAX); self.values.len()];
        let mut values = Vec::with_capacity(self.values.len());
        for old in order {
            new[old.index()] = ValueId(values.len() as u32);
            values.push(self.ty(old).clone());
        }
        let ports = |ports: &[Port]| -> Vec<Port> {
            ports.iter().map(|p| Port { value: new[p.value.index()], ..p.clone() }).collect()
        };
        let ids =
            |ids: &[ValueId]| -> Vec<ValueId> { ids.iter().map(|v| new[v.index()]).collect() };
        let instrs = (self.instrs.iter())
            .map(|i| Instr { inputs: ids(&i.inputs), outputs: ids(&i.outputs), ..i.clone() })
            .collect();
        Self {
            name: self.name.clone(),
            mesh: self.mesh.clone(),
            values,
            inputs: ports(&self.inputs),
            instrs,
            outputs: ports(&self.outputs),
            notes: self.notes.iter().map(|(v, text)| (new[v.index()], text.clone())).collect(),
        }
    }

    /// FLOPs of the whole program over all ranks, multiplications and additions counted separately.
    pub fn flops(&self) -> u64 {
        self.instrs.iter().map(|i| self.instr_flops(i)).sum()
    }

    /// FLOPs of one instruction.
    pub fn instr_flops(&self, instr: &Instr) -> u64 {
        let shapes = |ids: &[ValueId]| -> Vec<&[usize]> {
            ids.iter().map(|&v| self.ty(v).shape.as_slice()).collect()
        };
        instr.op.flops(&shapes(&instr.inputs), &shapes(&instr.outputs))
    }

    /// The sharding rule of an instruction.
    pub fn rule(&self, instr: &Instr) -> Rule {
        let shapes = |ids: &[ValueId]| -> Vec<&[usize]> {
            ids.iter().map(|&v| self.ty(v).shape.as_slice()).collect()
        };
        instr.op.rule(&shapes(&instr.inputs), &shapes(&instr.outputs))
    }

    /// For each value, the index of the last instruction that reads it; outputs count as read at
    /// the end, values never read have none. A started collective reads its operand until its done.
    pub fn last_uses(&self) -> Vec<Option<usize>> {
        let mut last = vec![None; self.values.len()];
        let mut started: HashMap<ValueId, &[ValueId]> = HashMap::new();
        for (index, instr) in self.instrs.iter().enumerate() {
            for value in &instr.inputs {
                last[value.index()] = Some(index);
                for operand in started.remove(value).into_iter().flatten() {
                    last[operand.index()] = Some(index);
                }
            }
            let handles = instr.outputs.iter().filter(|&&v| self.ty(v).pending);
            started.extend(handles.map(|&handle| (handle, instr.inputs.as_slice())));
        }
        for port in &self.outputs {
            last[port.value.index()] = Some(self.instrs.len());
        }
        last
    }

    fn fresh(&mut self, ty: TensorType) -> ValueId {
        self.values.push(ty);
        ValueId((self.values.len() - 1) as u32)
    }

    fn result_types(
        &self,
        op: &Op,
        inputs: &[ValueId],
        types: &[&TensorType],
    ) -> Result<Vec<TensorType>, IrError> {
        let shaped = op.infer(types).map_err(|what| IrError::operands(op.name(), what))?;
        let form = match types.first().map(|t| t.form) {
            Some(Form::Unit) if op.gives_units() => Form::Unit,
            _ => Form::Tensor,
        };
        if let Op::Collective(collective) = op {
            return Ok(vec![collective.result_of(types, &self.mesh)?]);
        }
        let ins: Vec<&[usize]> = types.iter().map(|t| t.shape.as_slice()).collect();
        let outs: Vec<&[usize]> = shaped.iter().map(|(_, s)| s.as_slice()).collect();
        let results = (op.rule(&ins, &outs).infer(&self.mesh, types))
            .map_err(|reason| Box::new(verify::explain(self, op, inputs, &[], &reason)))?;
        (shaped.into_iter().zip(results))
            .map(|((dtype, shape), (layout, padded))| {
                let mut ty = TensorType::new(dtype, shape).with_padded(padded)?;
                (ty.form, ty.layout) = (form, layout);
                Ok(ty)
            })
            .collect()
    }
}
