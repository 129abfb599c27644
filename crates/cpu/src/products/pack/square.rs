//! A square of 16 × 16 words, on its way from a source to a panel.

/// Words in a row of a square, and rows.
pub(super) const SIDE: usize = 16;

/// The words of a square, row by row.
#[repr(align(64))]
pub(super) struct Square(pub(super) [[u32; SIDE]; SIDE]);

/// How this processor transposes squares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transposer {
    Plain,
    Avx2,
    Avx512,
}

impl Transposer {
    pub(super) fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Plain
    }
}

impl Square {
    pub(super) const ZERO: Self = Self([[0; SIDE]; SIDE]);

    /// Stores the rows, `stride` words apart.
    ///
    /// # Safety
    /// The places are there, and nobody else uses them.
    #[inline(always)]
    pub(super) unsafe fn store(&self, to: *mut u32, stride: usize) {
        for (q, line) in self.0.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { to.add(q * stride).cast::<[u32; SIDE]>().write_unaligned(*line) };
        }
    }

    /// Stores the columns as rows.
    ///
    /// # Safety
    /// As [`Self::store`]; the processor has what the transposer needs.
    #[inline(always)]
    pub(super) unsafe fn store_transposed(&self, how: Transposer, to: *mut u32, stride: usize) {
        // SAFETY: the caller's.
        unsafe {
            match how {
                #[cfg(target_arch = "x86_64")]
                Transposer::Avx512 => x86::transpose_512(self, to, stride),
                #[cfg(target_arch = "x86_64")]
                Transposer::Avx2 => x86::transpose_256(self, to, stride),
                _ => self.turned().store(to, stride),
            }
        }
    }

    fn turned(&self) -> Self {
        Self(std::array::from_fn(|i| std::array::from_fn(|j| self.0[j][i])))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{SIDE, Square};

    /// # Safety
    /// As [`Square::store`].
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn transpose_512(square: &Square, to: *mut u32, stride: usize) {
        let mut r = [_mm512_setzero_si512(); SIDE];
        for (r, line) in r.iter_mut().zip(&square.0) {
            // SAFETY: the row has 64 bytes.
            *r = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
        }
        let mut t = r;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..4 {
            r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
            r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
            r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_i32x4::<0x88>(r[i], r[4 + i]);
            t[4 + i] = _mm512_shuffle_i32x4::<0xdd>(r[i], r[4 + i]);
            t[8 + i] = _mm512_shuffle_i32x4::<0x88>(r[8 + i], r[12 + i]);
            t[12 + i] = _mm512_shuffle_i32x4::<0xdd>(r[8 + i], r[12 + i]);
        }
        for i in 0..8 {
            r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
            r[8 + i] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[8 + i]);
        }
        for (q, &line) in r.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { _mm512_storeu_si512(to.add(q * stride).cast(), line) };
        }
    }

    /// Quarter by quarter.
    ///
    /// # Safety
    /// As [`Square::store`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose_256(square: &Square, to: *mut u32, stride: usize) {
        for (i, j) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            let mut r = [_mm256_setzero_si256(); 8];
            for (q, r) in r.iter_mut().enumerate() {
                // SAFETY: half of the row, 32 bytes.
                *r = unsafe { _mm256_loadu_si256(square.0[i + q].as_ptr().add(j).cast()) };
            }
            let mut t = r;
            for k in 0..4 {
                t[2 * k] = _mm256_unpacklo_epi32(r[2 * k], r[2 * k + 1]);
                t[2 * k + 1] = _mm256_unpackhi_epi32(r[2 * k], r[2 * k + 1]);
            }
            for k in 0..2 {
                r[4 * k] = _mm256_unpacklo_epi64(t[4 * k], t[4 * k + 2]);
                r[4 * k + 1] = _mm256_unpackhi_epi64(t[4 * k], t[4 * k + 2]);
                r[4 * k + 2] = _mm256_unpacklo_epi64(t[4 * k + 1], t[4 * k + 3]);
                r[4 * k + 3] = _mm256_unpackhi_epi64(t[4 * k + 1], t[4 * k + 3]);
            }
            for k in 0..4 {
                let low = _mm256_permute2x128_si256::<0x20>(r[k], r[4 + k]);
                let high = _mm256_permute2x128_si256::<0x31>(r[k], r[4 + k]);
                // SAFETY: the caller's.
                unsafe {
                    _mm256_storeu_si256(to.add((j + k) * stride + i).cast(), low);
                    _mm256_storeu_si256(to.add((j + 4 + k) * stride + i).cast(), high);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transposer_moves_every_word() {
        let square = Square(std::array::from_fn(|i| std::array::from_fn(|j| (i * 100 + j) as u32)));
        let stride = 23;
        for how in [Transposer::Plain, Transposer::here()] {
            let mut to = vec![7; SIDE * stride];
            // SAFETY: there is room for 16 rows, and the processor has this transposer.
            unsafe { square.store_transposed(how, to.as_mut_ptr(), stride) };
            for (at, &word) in to.iter().enumerate() {
                let (i, j) = (at / stride, at % stride);
                let want = if j < SIDE { (j * 100 + i) as u32 } else { 7 };
                assert_eq!(word, want, "{how:?}: {i}, {j}");
            }
        }
    }
}
