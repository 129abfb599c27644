//! The largest buffers of a step, each kind once.
//!
//! Every block and every micro-batch has its own buffers, of the same kinds. A table of single
//! buffers would list the same residual many times; here buffers of one kind share a row with their
//! count.

use std::collections::BTreeMap;

use phalanx_ir::{Model, Op, OpDef, Program, Role};
use phalanx_script::{
    Buffer, BufferKey, Category, Compiled, MemoryPlan, Part, Script, StateKey, Value,
};

/// Some buffers of one kind and size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) category: Category,
    /// Bytes of each.
    pub(crate) bytes: usize,
    /// How many there are in a step, though not all at the same time.
    pub(crate) count: usize,
}

/// The largest kinds of buffers, the largest first.
pub(crate) fn largest(
    model: &Model,
    compiled: &Compiled,
    script: &Script,
    memory: &MemoryPlan,
    most: usize,
) -> Vec<Row> {
    let mut counts: BTreeMap<(String, &'static str, usize), (Category, usize)> = BTreeMap::new();
    let mut add = |name: String, category: Category, bytes: usize| {
        counts.entry((name, category.name(), bytes)).or_insert((category, 0)).1 += 1;
    };
    for buffer in &script.buffers {
        add(kind_of(model, compiled, script, buffer), buffer.category, buffer.bytes);
    }
    for (action, workspace) in script.actions.iter().zip(&memory.workspaces) {
        if let (Some(run), Some(_)) = (action.run(), workspace) {
            let entry = &script.programs[run.program.0];
            add(
                format!("within {}", entry.program().name),
                Category::Workspace,
                entry.slots().extent,
            );
        }
    }
    let mut rows: Vec<Row> = (counts.into_iter())
        .map(|((name, _, bytes), (category, count))| Row { name, category, bytes, count })
        .collect();
    rows.sort_by_key(|row| usize::MAX - row.bytes);
    rows.truncate(most);
    rows
}

/// What a buffer is, without its instance and micro-batch (`blocks.3/r27@mb0` is residual `r27` of
/// a block), and the op that makes it.
fn kind_of(model: &Model, compiled: &Compiled, script: &Script, buffer: &Buffer) -> String {
    let segment_of = |instance: usize| model.instances()[instance].segment;
    let of = |segment: usize| &model.segments()[segment].name;
    // A unit may have the name of its instance.
    let of_unit = |unit: usize| {
        let name = &script.names.units[unit];
        let instance = model.instances().iter().find(|instance| instance.name == *name);
        instance.map_or(name, |instance| of(instance.segment))
    };
    match &buffer.key {
        BufferKey::Value(Value { instance, port, .. }) => {
            let segment = segment_of(*instance);
            let made = match buffer.category {
                Category::Residuals => made_by(compiled.program(segment, Part::F), port),
                _ => None,
            };
            let made = made.map_or(String::new(), |by| format!(": {by}"));
            format!("{}/{port}{made}", of(segment))
        }
        BufferKey::Parked(Value { instance, port, .. })
        | BufferKey::Back(Value { instance, port, .. }) => {
            format!("{}/{port}, parked", of(segment_of(*instance)))
        }
        BufferKey::Slice(Value { instance, port, .. }) => {
            format!("{}/{port}/slice", of(segment_of(*instance)))
        }
        BufferKey::Random { instance, .. } => format!("{}/key", of(segment_of(*instance))),
        BufferKey::Data { port, .. } => port.to_string(),
        BufferKey::State(StateKey { unit, kind }) => format!("{}/{kind}", of_unit(*unit)),
        BufferKey::Gathered { unit, .. } => format!("{}/gathered", of_unit(*unit)),
        BufferKey::Formed { unit, .. } => format!("{}/formed", of_unit(*unit)),
        other => other.describe(&script.names).to_string(),
    }
}

/// The op whose result an output is, with the parameters that it reads.
fn made_by(program: &Program, port: &str) -> Option<String> {
    let value = program.output_named(port)?.value;
    let (instr, result) = (program.instrs().iter())
        .find_map(|i| i.outputs.iter().position(|&v| v == value).map(|result| (i, result)))?;
    let read = match instr.op {
        // Each result comes from its own operand.
        Op::PackedMatmul(_) => &instr.inputs[result + 1..result + 2],
        _ => &instr.inputs[..],
    };
    let params = program.inputs_with(Role::Param).filter(|p| read.contains(&p.value));
    let params: Vec<&str> = params.map(|port| port.name.as_str()).collect();
    Some(format!("{}({})", instr.op.name(), params.join(", ")).replace("()", ""))
}
