//! Products of random shapes, strides, offsets and numbers of threads against sums in double precision,
//! with every unit of this processor and with all units emulated.

use half::bf16;
use phalanx_ir::random::Stream;

use super::*;
use crate::element::CpuElement;
use crate::kernels::matrix::{Mat, MatMut};
use crate::kernels::testing::random;

/// The micro-kernels for such words that can run here: real ones, then emulated ones.
pub(crate) fn kernels(word: PanelWord) -> Vec<(String, MicroKernel)> {
    let here = UnitSet::here().iter().filter_map(|unit| {
        let kernel = MicroKernel::best([unit].into_iter().collect(), word)?;
        Some((unit.name().to_owned(), kernel))
    });
    let emulated = CpuUnit::ALL.into_iter().filter_map(|unit| {
        let kernel = MicroKernel::emulated(unit, word)?;
        Some((format!("emulated {}", unit.name()), kernel))
    });
    here.chain(emulated).collect()
}

/// A matrix inside a larger buffer: by rows or by columns, with a gap between lines, or with gaps
/// between all elements; what lies around it is NaN.
struct Placed<T> {
    data: Vec<T>,
    shape: [usize; 2],
    strides: [usize; 2],
    offset: usize,
}

impl<T: CpuElement<Acc = f32>> Placed<T> {
    fn new(name: &str, shape: [usize; 2], kind: u64, gap: usize) -> Self {
        let [rows, cols] = shape;
        let strides = match kind % 5 {
            0 | 3 => [cols + gap, 1],
            1 | 4 => [1, rows + gap],
            _ => [2 * cols + gap, 2],
        };
        let offset = gap * 3;
        let len = offset + (rows - 1) * strides[0] + (cols - 1) * strides[1] + 1;
        let mut data = vec![T::store(f32::NAN); len];
        let values: Vec<T> = random(name, rows * cols, 1.0);
        for (i, value) in values.into_iter().enumerate() {
            data[offset + i / cols * strides[0] + i % cols * strides[1]] = value;
        }
        Self { data, shape, strides, offset }
    }

    fn mat(&self) -> Mat<'_, T> {
        Mat::new(&self.data[self.offset..], self.shape, self.strides)
    }

    fn mat_mut(&mut self) -> MatMut<'_, T> {
        MatMut::new(&mut self.data[self.offset..], self.shape, self.strides)
    }
}

/// A product by all workers, one after the other.
fn product<E: PanelElement, C: CpuElement<Acc = f32>>(
    kernel: &MicroKernel,
    [a, b]: [Mat<E>; 2],
    mut c: MatMut<C>,
    add: Addition<'_, C>,
    workers: usize,
) {
    let ([m, k], [_, n]) = (a.shape(), b.shape());
    let bytes = panel_bytes(k.div_ceil(E::PER_WORD), n);
    let mut panels = vec![u32::MAX; bytes / 4];
    let all = n.next_multiple_of(PANEL_COLUMNS) / kernel.columns;
    for worker in 0..workers {
        let own = all * worker / workers..all * (worker + 1) / workers;
        // SAFETY: there is room for all panels.
        unsafe { pack_right(kernel, b, panels.as_mut_ptr(), own) };
    }
    let used = n.div_ceil(kernel.columns);
    let grid = Grid::new([m, used], kernel.rows, workers);
    let (to, shape, strides) = (c.as_mut_ptr(), c.shape(), c.strides());
    for worker in 0..workers {
        let [rows, own] = grid.part(worker, [m, used]);
        let inner = [k, a.strides()[1] as usize];
        let mut scratch = vec![u32::MAX; multiply_scratch::<E>(kernel, rows.len(), inner)];
        let target = |_| ProductTarget {
            panels: panels.as_ptr(),
            words: panel_words(k.div_ceil(E::PER_WORD)),
            own: own.clone(),
            // SAFETY: the matrix is borrowed uniquely, and used by one worker at a time.
            result: unsafe { MatMut::from_raw(to, shape, strides) },
            add,
        };
        // SAFETY: the panels were packed above; each worker has its own part.
        unsafe { multiply(kernel, a, rows, 1, target, &mut scratch) };
    }
}

/// How far a sum of `k` products may be from the exact one. Each of them is rounded at most twice on its
/// way (by a multiplication and addition in one, and where a block or a pair is added), with a relative
/// error of 2⁻²⁴ of what was summed so far, which is at most the sum of all magnitudes; `vdpbf16ps` and
/// tiles count denormal numbers as zeros, each less than 2⁻¹²⁶. The result is rounded to its type once,
/// after what is added to it.
fn bound<C: CpuElement>(k: usize, magnitudes: f64, result: f64) -> f64 {
    let last = if C::DTYPE.size() == 4 { 2f64.powi(-24) } else { 2f64.powi(-8) };
    let sum = (2 * k + 2) as f64 * (2f64.powi(-24) * magnitudes + 2f64.powi(-125));
    sum + (result.abs() + sum) * last
}

fn check<E: PanelElement, C: CpuElement<Acc = f32>>(case: u64, longest: u64) {
    let numbers = Stream::named(case, "products");
    let pick = |i: u64, most: u64| 1 + (numbers.uniform(i) * most as f64) as usize;
    let (m, k, n) = (pick(0, 100), pick(1, longest), pick(2, 150));
    let kind = |i: u64| pick(i, 5) as u64;
    let gap = |i: u64| pick(i, 9) - 1;
    let a = Placed::<E>::new("a", [m, k], kind(3), gap(4));
    let b = Placed::<E>::new("b", [k, n], kind(5), gap(6));
    let before = Placed::<C>::new("c", [m, n], kind(7), gap(8));
    let other = Placed::<C>::new("d", [m, n], [0, 1, 2][pick(9, 3) - 1], gap(10));
    let (added, workers) = (pick(11, 3), pick(12, 5));
    for (name, kernel) in kernels(E::WORD) {
        let mut c = Placed { data: before.data.clone(), ..before };
        let contiguous = before.strides[1] != 1 || other.strides[1] == 1;
        let addition = match added {
            1 => Addition::Nothing,
            2 if contiguous => Addition::Other(other.mat()),
            _ => Addition::Result,
        };
        product(&kernel, [a.mat(), b.mat()], c.mat_mut(), addition, workers);
        let (left, right, got) = (a.mat(), b.mat(), c.mat());
        for i in 0..m {
            for j in 0..n {
                let term = |l| f64::from(left.at(i, l).load()) * f64::from(right.at(l, j).load());
                let (sum, size) =
                    (0..k).map(term).fold((0.0, 0.0), |s, t| (s.0 + t, s.1 + t.abs()));
                let start = f64::from(match addition {
                    Addition::Nothing => 0.0,
                    Addition::Result => before.mat().at(i, j).load(),
                    Addition::Other(other) => other.at(i, j).load(),
                });
                let (want, found) = (start + sum, f64::from(got.at(i, j).load()));
                let limit = bound::<C>(k, size + start.abs(), want);
                let error = (want - found).abs();
                assert!(
                    error <= limit,
                    "{name}, case {case}: {m}×{k}×{n} at {i}, {j}: {found}, not {want}"
                );
            }
        }
        let changed = c.data.iter().filter(|x| !x.load().is_nan()).count();
        assert_eq!(changed, m * n, "{name}, case {case}: nothing else is written");
    }
}

#[test]
fn random_products_stay_within_the_bound() {
    for case in 0..24 {
        check::<bf16, bf16>(case, 300);
        check::<bf16, f32>(case + 100, 300);
        check::<f32, f32>(case + 200, 150);
    }
    // Several blocks of the inner dimension.
    for case in 300..303 {
        check::<bf16, bf16>(case, 2500);
        check::<f32, f32>(case, 1200);
    }
}

/// Different cuts of rows and columns, and different numbers of workers.
#[test]
fn bits_depend_on_the_unit_alone() {
    let (m, k, n) = (70, 1300, 140);
    let (a, b): (Vec<bf16>, Vec<bf16>) = (random("a", m * k, 1.0), random("b", k * n, 1.0));
    let (a, b) = (Mat::rows_of(&a, m, k), Mat::rows_of(&b, k, n));
    let turned: Vec<bf16> = (0..k * m).map(|i| a.at(i % m, i / m)).collect();
    for (name, kernel) in kernels(PanelWord::Pair) {
        let run = |a: Mat<bf16>, workers: usize| {
            let mut c = vec![0f32; m * n];
            let to = MatMut::rows_of(&mut c, m, n);
            product(&kernel, [a, b], to, Addition::Nothing, workers);
            c
        };
        let alone = run(a, 1);
        for workers in [2, 3, 7, 12, 16] {
            assert!(run(a, workers) == alone, "{name}, {workers} workers");
        }
        assert!(run(Mat::new(&turned, [m, k], [1, m]), 4) == alone, "{name}, copied rows");
    }
}

/// A unit of this processor and its model, with numbers of all sizes: denormal and huge ones, too.
#[test]
fn emulated_units_have_the_bits_of_real_ones() {
    let (m, k, n) = (33, 130, 70);
    let numbers = |name: &str, len: usize, spread: i32| -> Vec<bf16> {
        let (stream, values) = (Stream::named(3, name), random::<f32>(name, len, 1.0));
        let power = |i: usize| (stream.uniform(i as u64) * f64::from(2 * spread)) as i32 - spread;
        (values.iter().enumerate())
            .map(|(i, x)| bf16::store((f64::from(*x) * 2f64.powi(power(i))) as f32))
            .collect()
    };
    for spread in [0, 8, 62, 130] {
        let (a, b) = (numbers("a", m * k, spread), numbers("b", k * n, spread));
        let operands = [Mat::rows_of(&a, m, k), Mat::rows_of(&b, k, n)];
        for unit in UnitSet::here().iter() {
            let word = PanelWord::Pair;
            let both = [
                MicroKernel::best([unit].into_iter().collect(), word),
                MicroKernel::emulated(unit, word),
            ];
            let [real, model] = both.map(|kernel| {
                let mut c = vec![0f32; m * n];
                let to = MatMut::rows_of(&mut c, m, n);
                product(&kernel.unwrap(), operands, to, Addition::Nothing, 1);
                c.iter()
                    .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
                    .collect::<Vec<_>>()
            });
            let off = real.iter().zip(&model).filter(|(x, y)| x != y).count();
            assert_eq!(off, 0, "{}, numbers up to 2^{spread}", unit.name());
        }
    }
}

/// `vdpbf16ps` and tiles count denormal numbers as zeros; the others keep them.
#[test]
fn denormal_numbers() {
    let tiny = bf16::from_bits(0x0040);
    let (a, b) = ([tiny; 32], [bf16::from_f32(1.0); 32]);
    for (name, kernel) in kernels(PanelWord::Pair) {
        let mut c = [7f32];
        let operands = [Mat::rows_of(&a, 1, 32), Mat::rows_of(&b, 32, 1)];
        product(&kernel, operands, MatMut::rows_of(&mut c, 1, 1), Addition::Nothing, 1);
        let flushes = matches!(kernel.unit, CpuUnit::Avx512Bf16 | CpuUnit::Amx);
        let want = if flushes { 0.0 } else { 32.0 * tiny.load() };
        assert_eq!(c[0], want, "{name}");
    }
}
