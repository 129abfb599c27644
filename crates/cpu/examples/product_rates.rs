//! Rates of own products of pairs of `bf16` and of singles, on every unit of this processor, beside the
//! library's path.
//!
//! `cargo run --release -p phalanx-cpu --example product_rates [rows] [threads …]`

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use half::bf16;
use phalanx_cpu::kernels::gemm::{Packing, matmul, matmul_scratch};
use phalanx_cpu::kernels::matrix::{Mat, MatMut};
use phalanx_cpu::products::{
    Addition, CpuUnit, Grid, MicroKernel, PANEL_COLUMNS, PanelElement, ProductTarget, UnitSet,
    multiply, multiply_scratch, pack_right, panel_bytes, panel_words,
};

const ROUNDS: usize = 7;
const SHAPES: [[usize; 2]; 5] = [[384, 384], [384, 1152], [384, 2048], [1024, 384], [384, 8192]];

fn main() {
    let mut numbers = std::env::args().skip(1).map(|n| n.parse().expect("a number"));
    let rows: usize = numbers.next().unwrap_or(2048);
    let mut threads: Vec<usize> = numbers.collect();
    if threads.is_empty() {
        threads = vec![1, 2];
    }
    println!("units: {}; {rows} rows; GFLOP/s, best of {ROUNDS}", UnitSet::here());
    println!("own: with packing, shared by all threads; before: packed earlier");
    for &threads in &threads {
        all::<bf16>("bf16", rows, threads);
        all::<f32>("f32", rows, threads);
    }
}

/// All shapes with elements of one type.
fn all<E: PanelElement>(name: &str, rows: usize, threads: usize) {
    let here = UnitSet::here();
    let kernels: Vec<MicroKernel> = (here.iter())
        .filter(|unit| *unit != CpuUnit::Avx2 || !here.has(CpuUnit::Avx512))
        .filter_map(|unit| MicroKernel::best([unit].into_iter().collect(), E::WORD))
        .collect();
    print!("{:>2} threads, {name:5}{:8}", threads, "library");
    for kernel in &kernels {
        print!("{:>14} own/before", kernel.unit.name());
    }
    println!();
    for [k, n] in SHAPES {
        for (op, shape) in [("F", [rows, k, n]), ("dX", [rows, n, k]), ("dW", [k, rows, n])] {
            let case = Case::<E>::new(op, shape, threads);
            print!("{op:3} {k:5}×{n:<5}{:8.0}", case.rate(None, true));
            for kernel in &kernels {
                let own = case.rate(Some(kernel), true);
                print!("{:>16.0} {:>7.0}", own, case.rate(Some(kernel), false));
            }
            println!();
        }
    }
}

/// A product `[m, k]·[k, n]` with its memory; the result is of single precision.
struct Case<E> {
    op: &'static str,
    shape: [usize; 3],
    threads: usize,
    a: Lines<E>,
    b: Lines<E>,
    c: Lines<f32>,
    panels: Lines<u32>,
}

/// Memory that starts with a cache line, as an engine's does.
struct Lines<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy> Lines<T> {
    fn new(len: usize, value: impl Fn(usize) -> T) -> Self {
        let spare = 64 / size_of::<T>();
        let mut memory = vec![value(0); len + spare];
        let start = memory.as_ptr().align_offset(64).min(spare);
        (0..len).for_each(|i| memory[start + i] = value(i));
        Self { memory, start, len }
    }

    fn get(&self) -> &[T] {
        &self.memory[self.start..][..self.len]
    }
}

#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: threads write different places, with a barrier between writing and reading.
unsafe impl<T> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    fn get(self) -> *mut T {
        self.0
    }
}

impl<E: PanelElement> Case<E> {
    fn new(op: &'static str, shape: [usize; 3], threads: usize) -> Self {
        let [m, k, n] = shape;
        let fill = |len: usize| Lines::new(len, |i| E::store((i % 17) as f32 * 0.1 - 0.8));
        let panels = Lines::new(panel_bytes(k.div_ceil(E::PER_WORD), n) / 4, |_| 0);
        let c = Lines::new(m * n, |_| 0.0);
        Self { op, shape, threads, a: fill(m * k), b: fill(k * n), c, panels }
    }

    fn operands(&self) -> [Mat<'_, E>; 2] {
        let [m, k, n] = self.shape;
        let left = if self.op == "dW" { [1, m] } else { [k, 1] };
        let right = if self.op == "dX" { [1, k] } else { [n, 1] };
        [Mat::new(self.a.get(), [m, k], left), Mat::new(self.b.get(), [k, n], right)]
    }

    /// GFLOP/s of the best round.
    fn rate(&self, kernel: Option<&MicroKernel>, packs: bool) -> f64 {
        let gflop = 2.0 * self.shape.iter().product::<usize>() as f64 * 1e-9;
        let (barrier, [m, k, n]) = (Barrier::new(self.threads), self.shape);
        let to = Shared(self.c.get().as_ptr().cast_mut());
        let panels = Shared(self.panels.get().as_ptr().cast_mut());
        let work = |thread: usize| {
            let [a, b] = self.operands();
            let mut words = vec![0_u32; scratch_words::<E>(kernel, self.shape)];
            let mut floats = vec![0_f32; matmul_scratch::<E, E, f32>(m, k, n)];
            // SAFETY: the buffer is the result's; threads write different parts.
            let result = || unsafe { MatMut::from_raw(to.get(), [m, n], [n as isize, 1]) };
            let mut best = f64::INFINITY;
            for _ in 0..ROUNDS {
                barrier.wait();
                let start = Instant::now();
                match kernel {
                    None => {
                        let own = m * thread / self.threads..m * (thread + 1) / self.threads;
                        let (c, a) = (result().block(own.clone(), 0..n), a.block(own, 0..k));
                        matmul(&Packing, c, a, b, false, &mut floats);
                    }
                    Some(kernel) => {
                        let all = n.next_multiple_of(PANEL_COLUMNS) / kernel.columns;
                        let own = all * thread / self.threads..all * (thread + 1) / self.threads;
                        if packs {
                            // SAFETY: each thread packs its own panels.
                            unsafe { pack_right(kernel, b, panels.get(), own) };
                            barrier.wait();
                        }
                        let used = n.div_ceil(kernel.columns);
                        let grid = Grid::new([m, used], kernel.rows, self.threads);
                        let [rows, own] = grid.part(thread, [m, used]);
                        let target = |_| ProductTarget {
                            panels: panels.get(),
                            words: panel_words(k.div_ceil(E::PER_WORD)),
                            own: own.clone(),
                            result: result(),
                            add: Addition::Nothing,
                        };
                        // SAFETY: the panels are packed; each thread has its part of the result.
                        unsafe { multiply(kernel, a, rows, 1, target, &mut words) };
                    }
                }
                black_box(self.c.get());
                barrier.wait();
                best = best.min(start.elapsed().as_secs_f64());
            }
            best
        };
        let best = std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..self.threads).map(|thread| scope.spawn(move || work(thread))).collect();
            let mine = work(0);
            others.into_iter().for_each(|thread| drop(thread.join()));
            mine
        });
        gflop / best
    }
}

fn scratch_words<E: PanelElement>(kernel: Option<&MicroKernel>, [m, k, _]: [usize; 3]) -> usize {
    kernel.map_or(0, |kernel| multiply_scratch::<E>(kernel, m, [k, 0]))
}
