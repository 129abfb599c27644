//! Tiles of 32 × 32 by AMX: four tiles of sums, two of the left operand and two of the right one are all
//! that a processor has. Each instruction takes 16 × 16 sums over 16 words.
//!
//! Rust has no stable names for these instructions, so they are written in assembly.

use std::arch::asm;

use super::{MicroKernel, PanelWord, TileCall};
use crate::products::units::CpuUnit;

/// Pairs by `tdpbf16ps`. A block of a panel is 32 KiB, which leaves room for the left operand's tiles in
/// the first cache.
pub(super) const TILES: MicroKernel = MicroKernel {
    unit: CpuUnit::Amx,
    word: PanelWord::Pair,
    rows: 2 * SIDE,
    columns: 2 * SIDE,
    block: 256,
    step: SIDE,
    run,
    around: Some([configure, release]),
};

const SIDE: usize = 16;
/// Bytes of a row of a tile.
const ROW: usize = 64;
/// Bytes from one row of a panel to the next.
const PANEL_ROW: usize = 2 * ROW;

/// The shapes of all eight tiles: palette 1, no row to restart from, 64 bytes in each of 16 rows.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        row_bytes[tile] = ROW as u16;
        rows[tile] = SIDE as u8;
        tile += 1;
    }
    Shapes { palette: 1, start: 0, reserved: [0; 14], row_bytes, rows }
};

unsafe fn configure() {
    // SAFETY: the caller's: the processor has tiles, and the process may use them.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly));
    }
}

/// Gives the tiles up, so that the system need not save them when it switches threads.
unsafe fn release() {
    // SAFETY: as above.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

unsafe fn run(call: &TileCall) {
    debug_assert!(call.rows == 2 * SIDE && call.words.is_multiple_of(SIDE) && call.words > 0);
    // SAFETY: the caller gives whole tiles, has configured them on this thread, and the processor has
    // them.
    unsafe {
        asm!(
            "test {add:l}, {add:l}",
            "jz 2f",
            "tileloadd tmm0, [{tile} + {tile_row}]",
            "tileloadd tmm1, [{tile} + {tile_row} + 64]",
            "tileloadd tmm2, [{lower} + {tile_row}]",
            "tileloadd tmm3, [{lower} + {tile_row} + 64]",
            "jmp 3f",
            "2:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm4, [{left} + {left_row}]",
            "tileloadd tmm6, [{right} + {panel_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{right} + {panel_row} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{below} + {left_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, 64",
            "add {below}, 64",
            "add {right}, 2048",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{tile} + {tile_row}], tmm0",
            "tilestored [{tile} + {tile_row} + 64], tmm1",
            "tilestored [{lower} + {tile_row}], tmm2",
            "tilestored [{lower} + {tile_row} + 64], tmm3",
            add = in(reg) usize::from(call.add),
            tile = in(reg) call.tile,
            lower = in(reg) call.tile.add(SIDE * call.tile_stride),
            tile_row = in(reg) call.tile_stride * size_of::<f32>(),
            left = inout(reg) call.left => _,
            below = inout(reg) call.row(SIDE) => _,
            left_row = in(reg) call.left_bytes,
            right = inout(reg) call.right => _,
            panel_row = in(reg) PANEL_ROW,
            steps = inout(reg) call.words / SIDE => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
