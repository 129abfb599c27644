//! Tiles of 6 × 64 with 512-bit vectors: 24 sums, four vectors of the right operand and one of the left
//! fill the registers.

use std::arch::x86_64::*;

use super::{MicroKernel, PanelWord, TileCall};
use crate::products::units::CpuUnit;

/// Singles.
pub(super) const FLOATS: MicroKernel = kernel(CpuUnit::Avx512, PanelWord::Float, run::<Floats>);
/// Pairs that are widened to singles.
pub(super) const PAIRS: MicroKernel = kernel(CpuUnit::Avx512, PanelWord::Pair, run::<Widened>);
/// Pairs by `vdpbf16ps`.
pub(super) const DOTS: MicroKernel = kernel(CpuUnit::Avx512Bf16, PanelWord::Pair, dots);

const ROWS: usize = 6;
/// Vectors in a row of a tile.
const VECTORS: usize = 4;
const LANES: usize = 16;
const COLUMNS: usize = VECTORS * LANES;

const fn kernel(unit: CpuUnit, word: PanelWord, run: unsafe fn(&TileCall)) -> MicroKernel {
    MicroKernel { unit, word, rows: ROWS, columns: COLUMNS, block: 512, step: 1, run, around: None }
}

/// What a multiplication of words is made of.
trait Lanes {
    /// How many multiplications a word takes.
    const PARTS: usize;
    /// The part of each word that one of them takes.
    unsafe fn part<const PART: usize>(words: __m512i) -> __m512i;
    /// `sum + a·b`.
    unsafe fn add(sum: __m512, a: __m512i, b: __m512i) -> __m512;
}

struct Floats;
struct Widened;
struct Dots;

impl Lanes for Floats {
    const PARTS: usize = 1;
    #[inline(always)]
    unsafe fn part<const PART: usize>(words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: the caller's: the processor has AVX-512.
        unsafe { _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum) }
    }
}

impl Lanes for Widened {
    const PARTS: usize = 2;
    #[inline(always)]
    unsafe fn part<const PART: usize>(words: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe {
            match PART {
                0 => _mm512_slli_epi32::<16>(words),
                _ => _mm512_and_si512(words, _mm512_set1_epi32(-0x1_0000)),
            }
        }
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { Floats::add(sum, a, b) }
    }
}

impl Lanes for Dots {
    const PARTS: usize = 1;
    #[inline(always)]
    unsafe fn part<const PART: usize>(words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn add(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
        // SAFETY: the caller's: the processor has AVX512-BF16; both types are 64 bytes of pairs.
        unsafe {
            _mm512_dpbf16_ps(
                sum,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        }
    }
}

/// The tile of `ROWS` rows or fewer, which are compiled one by one.
macro_rules! by_height {
    ($call:expr, $tile:ident $(, $lanes:ty)?) => {
        match $call.rows {
            1 => $tile::<$($lanes,)? 1>($call),
            2 => $tile::<$($lanes,)? 2>($call),
            3 => $tile::<$($lanes,)? 3>($call),
            4 => $tile::<$($lanes,)? 4>($call),
            5 => $tile::<$($lanes,)? 5>($call),
            6 => $tile::<$($lanes,)? 6>($call),
            rows => unreachable!("a tile has 1 to 6 rows, not {rows}"),
        }
    };
}
pub(super) use by_height;

unsafe fn run<L: Lanes>(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { by_height!(call, wide, L) }
}

unsafe fn dots(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { by_height!(call, pairs) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn wide<L: Lanes, const HEIGHT: usize>(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { tile::<L, HEIGHT>(call) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pairs<const HEIGHT: usize>(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { tile::<Dots, HEIGHT>(call) }
}

#[inline(always)]
unsafe fn tile<L: Lanes, const HEIGHT: usize>(call: &TileCall) {
    // SAFETY: the caller gives as many rows and words as it says, and a whole tile, to a processor that
    // has the unit.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; HEIGHT];
        for p in 0..call.words {
            step::<L, HEIGHT, 0>(call, p, &mut sums);
            if L::PARTS == 2 {
                step::<L, HEIGHT, 1>(call, p, &mut sums);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let to = call.tile.add(i * call.tile_stride + v * LANES);
                let sum = if call.add { _mm512_add_ps(_mm512_loadu_ps(to), sum) } else { sum };
                _mm512_storeu_ps(to, sum);
            }
        }
    }
}

/// One part of word `p` of all rows and columns.
#[inline(always)]
unsafe fn step<L: Lanes, const HEIGHT: usize, const PART: usize>(
    call: &TileCall,
    p: usize,
    sums: &mut [[__m512; VECTORS]; HEIGHT],
) {
    // SAFETY: as in `tile`.
    unsafe {
        let right = call.right.add(p * COLUMNS);
        let mut b = [_mm512_setzero_si512(); VECTORS];
        for (v, b) in b.iter_mut().enumerate() {
            *b = L::part::<PART>(_mm512_loadu_si512(right.add(v * LANES).cast()));
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let word = call.row(i).add(p * 4).cast::<i32>().read_unaligned();
            let a = L::part::<PART>(_mm512_set1_epi32(word));
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = L::add(*sum, a, b);
            }
        }
    }
}
