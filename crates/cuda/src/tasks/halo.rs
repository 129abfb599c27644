//! Rows of neighbours: an operand whose height or width is sharded is copied into scratch memory, with room
//! around it, and ranks send each other what lies at their edges.

use phalanx_call::{ALIGN, Requirements, Slot};
use phalanx_comm::PlannedEdge;
use phalanx_engine::EngineError;
use phalanx_ir::Halo;

use super::collective::{Extent, Transfer, plan};
use super::movement::walked;
use super::{Operation, Place, Task, Tasks, Var};
use crate::requirements::CudaRequirements;

/// The operands of an instruction with what its windows read of neighbours, and the tasks that make them.
pub(super) fn compile(op: &mut Operation<'_>) -> Result<(Tasks, Vec<Var>), EngineError> {
    let (mut tasks, mut operands): (Tasks, Vec<Var>) = (vec![], op.inputs());
    let start = CudaRequirements::default().exchange_offset(op.program, op.instr);
    for around in Halo::rooms(op.program, op.instr, start, ALIGN) {
        let operand = &mut operands[around.operand];
        let scratch =
            op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
        let slot = Slot::Workspace(scratch + around.at);
        let (shape, valid) = (around.shape().to_vec(), around.valid(&operand.valid));
        let room = Var { slot, dtype: operand.dtype, shape, valid };
        let corner = around.corner();
        // What no neighbour fills must not hold what was there.
        tasks.push(Task::Clear { to: room.place(), bytes: room.bytes() });
        let strides = room.strides();
        let inset = corner[0] * strides[1] + corner[1] * strides[2];
        let walks = [&operand.strides()[..], &strides];
        tasks.push(walked(op, [operand, &room], &operand.shape, [0, inset], walks));
        for halo in &around.halos {
            tasks.extend(exchange(op, halo, &room, corner, operand.shape[halo.reach.dim])?);
        }
        *operand = room;
    }
    Ok((tasks, operands))
}

/// Both transfers along one dim, of which a block has `len` elements.
fn exchange(
    op: &mut Operation<'_>,
    halo: &Halo,
    room: &Var,
    corner: [usize; 2],
    len: usize,
) -> Result<Tasks, EngineError> {
    let edges = PlannedEdge::of(halo, (op.program.mesh(), op.rank), corner, len);
    let mut tasks = Tasks::new();
    for edge in edges.map_err(|why| op.unsupported(why))? {
        let call =
            plan(op, |line, at| line.call(at, &halo.axes, edge.op, room.dtype, edge.blocks))?;
        let part = |first: usize| -> Option<(Place, Extent)> {
            let bytes = first * room.dtype.size();
            Some((room.place().add(bytes), Extent::Bytes(room.bytes() - bytes)))
        };
        tasks.push(Task::Transfer(Transfer {
            calls: vec![(0, call)],
            source: part(edge.source),
            target: part(edge.target),
            partly: true,
        }));
    }
    Ok(tasks)
}
