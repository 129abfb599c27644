//! How fast the row-wise and flat kernels are on one core, and what a run and a barrier cost.
//!
//! `cargo run --release -p phalanx-cpu --example kernel_speed`
//!
//! Bytes are what a kernel must read and write, each once; the time is that of the fastest of some
//! calls, because other programs on the machine can only make a call slower.

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use phalanx_cpu::element::{CpuElement, CpuFloat};
use phalanx_cpu::kernels::dropout::Mask;
use phalanx_cpu::kernels::elementwise::ElementOperand;
use phalanx_cpu::kernels::optim::{Adam, DecayKind, SgdStep, UpdatedWeights};
use phalanx_cpu::kernels::rotary::{RotaryTables, Rotation};
use phalanx_cpu::kernels::{
    cast, dropout, elementwise, embedding, movement, norm, reduce, rotary, softmax,
};
use phalanx_cpu::pool::{Pool, PoolSettings};
use phalanx_ir::ops::{BinaryKind, ReduceKind, UnaryKind};

const ROWS: usize = 2048;
const D: usize = 384;
const N: usize = ROWS * D;
const FLAT: usize = 16 << 20;
const CHUNK: usize = 2048;

fn main() {
    pool();
    println!("\nrows of [{ROWS}, {D}] and chunks of {CHUNK}: f32, then bf16");
    rows::<f32>();
    rows::<bf16>();
    chunks::<f32>();
    chunks::<bf16>();
    println!("\nflat, {FLAT} elements");
    flat::<f32>();
    flat::<bf16>();
}

/// The least time of a call, in seconds.
fn least(mut call: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    (0..20).map(time).fold(f64::INFINITY, f64::min)
}

/// Prints rates beside that of a copy of memory of the same size.
struct Rates {
    /// Bytes per second that a copy reads and writes.
    copy: f64,
}

impl Rates {
    /// Beside a copy of so many elements.
    fn beside_copy_of<T: CpuElement>(elements: usize) -> Self {
        let from: Vec<T> = values(elements);
        let mut to = from.clone();
        let seconds = least(|| black_box(&mut to).copy_from_slice(black_box(&from)));
        let bytes = 2 * elements * size_of::<T>();
        println!(
            "{:34} {:9.1} us {:7.1} GB/s",
            "copy",
            seconds * 1e6,
            bytes as f64 / seconds / 1e9
        );
        Self { copy: bytes as f64 / seconds }
    }

    fn report(&self, name: &str, bytes: usize, call: impl FnMut()) {
        let seconds = least(call);
        let rate = bytes as f64 / seconds;
        let part = 100.0 * rate / self.copy;
        println!(
            "{name:34} {:9.1} us {:7.1} GB/s {part:5.0}% of a copy",
            seconds * 1e6,
            rate / 1e9
        );
    }
}

fn values<T: CpuElement>(n: usize) -> Vec<T> {
    (0..n).map(|i| T::store(T::Acc::from_f64((i * 7919 % 1000) as f64 / 400.0 - 1.2))).collect()
}

fn pool() {
    for (threads, spin) in [(1, true), (2, true), (2, false)] {
        let settings = PoolSettings { spin, ..PoolSettings::for_workers_on_this_machine(threads) };
        let Ok(mut pool) = Pool::with_settings(threads, settings) else {
            println!("the system refused {threads} threads");
            return;
        };
        let calls = 2000;
        let run = least(|| {
            for _ in 0..calls {
                assert!(pool.run(&|_, _| ()).is_ok());
            }
        });
        let barrier = least(|| {
            let ok = pool.run(&|_, barrier| (0..calls).for_each(|_| barrier.wait()));
            assert!(ok.is_ok());
        });
        let each = |seconds: f64| seconds * 1e9 / f64::from(calls);
        println!(
            "{threads} threads, spin {spin}: empty run {:.0} ns, barrier {:.0} ns",
            each(run),
            each(barrier)
        );
    }
}

fn rows<T: CpuElement>() {
    let rates = Rates::beside_copy_of::<T>(N);
    let size = size_of::<T>();
    let (x, dy, gamma): (Vec<T>, Vec<T>, Vec<T>) = (values(N), values(N), values(D));
    let mut y = x.clone();
    let [mut mean, mut rstd] = [(); 2].map(|()| vec![T::Acc::ONE; ROWS]);
    let [mut dgamma, mut dbeta] = [(); 2].map(|()| vec![T::Acc::ZERO; D]);
    rates.report("rms_norm", 2 * N * size, || {
        norm::rms_norm(&x, &gamma, 1e-5, &mut y, &mut rstd);
    });
    rates.report("rms_norm_gradient", 3 * N * size, || {
        norm::rms_norm_gradient(&x, &gamma, &rstd, &dy, &mut y, &mut dgamma);
    });
    rates.report("layer_norm", 2 * N * size, || {
        norm::layer_norm(&x, &gamma, &gamma, 1e-5, &mut y, &mut mean, &mut rstd);
    });
    rates.report("layer_norm_gradient", 3 * N * size, || {
        let forward = norm::LayerNormed { x: &x, gamma: &gamma, mean: &mean, rstd: &rstd };
        norm::layer_norm_gradient(forward, &dy, &mut y, &mut dgamma, &mut dbeta);
    });
    let mut frequencies = [0.0; 32];
    rotary::inverse_frequencies(10_000.0, &mut frequencies);
    let [mut cos, mut sin] = [(); 2].map(|()| vec![T::Acc::ZERO; 256 * 32]);
    rotary::fill_tables(0..256, &frequencies, &mut cos, &mut sin);
    let rotary = RotaryTables {
        cos: &cos,
        sin: &sin,
        head_dim: 64,
        heads: D / 64,
        seq: 256,
        offset: 0,
        first_row: 0,
        direction: Rotation::Forward,
    };
    rates.report("rotary", 2 * N * size, || rotary.rotate(ROWS, &x, D, &mut y, D));
    rates.report("rotary in place", 2 * N * size, || {
        rotary.rotate_in_place(ROWS, &mut y, D);
    });
    rates.report("sum over rows", N * size, || {
        reduce::reduce_leading(ReduceKind::Sum, &x, D, 0..D, false, &mut y[..D]);
    });
    rates.report("max over columns", N * size, || {
        reduce::reduce_trailing(ReduceKind::Max, &x, D, false, &mut y[..ROWS]);
    });
    rates.report("transpose", 2 * N * size, || {
        movement::permute(&x, &[ROWS, D], &[1, 0], 0, &mut y);
    });
    rates.report("permute [8,256,6,64] to [8,6,256,64]", 2 * N * size, || {
        movement::permute(&x, &[8, 256, 6, 64], &[0, 2, 1, 3], 0, &mut y);
    });
    let mask = Mask { key: [1, 2, 3, 4, 5], site: 6, p: 0.1 };
    rates.report("dropout", 2 * N * size, || {
        dropout::dropout(&x, mask, 256 * D, 0, &mut y);
    });
    rates.report("softmax", 2 * N * size, || softmax::softmax(&x, D, &mut y));
    rates.report("softmax gradient", 3 * N * size, || {
        softmax::gradient(&x, &dy, D, &mut y);
    });
    let held = embedding::HeldRows::all(8192);
    let ids: Vec<i32> = (0..ROWS as i32).map(|i| i * 7919 % 8192).collect();
    let table: Vec<T> = values(8192 * D);
    let mut grad = vec![T::Acc::ZERO; 8192 * D];
    rates.report("embedding", 2 * N * size, || {
        assert!(embedding::gather(&table, held, D, &ids, &mut y).is_ok());
    });
    rates.report("embedding gradient", N * (size + 2 * size_of::<T::Acc>()), || {
        assert!(embedding::gather_gradient(&ids, &dy, D, held, true, &mut grad).is_ok());
    });
}

/// Chunks in the first-level cache: what matters is the time of a call.
fn chunks<T: CpuElement>() {
    let (x, dy): (Vec<T>, Vec<T>) = (values(CHUNK), values(CHUNK));
    let mut y = x.clone();
    let calls = 100;
    let factor = black_box(T::Acc::from_f64(0.7));
    let mut chunk = |name: &str, call: &mut dyn FnMut(&mut [T])| {
        let seconds = least(|| (0..calls).for_each(|_| call(black_box(&mut y))));
        let each = seconds / f64::from(calls);
        println!("{name:34} {:9.3} us {:7.2} elements/ns", each * 1e6, CHUNK as f64 / each / 1e9);
    };
    let (a, b) = (ElementOperand::Chunk(&x[..]), ElementOperand::Chunk(&dy[..]));
    chunk("add", &mut |y| elementwise::binary(BinaryKind::Add, a, b, y));
    chunk("div", &mut |y| elementwise::binary(BinaryKind::Div, a, b, y));
    chunk("scale", &mut |y| elementwise::scale(&x, factor, y));
    for op in [
        UnaryKind::Exp,
        UnaryKind::Log,
        UnaryKind::Tanh,
        UnaryKind::Sigmoid,
        UnaryKind::Silu,
        UnaryKind::Gelu,
        UnaryKind::GeluErf,
    ] {
        chunk(&format!("{op:?}"), &mut |y| elementwise::unary(op, &x, y));
        chunk(&format!("{op:?} gradient"), &mut |y| {
            elementwise::unary_gradient(op, &x, &dy, y);
        });
    }
}

fn flat<G: CpuElement<Acc = f32>>() {
    let rates = Rates::beside_copy_of::<G>(FLAT);
    let grad: Vec<G> = values(FLAT);
    let [mut m, mut v, mut weights] = [(); 3].map(|()| vec![0.0f32; FLAT]);
    let mut copy: Vec<G> = values(FLAT);
    let mut narrowed = vec![bf16::ZERO; FLAT];
    let size = size_of::<G>();
    let narrow = size == 2;
    let adam = Adam {
        lr: 1e-3,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0.1,
        decay: DecayKind::Decoupled,
        step: 3,
        clip: 0.5,
    };
    let written = if narrow { size } else { 0 };
    rates.report(&format!("AdamW, gradients {}", G::DTYPE), FLAT * (24 + size + written), || {
        let weights =
            UpdatedWeights { master: &mut weights[..], copy: narrow.then_some(&mut copy[..]) };
        adam.update(&grad, &mut m, &mut v, weights);
    });
    let sgd = SgdStep {
        lr: 1e-3,
        momentum: 0.9,
        nesterov: true,
        weight_decay: 0.1,
        decay: DecayKind::L2,
        clip: 0.5,
    };
    rates.report(
        &format!("SGD with momentum, gradients {}", G::DTYPE),
        FLAT * (16 + size + written),
        || {
            let weights =
                UpdatedWeights { master: &mut weights[..], copy: narrow.then_some(&mut copy[..]) };
            sgd.update(&grad, &mut m, weights);
        },
    );
    rates.report(&format!("sum of squares, {}", G::DTYPE), FLAT * size, || {
        black_box(reduce::sum_of_squares(&grad));
    });
    rates.report("cast f32 to bf16", FLAT * 6, || cast::cast(&m, &mut narrowed));
}
