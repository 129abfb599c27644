//! Convolution and pooling.

use phalanx_ir::ops::{
    Conv2d, Conv2dInputGrad, Conv2dWeightGrad, PoolKind, Pooling, PoolingGrad, Window,
};

use super::{Cases, F64, apply, normal};

impl Cases {
    pub(super) fn windows(&mut self) {
        let same = Window::of([3, 3]).pad([1, 1]);
        let odd = Window::of([2, 3]).stride([2, 1]).dilation([1, 2]).pad([1, 0]);
        for (window, [h, w]) in [(same, [4, 6]), (same.stride([2, 2]), [4, 6]), (odd, [5, 7])] {
            let x = normal("x", &[2, h, w, 3]);
            let weights = normal("w", &[window.size[0], window.size[1], 3, 5]);
            let y = apply(&Conv2d { window }.into(), &[x.clone(), weights.clone()]);
            let dy = normal("dy", y[0].shape());
            self.add(Conv2d { window }, &[&x, &weights]);
            self.add(Conv2dInputGrad { window, image: [h, w] }, &[&dy, &weights]);
            self.add(Conv2dWeightGrad { window, out: F64 }, &[&x, &dy]);
            for kind in [PoolKind::Max, PoolKind::Mean] {
                let of = Pooling { kind, window };
                let kept = apply(&of.into(), std::slice::from_ref(&x));
                let dy = normal("dy", kept[0].shape());
                self.add(of, &[&x]);
                let mut operands = vec![&dy];
                operands.extend(kept.get(1));
                self.add(PoolingGrad { of, image: [h, w] }, &operands);
            }
        }
    }
}
