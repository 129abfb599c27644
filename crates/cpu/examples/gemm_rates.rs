//! Rates of the matrix products of a small transformer, on one thread and on two at once.
//!
//! `cargo run --release -p phalanx-cpu --example gemm_rates [rows]`

use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::time::Instant;

use phalanx_cpu::kernels::gemm::{Packing, matmul, matmul_scratch};
use phalanx_cpu::kernels::matrix::{Mat, MatMut};

const ROUNDS: usize = 15;

fn main() {
    let rows: usize = std::env::args()
        .nth(1)
        .map_or(2048, |rows| rows.parse().expect("the argument is a number of rows"));
    println!("GFLOP/s of the best of {ROUNDS} rounds, {rows} rows; threads take rows, or for dW");
    println!("rows | columns of the result");
    println!("{:22}{:>8}{:>8}{:>8}{:>10}{:>9}{:>14}", "", "F", "dX", "dW", "2: F", "dX", "dW");
    for (name, k, n) in [
        ("qkv 384x1152", 384, 1152),
        ("out 384x384", 384, 384),
        ("gate+up 384x2048", 384, 2048),
        ("down 1024x384", 1024, 384),
        ("head 384x8192", 384, 8192),
    ] {
        let mut buffers = Buffers::new(rows, k, n);
        let gflop = 2.0 * (rows * k * n) as f64 * 1e-9;
        let all = [
            (1, Product::Forward),
            (1, Product::Input),
            (1, Product::WeightRows),
            (2, Product::Forward),
            (2, Product::Input),
            (2, Product::WeightRows),
            (2, Product::WeightColumns),
        ]
        .map(|(threads, product)| buffers.rate(threads, product, gflop));
        println!(
            "{name:22}{:8.0}{:8.0}{:8.0}{:10.0}{:9.0}{:8.0} | {:3.0}",
            all[0], all[1], all[2], all[3], all[4], all[5], all[6]
        );
    }
}

#[derive(Clone, Copy)]
enum Product {
    /// `y = x·w`.
    Forward,
    /// `dx = dy·wᵀ`.
    Input,
    /// `dw = xᵀ·dy`, a thread taking rows of `dw`.
    WeightRows,
    /// `dw = xᵀ·dy`, a thread taking columns of `dw`.
    WeightColumns,
}

struct Buffers {
    sizes: [usize; 3],
    x: Vec<f32>,
    w: Vec<f32>,
    y: Vec<f32>,
    result: Vec<f32>,
}

/// One thread's result and operands.
type Share<'a> = (MatMut<'a, f32>, Mat<'a, f32>, Mat<'a, f32>);

impl Buffers {
    fn new(m: usize, k: usize, n: usize) -> Self {
        let fill = |len: usize| (0..len).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        Self {
            sizes: [m, k, n],
            x: fill(m * k),
            w: fill(k * n),
            y: fill(m * n),
            result: fill((m * k).max(k * n).max(m * n)),
        }
    }

    /// The shares of all threads.
    fn shares(&mut self, product: Product, parts: usize) -> Vec<Share<'_>> {
        let [m, k, n] = self.sizes;
        let x = Mat::rows_of(&self.x, m, k);
        let w = Mat::rows_of(&self.w, k, n);
        let y = Mat::rows_of(&self.y, m, n);
        let result = self.result.as_mut_ptr();
        let cut = |size: usize, part: usize| size * part / parts..size * (part + 1) / parts;
        let block = |rows: usize, cols: usize, mine: [Range<usize>; 2]| {
            let [r, c] = mine;
            // SAFETY: the buffer is large enough for any result, stays borrowed by the shares, and
            // the parts do not overlap.
            unsafe { MatMut::from_raw(result, [rows, cols], [cols as isize, 1]) }.block(r, c)
        };
        let share = |part: usize| match product {
            Product::Forward => {
                let mine = cut(m, part);
                (block(m, n, [mine.clone(), 0..n]), x.block(mine, 0..k), w)
            }
            Product::Input => {
                let mine = cut(m, part);
                (block(m, k, [mine.clone(), 0..k]), y.block(mine, 0..n), w.t())
            }
            Product::WeightRows => {
                let mine = cut(k, part);
                (block(k, n, [mine.clone(), 0..n]), x.t().block(mine, 0..m), y)
            }
            Product::WeightColumns => {
                let mine = cut(n, part);
                (block(k, n, [0..k, mine.clone()]), x.t(), y.block(0..m, mine))
            }
        };
        (0..parts).map(share).collect()
    }

    fn rate(&mut self, threads: usize, product: Product, gflop: f64) -> f64 {
        let repeats = (2.0 / gflop).ceil() as usize;
        let mut times: Vec<f64> =
            (0..ROUNDS).map(|_| self.round(threads, product, repeats)).collect();
        times.sort_by(f64::total_cmp);
        gflop * repeats as f64 / times[0]
    }

    fn round(&mut self, threads: usize, product: Product, repeats: usize) -> f64 {
        let barrier = Barrier::new(threads);
        let shares = self.shares(product, threads);
        std::thread::scope(|scope| {
            let handles: Vec<_> = shares
                .into_iter()
                .map(|(mut c, a, b)| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let ([m, k], [_, n]) = (a.shape(), b.shape());
                        let mut scratch = vec![0.0; matmul_scratch::<f32, f32, f32>(m, k, n)];
                        let mut product = || {
                            matmul(&Packing, black_box(c.reborrow()), a, b, false, &mut scratch);
                        };
                        product();
                        barrier.wait();
                        let start = Instant::now();
                        for _ in 0..repeats {
                            product();
                        }
                        start.elapsed().as_secs_f64()
                    })
                })
                .collect();
            handles
                .into_iter()
                .map(|handle| handle.join().expect("a measuring thread panicked"))
                .fold(0.0, f64::max)
        })
    }
}
