//! What one rank does for an instruction, from the types alone.

use phalanx_ir::ops::{CollectiveKind, Shaped};
use phalanx_ir::{DType, Exchange, Halo, Instr, Op, OpDef, Program, TensorType, ValueId};

/// What one rank does for an instruction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Work {
    /// FLOPs of matrix products, multiplications and additions counted separately.
    pub flops: u64,
    /// The element type that they read.
    pub dtype: DType,
    /// Bytes read from the rank's own memory.
    pub read: u64,
    /// Bytes written to it.
    pub written: u64,
    /// What it moves between ranks.
    pub wire: Transfer,
}

/// What one rank sends to others.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Transfer {
    /// How many times it waits for the first byte of a message.
    pub rounds: f64,
    /// Bytes that it sends.
    pub bytes: f64,
}

impl Work {
    /// The work of an instruction of a verified program. Padding counts too: it is in memory and is
    /// sent.
    ///
    /// # Panics
    /// If the program is not verified.
    pub fn of(program: &Program, instr: &Instr) -> Self {
        let mesh = program.mesh();
        let local = |ids: &[ValueId]| -> Vec<Shaped> {
            let shaped = |ty: &TensorType| (ty.dtype, ty.local_shape(mesh));
            ids.iter().map(|&v| shaped(program.ty(v))).collect()
        };
        let (ins, outs) = (local(&instr.inputs), local(&instr.outputs));
        Self { wire: Transfer::of(program, instr), ..Self::of_shapes(&instr.op, &ins, &outs) }
    }

    /// The work of an op on operands and results of these local types, without what it moves
    /// between ranks.
    pub fn of_shapes(op: &Op, ins: &[Shaped], outs: &[Shaped]) -> Self {
        fn shapes(side: &[Shaped]) -> Vec<&[usize]> {
            side.iter().map(|(_, shape)| shape.as_slice()).collect()
        }
        let touched = op.touches(ins, outs);
        Self {
            flops: op.flops(&shapes(ins), &shapes(outs)),
            // An instruction without operands makes a constant.
            dtype: ins.first().unwrap_or(&outs[0]).0,
            read: touched.read,
            written: touched.written,
            wire: Transfer::default(),
        }
    }
}

impl Transfer {
    /// What an instruction moves between ranks: a collective, or the exchange inside another op.
    pub fn of(program: &Program, instr: &Instr) -> Self {
        let mesh = program.mesh();
        if let Op::Collective(collective) = &instr.op {
            let given = program.ty(instr.inputs[0]).local_bytes(mesh) as f64;
            let once = Self::collective(&collective.kind, mesh.count(&collective.axes), given);
            return Self { rounds: once.rounds * collective.pieces as f64, ..once };
        }
        let halos = Halo::of(program, instr);
        if !halos.is_empty() {
            // Both neighbours at once; a rank in the middle has two.
            let rounds = halos.len() as f64;
            let slab = |halo: &Halo| halo.slab.iter().product::<usize>() * halo.dtype.size();
            let lines = |halo: &Halo| halo.reach.before + halo.reach.after;
            let bytes = halos.iter().map(|halo| lines(halo) * slab(halo)).sum::<usize>() as f64;
            return Self { rounds, bytes };
        }
        match Exchange::of(program, instr) {
            None => Self::default(),
            Some(exchange) => {
                let given = (exchange.elements() * exchange.dtype.size()) as f64;
                let gather = CollectiveKind::AllGather { dim: 0 };
                Self::collective(&gather, mesh.count(&exchange.axes), given)
            }
        }
    }

    /// A collective over `n` ranks, each of which holds `bytes` before it. Zero if it moves nothing
    /// between ranks.
    pub fn collective(kind: &CollectiveKind, n: usize, bytes: f64) -> Self {
        let ranks = n as f64;
        let (rounds, share) = match kind {
            CollectiveKind::AllGather { .. } => (1.0, ranks - 1.0),
            CollectiveKind::ReduceScatter { .. } | CollectiveKind::AllToAll { .. } => {
                (1.0, (ranks - 1.0) / ranks)
            }
            CollectiveKind::AllReduce => (2.0, 2.0 * (ranks - 1.0) / ranks),
            CollectiveKind::Permute { .. } | CollectiveKind::Turn { .. } => (1.0, 1.0),
            // One rank gives its block to all others, or gets one from each.
            CollectiveKind::BroadcastBlock { .. } | CollectiveKind::ReduceBlock { .. } => {
                (1.0, ranks - 1.0)
            }
            CollectiveKind::Shard { .. }
            | CollectiveKind::ToPartial
            | CollectiveKind::TakeBlock { .. }
            | CollectiveKind::PutBlock { .. }
            | CollectiveKind::Done => return Self::default(),
        };
        match n {
            1 => Self::default(),
            _ => Self { rounds, bytes: share * bytes },
        }
    }

    /// One message of this many bytes.
    pub fn message(bytes: usize) -> Self {
        Self { rounds: 1.0, bytes: bytes as f64 }
    }
}
