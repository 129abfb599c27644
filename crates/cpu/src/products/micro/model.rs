//! The units in plain code: what their instructions compute, rounding and flushing included.

use super::{CpuUnit, MicroKernel, PanelWord, TileCall};

/// The emulated micro-kernel of a unit, with the shape of the real one.
pub(super) fn of(unit: CpuUnit, word: PanelWord) -> Option<MicroKernel> {
    let wide = |rows, columns, block, step, run| MicroKernel {
        unit,
        word,
        rows,
        columns,
        block,
        step,
        run,
        around: None,
    };
    match (unit, word) {
        (CpuUnit::Avx2, PanelWord::Float) => Some(wide(6, 16, 512, 1, run::<Floats, 16>)),
        (CpuUnit::Avx2, PanelWord::Pair) => Some(wide(6, 16, 512, 1, run::<Widened, 16>)),
        (CpuUnit::Avx512, PanelWord::Float) => Some(wide(6, 64, 512, 1, run::<Floats, 64>)),
        (CpuUnit::Avx512, PanelWord::Pair) => Some(wide(6, 64, 512, 1, run::<Widened, 64>)),
        (CpuUnit::Avx512Bf16, PanelWord::Pair) => Some(wide(6, 64, 512, 1, run::<Dots, 64>)),
        (CpuUnit::Amx, PanelWord::Pair) => Some(wide(32, 32, 256, 16, run::<Tiles, 32>)),
        (CpuUnit::Avx512Bf16 | CpuUnit::Amx, PanelWord::Float) => None,
    }
}

/// How a unit adds up the products of two rows of words.
trait Order {
    fn sum(before: f32, words: usize, at: impl Fn(usize) -> [u32; 2]) -> f32;
}

struct Floats;
struct Widened;
struct Dots;
struct Tiles;

/// One chain, added to what was there at its end.
impl Order for Floats {
    fn sum(before: f32, words: usize, at: impl Fn(usize) -> [u32; 2]) -> f32 {
        let chain = (0..words)
            .map(at)
            .fold(0f32, |sum, [a, b]| f32::from_bits(a).mul_add(f32::from_bits(b), sum));
        before + chain
    }
}

impl Order for Widened {
    fn sum(before: f32, words: usize, at: impl Fn(usize) -> [u32; 2]) -> f32 {
        let chain = (0..words).map(at).fold(0f32, |sum, [a, b]| {
            let sum = low(a).mul_add(low(b), sum);
            high(a).mul_add(high(b), sum)
        });
        before + chain
    }
}

/// `vdpbf16ps`: the odd product first, each rounded; denormal numbers count as zeros everywhere.
impl Order for Dots {
    fn sum(before: f32, words: usize, at: impl Fn(usize) -> [u32; 2]) -> f32 {
        let chain = (0..words).map(at).fold(0f32, |sum, [a, b]| {
            let sum = flushing(high(a), high(b), sum);
            flushing(low(a), low(b), sum)
        });
        before + chain
    }
}

/// `tdpbf16ps`: over 16 words even and odd products are summed apart; their sum is then added to what
/// was there.
impl Order for Tiles {
    fn sum(before: f32, words: usize, at: impl Fn(usize) -> [u32; 2]) -> f32 {
        let mut sum = before;
        for start in (0..words).step_by(16) {
            let (mut even, mut odd) = (0f32, 0f32);
            for [a, b] in (start..start + 16).map(&at) {
                even = flushing(low(a), low(b), even);
                odd = flushing(high(a), high(b), odd);
            }
            sum = flush(flush(sum) + flush(even + odd));
        }
        sum
    }
}

fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xFFFF_0000)
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

fn flushing(a: f32, b: f32, sum: f32) -> f32 {
    flush(flush(a).mul_add(flush(b), flush(sum)))
}

unsafe fn run<O: Order, const COLUMNS: usize>(call: &TileCall) {
    for i in 0..call.rows {
        for j in 0..COLUMNS {
            // SAFETY: the caller gives as many rows and words as it says, and a whole tile.
            unsafe {
                let place = call.tile.add(i * call.tile_stride + j);
                let row = call.row(i);
                let at = |p: usize| {
                    let left = row.add(p * 4).cast::<u32>().read_unaligned();
                    [left, *call.right.add(p * COLUMNS + j)]
                };
                let before = if call.add { *place } else { 0.0 };
                *place = O::sum(before, call.words, at);
            }
        }
    }
}
