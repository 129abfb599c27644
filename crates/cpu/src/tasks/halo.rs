//! Rows of neighbours: an operand whose height or width is sharded is copied into scratch memory, with room
//! around it, and ranks send each other what lies at their edges.

use phalanx_call::{ALIGN, Slot};
use phalanx_comm::PlannedEdge;
use phalanx_engine::EngineError;
use phalanx_ir::Halo;

use super::transfer::Transfer;
use super::{Access, Context, Operation, Share, Task, Tasks, Var, task};
use crate::requirements::CpuRequirements;

/// The operands of an instruction with what its windows read of neighbours, and the tasks that make them.
pub(super) fn compile(op: &Operation<'_>) -> Result<(Tasks, Vec<Var>), EngineError> {
    let mut tasks = Tasks::new();
    let mut operands: Vec<Var> = (0..op.instr.inputs.len()).map(|i| op.input(i)).collect();
    for around in Halo::rooms(op.program, op.instr, offset(op), ALIGN) {
        let operand = &mut operands[around.operand];
        let scratch =
            op.scratch.ok_or_else(|| op.unsupported("its scratch memory was not planned"))?;
        let (at, corner) = (scratch + around.at, around.corner());
        let (shape, valid) = (around.shape().to_vec(), around.valid(&operand.valid));
        let room = Var { slot: Slot::Workspace(at), dtype: operand.dtype, shape, valid };
        tasks.push(task(Inset { from: operand.clone(), to: room.clone(), corner }));
        for halo in &around.halos {
            tasks.extend(exchange(op, halo, &room, (at, corner), operand)?);
        }
        *operand = room;
    }
    Ok((tasks, operands))
}

/// Where in the instruction's scratch memory its operands with a halo begin.
fn offset(op: &Operation<'_>) -> usize {
    let requirements = CpuRequirements { products: *op.products };
    phalanx_call::Requirements::exchange_offset(&requirements, op.program, op.instr)
}

/// Both transfers along one dim.
fn exchange(
    op: &Operation<'_>,
    halo: &Halo,
    room: &Var,
    (at, corner): (usize, [usize; 2]),
    block: &Var,
) -> Result<Tasks, EngineError> {
    let place = (op.program.mesh(), op.rank);
    let edges = PlannedEdge::of(halo, place, corner, block.shape[halo.reach.dim]);
    let mut tasks = Tasks::new();
    for PlannedEdge { op: kind, blocks, source, target } in
        edges.map_err(|why| op.unsupported(why))?
    {
        let call =
            op.plan(|endpoint, site| endpoint.call(site, &halo.axes, kind, room.dtype, blocks))?;
        let part = |first: usize| {
            let elements = room.elements() - first;
            let slot = Slot::Workspace(at + first * room.dtype.size());
            Var { slot, dtype: room.dtype, shape: vec![elements], valid: vec![elements] }
        };
        tasks.push(task(Transfer::of(vec![(0, call)], part(source), part(target))));
    }
    Ok(tasks)
}

/// A block in the middle of a larger one.
struct Inset {
    from: Var,
    to: Var,
    /// Lines above it and columns before it.
    corner: [usize; 2],
}

impl Task for Inset {
    fn accesses(&self, share: Share) -> Vec<Access> {
        let images = share.of(self.from.shape[0]);
        let of = |var: &Var| {
            let each = var.elements() / var.shape[0].max(1);
            images.start * each..images.end * each
        };
        vec![self.from.reads(of(&self.from)), self.to.writes(of(&self.to))]
    }

    fn run(&self, cx: &Context<'_>) {
        let size = self.from.dtype.size();
        let [_, height, width, channels] = [0, 1, 2, 3].map(|dim| self.from.shape[dim]);
        let bytes = width * channels * size;
        for image in cx.share.of(self.from.shape[0]) {
            // What no neighbour fills is planned all the same, and must not hold what was there.
            let each = self.to.elements() / self.to.shape[0] * size;
            // SAFETY: the task declared that it writes this worker's images.
            unsafe { cx.ptr::<u8>(&self.to).add(image * each).write_bytes(0, each) };
            for line in 0..height {
                let from = (image * height + line) * bytes;
                let row = image * self.to.shape[1] + line + self.corner[0];
                let to = (row * self.to.shape[2] + self.corner[1]) * channels * size;
                // SAFETY: the task declared both accesses; the line lies in this worker's images, and
                // scratch memory overlaps no operand.
                unsafe {
                    let (source, target) = (cx.ptr::<u8>(&self.from), cx.ptr::<u8>(&self.to));
                    std::ptr::copy_nonoverlapping(source.add(from), target.add(to), bytes);
                }
            }
        }
    }
}
