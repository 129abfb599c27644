//! Updates of masters whose upper halves are the weights.

use phalanx_ir::ops::{AdamW, Decay, Lion, Narrow, Sgd};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Op, halves};
use phalanx_reference::RefTensor;

use super::Cases;

/// An update of whole masters, and the same of masters in halves: an engine must give the same bits for both.
pub struct SplitPair {
    /// Whole masters, with copies in bf16.
    pub whole: (Op, Vec<RefTensor>),
    /// In halves.
    pub split: (Op, Vec<RefTensor>),
}

impl SplitPair {
    /// Every rule, with gradients in both types.
    pub fn all() -> Vec<Self> {
        const COUNT: usize = 5003;
        let normal = |name: &str, dtype| RefTensor::normal(dtype, &[COUNT], Stream::named(9, name));
        let (w, m) = (normal("w", DType::F32), normal("m", DType::F32));
        let squares: Vec<f64> = normal("v", DType::F32).values().iter().map(|x| x * x).collect();
        let v = RefTensor::new(DType::F32, &[COUNT], &squares).unwrap();
        let [upper, lower] = in_halves(&w);
        let scalars = [0.01, 3.0, 0.7].map(|x| RefTensor::scalar(DType::F32, x));
        let decay = Decay { rate: 0.1, first: 2000, block: 3000 };
        let rules = |narrow| -> [(Op, Vec<RefTensor>); 4] {
            let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay, coupled: false, narrow };
            [
                (adamw.into(), vec![m.clone(), v.clone()]),
                (AdamW { coupled: true, ..adamw }.into(), vec![m.clone(), v.clone()]),
                (Sgd { momentum: 0.9, nesterov: true, decay, narrow }.into(), vec![m.clone()]),
                (Lion { beta1: 0.9, beta2: 0.99, decay, narrow }.into(), vec![m.clone()]),
            ]
        };
        let mut all = Vec::new();
        for g in [normal("g", DType::F32), normal("g", DType::Bf16)] {
            let both = rules(Narrow::Copy(DType::Bf16)).into_iter().zip(rules(Narrow::Split));
            for ((whole, states), (split, _)) in both {
                let rest = [&states[..], &scalars].concat();
                let of = |own: &[&RefTensor]| {
                    own.iter().copied().chain(&rest).cloned().collect::<Vec<_>>()
                };
                let (masters, halves) = (of(&[&w, &g]), of(&[&upper, &g, &lower]));
                all.push(Self { whole: (whole, masters), split: (split, halves) });
            }
        }
        all
    }

    /// Whether results of both, w and states and copy, halves and states, have the same bits.
    pub fn agree(whole: &[RefTensor], split: &[RefTensor]) -> bool {
        let states = split.len() - 2;
        let bits = |all: &[RefTensor]| all.iter().map(RefTensor::to_bytes).collect::<Vec<_>>();
        bits(&in_halves(&whole[0])) == bits(&split[..2])
            && bits(&whole[1..][..states]) == bits(&split[2..])
    }
}

/// Both halves of each number.
fn in_halves(full: &RefTensor) -> [RefTensor; 2] {
    let split = full.values().into_iter().map(|x| halves::split(x as f32));
    let (upper, lower): (Vec<f64>, Vec<f64>) =
        split.map(|(upper, lower)| (f64::from(halves::join(upper, 0)), f64::from(lower))).unzip();
    let of = |dtype, values: &[f64]| RefTensor::new(dtype, full.shape(), values).unwrap();
    [of(DType::Bf16, &upper), of(DType::U16, &lower)]
}

impl Cases {
    /// On numbers with few bits: every engine computes them exactly, so that lower halves must be equal.
    pub(super) fn split_updates(&mut self) {
        let of = |dtype, value: &dyn Fn(usize) -> f64| {
            let values: Vec<f64> = (0..11).map(value).collect();
            RefTensor::new(dtype, &[11], &values).unwrap()
        };
        // Ties, numbers that are rounded up and down, and zero.
        let bits = |i: usize| 0x3f80_0000 + (i as u32 * 0x8_4000);
        let master = |i: usize| match i {
            0 => 0.0,
            _ if i.is_multiple_of(2) => -f32::from_bits(bits(i)),
            _ => f32::from_bits(bits(i)),
        };
        let [upper, lower] = in_halves(&of(DType::F32, &|i| master(i).into()));
        let g = of(DType::F32, &|i| if i % 3 == 0 { -0.5 } else { 0.5 });
        let narrow_g = of(DType::Bf16, &|i| if i % 3 == 0 { -0.5 } else { 0.5 });
        let m = of(DType::F32, &|i| (i as f64 - 4.0) / 8.0);
        let v = of(DType::F32, &|_| 0.25);
        // Powers of two, and a step whose corrections are 1.
        let [lr, step, clip] = [1.0 / 64.0, 80.0, 1.0].map(|x| RefTensor::scalar(DType::F32, x));
        let [go, stop] = [1.0, 0.0].map(|x| RefTensor::scalar(DType::F32, x));
        let (decay, narrow) = (Decay { rate: 0.25, first: 2, block: 5 }, Narrow::Split);
        let adamw = AdamW { beta1: 0.5, beta2: 0.5, eps: 0.5, decay, coupled: false, narrow };
        let sgd = Sgd { momentum: 0.5, nesterov: true, decay, narrow };
        let lion = Lion { beta1: 0.5, beta2: 0.75, decay, narrow };
        self.add(adamw, &[&upper, &g, &lower, &m, &v, &lr, &step, &clip]);
        self.add(sgd, &[&upper, &narrow_g, &lower, &m, &lr, &step, &clip]);
        for go in [&go, &stop] {
            self.add(adamw, &[&upper, &narrow_g, &lower, &m, &v, &lr, &step, &clip, go]);
            self.add(sgd, &[&upper, &g, &lower, &m, &lr, &step, &clip, go]);
            self.add(lion, &[&upper, &narrow_g, &lower, &m, &lr, &step, &clip, go]);
        }
    }
}
