//! Tiles of 6 × 16 with 256-bit vectors: 12 sums, two vectors of the right operand and one of the left
//! fill the registers.

use std::arch::x86_64::*;

use super::avx512::by_height;
use super::{MicroKernel, PanelWord, TileCall};
use crate::products::units::CpuUnit;

/// Singles.
pub(super) const FLOATS: MicroKernel = kernel(CpuUnit::Avx2, PanelWord::Float, run::<Floats>);
/// Pairs that are widened to singles.
pub(super) const PAIRS: MicroKernel = kernel(CpuUnit::Avx2, PanelWord::Pair, run::<Widened>);

const ROWS: usize = 6;
/// Vectors in a row of a tile.
const VECTORS: usize = 2;
const LANES: usize = 8;
const COLUMNS: usize = VECTORS * LANES;

const fn kernel(unit: CpuUnit, word: PanelWord, run: unsafe fn(&TileCall)) -> MicroKernel {
    MicroKernel { unit, word, rows: ROWS, columns: COLUMNS, block: 512, step: 1, run, around: None }
}

/// What a multiplication of words is made of.
trait Lanes {
    /// How many multiplications a word takes.
    const PARTS: usize;
    /// The part of each word that one of them takes.
    unsafe fn part<const PART: usize>(words: __m256i) -> __m256i;
    /// `sum + a·b`.
    unsafe fn add(sum: __m256, a: __m256i, b: __m256i) -> __m256;
}

struct Floats;
struct Widened;

impl Lanes for Floats {
    const PARTS: usize = 1;
    #[inline(always)]
    unsafe fn part<const PART: usize>(words: __m256i) -> __m256i {
        words
    }
    #[inline(always)]
    unsafe fn add(sum: __m256, a: __m256i, b: __m256i) -> __m256 {
        // SAFETY: the caller's: the processor has AVX2 with FMA.
        unsafe { _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sum) }
    }
}

impl Lanes for Widened {
    const PARTS: usize = 2;
    #[inline(always)]
    unsafe fn part<const PART: usize>(words: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe {
            match PART {
                0 => _mm256_slli_epi32::<16>(words),
                _ => _mm256_and_si256(words, _mm256_set1_epi32(-0x1_0000)),
            }
        }
    }
    #[inline(always)]
    unsafe fn add(sum: __m256, a: __m256i, b: __m256i) -> __m256 {
        // SAFETY: as above.
        unsafe { Floats::add(sum, a, b) }
    }
}

unsafe fn run<L: Lanes>(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { by_height!(call, wide, L) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn wide<L: Lanes, const HEIGHT: usize>(call: &TileCall) {
    // SAFETY: the caller's.
    unsafe { tile::<L, HEIGHT>(call) }
}

#[inline(always)]
unsafe fn tile<L: Lanes, const HEIGHT: usize>(call: &TileCall) {
    // SAFETY: the caller gives as many rows and words as it says, and a whole tile, to a processor that
    // has the unit.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); VECTORS]; HEIGHT];
        for p in 0..call.words {
            step::<L, HEIGHT, 0>(call, p, &mut sums);
            if L::PARTS == 2 {
                step::<L, HEIGHT, 1>(call, p, &mut sums);
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let to = call.tile.add(i * call.tile_stride + v * LANES);
                let sum = if call.add { _mm256_add_ps(_mm256_loadu_ps(to), sum) } else { sum };
                _mm256_storeu_ps(to, sum);
            }
        }
    }
}

/// One part of word `p` of all rows and columns.
#[inline(always)]
unsafe fn step<L: Lanes, const HEIGHT: usize, const PART: usize>(
    call: &TileCall,
    p: usize,
    sums: &mut [[__m256; VECTORS]; HEIGHT],
) {
    // SAFETY: as in `tile`.
    unsafe {
        let right = call.right.add(p * COLUMNS);
        let mut b = [_mm256_setzero_si256(); VECTORS];
        for (v, b) in b.iter_mut().enumerate() {
            *b = L::part::<PART>(_mm256_loadu_si256(right.add(v * LANES).cast()));
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            let word = call.row(i).add(p * 4).cast::<i32>().read_unaligned();
            let a = L::part::<PART>(_mm256_set1_epi32(word));
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = L::add(*sum, a, b);
            }
        }
    }
}
