//! Convolution and pooling, alone.

use phalanx_ir::ops::{Conv2dInputGrad, Conv2dWeightGrad, PoolKind, Pooling, PoolingGrad, Window};
use phalanx_ir::{Role, Tensor, TensorType};

use crate::ops::{each, gradient};

#[test]
fn windows() {
    let same = Window::of([3, 3]).pad([1, 1]);
    let odd = Window::of([2, 3]).stride([2, 1]).dilation([1, 2]).pad([1, 0]);
    // Lines of 130 places: more than one line, and less, at a time.
    for (window, [h, w]) in [(same, [9, 8]), (odd, [5, 7]), (same.stride([2, 2]), [6, 130])] {
        let [k, l] = window.size;
        each(&format!("{window:?}"), |b, dtype| {
            let x = b.input("x", Role::Data, TensorType::new(dtype, vec![3, h, w, 5]));
            let y = x.conv2d(b.param("w", [k, l, 5, 6]), window);
            b.probe("y", y);
            let dy = b.input("dy", Role::Data, y.ty());
            let backwards = Conv2dInputGrad { window, image: [h, w] };
            b.probe("dx", b.apply(backwards, &[dy, b.param("w", [k, l, 5, 6])]));
            gradient(b, "dw", b.apply(Conv2dWeightGrad { window, out: dtype }, &[x, dy]));
            for kind in [PoolKind::Max, PoolKind::Mean] {
                let of = Pooling { kind, window };
                let pooled = b.apply_all(of, &[x]);
                let dy = b.input("dpool", Role::Data, pooled[0].ty());
                let grad = PoolingGrad { of, image: [h, w] };
                let operands: Vec<Tensor<'_>> =
                    std::iter::once(dy).chain(pooled.get(1).copied()).collect();
                b.probe(&format!("{kind:?}"), pooled[0]);
                b.probe(&format!("d{kind:?}"), b.apply(grad, &operands));
            }
        });
    }
}
