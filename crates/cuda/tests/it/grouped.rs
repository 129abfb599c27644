//! Products of packed rows on tensor cores: runs that end within tiles, widths that no tile divides, rows that are
//! nobody's, and regions that are padding.

use phalanx_cuda::CudaEngine;
use phalanx_ir::ops::{GroupedMatmul, GroupedMatmulGrad};
use phalanx_ir::random::Stream;
use phalanx_ir::{DType, Op};
use phalanx_reference::RefTensor;
use phalanx_testing::instances::apply;
use phalanx_testing::threads::furthest;

use crate::gpu;
use crate::ops::on_gpu;

/// Regions, experts, rows that a region has room for, the widths of rows, and how many rows each run has.
struct Case {
    regions: &'static [usize],
    experts: usize,
    room: usize,
    widths: [usize; 2],
    counts: Vec<i32>,
}

fn cases() -> Vec<Case> {
    vec![
        // Tiles of whole runs, of a part of one, and behind all; widths of several slices.
        Case {
            regions: &[1],
            experts: 4,
            room: 300,
            widths: [136, 264],
            counts: vec![130, 0, 129, 20],
        },
        // Rows that are no multiples of 16 bytes.
        Case { regions: &[1], experts: 3, room: 140, widths: [35, 131], counts: vec![1, 130, 9] },
        // Two parts of experts, several regions and more than 32 runs; more rows than a region has room for.
        Case {
            regions: &[2, 2],
            experts: 4,
            room: 90,
            widths: [40, 72],
            counts: (0..4 * 40).map(|run| run * 7 % 5).collect(),
        },
    ]
}

#[test]
fn packed_rows_on_tensor_cores() {
    if !gpu::is_here("packed_rows_on_tensor_cores") {
        return;
    }
    let mut engine = CudaEngine::new().unwrap();
    for (dtype, case) in [DType::Bf16, DType::F16]
        .into_iter()
        .flat_map(|dtype| cases().into_iter().map(move |case| (dtype, case)))
    {
        let Case { regions, experts, room, widths: [d, f], counts } = case;
        let of = |last: &[usize]| [regions, last].concat();
        let normal = |name: &str, shape: &[usize]| {
            RefTensor::normal(dtype, shape, Stream::named(room as u64, name))
        };
        let (x, y) = (normal("x", &of(&[room, d])), normal("y", &of(&[room, f])));
        let w = normal("w", &[experts, d, f]);
        let runs = counts.len() / regions.iter().product::<usize>();
        let counts = RefTensor::from_i32(&of(&[runs]), &counts).unwrap();
        let mut ops: Vec<(Op, Vec<RefTensor>)> = vec![
            (
                GroupedMatmul { transposed: false }.into(),
                vec![x.clone(), w.clone(), counts.clone()],
            ),
            (GroupedMatmul { transposed: true }.into(), vec![y.clone(), w, counts.clone()]),
        ];
        for out in [dtype, DType::F32] {
            let operands = vec![x.clone(), y.clone(), counts.clone()];
            ops.push((GroupedMatmulGrad { experts, out }.into(), operands));
        }
        for (op, operands) in ops {
            let expected = apply(&op, &operands).swap_remove(0);
            let adds: &[f64] =
                if matches!(op, Op::GroupedMatmulGrad(_)) { &[0.0, 0.75] } else { &[0.0] };
            for &before in adds {
                let values: Vec<f64> = expected.values().iter().map(|x| x + before).collect();
                let expected = RefTensor::new(expected.dtype(), expected.shape(), &values).unwrap();
                let found = on_gpu(&mut engine, &op, &operands, before).swap_remove(0);
                let again = on_gpu(&mut engine, &op, &operands, before).swap_remove(0);
                assert_eq!(found.to_bytes(), again.to_bytes(), "{op:?} in {dtype}: other bits");
                // Sums of f32 in another order; then one rounding.
                let most = if expected.dtype() == DType::F32 { 1e-5 } else { 8e-3 };
                let off = furthest(&found, &expected);
                assert!(
                    off <= most,
                    "{op:?} in {dtype}, widths {d} and {f}, before {before}: off by {off:e}"
                );
            }
        }
    }
}
