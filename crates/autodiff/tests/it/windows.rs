//! Gradients of convolution, pooling and group norm.

use phalanx_ir::ops::Window;

use crate::check::Check;

fn windows() -> [Window; 4] {
    let plain = Window::of([3, 3]);
    [
        plain.pad([1, 1]),
        plain.stride([2, 3]),
        Window::of([2, 3]).stride([2, 1]).dilation([1, 2]).pad([1, 0]),
        Window::of([1, 2]).stride([2, 2]),
    ]
}

#[test]
fn convolution() {
    for window in windows() {
        let [k, l] = window.size;
        Check::new(format!("{window:?}"))
            .param("x", &[2, 5, 6, 2])
            .param("w", &[k, l, 2, 3])
            .run(|_, v| v[0].conv2d(v[1], window));
    }
}

#[test]
fn pooling() {
    for window in windows() {
        Check::new(format!("max {window:?}"))
            .param("x", &[2, 5, 6, 2])
            .run(|_, v| v[0].max_pool(window));
        Check::new(format!("mean {window:?}"))
            .param("x", &[2, 5, 6, 2])
            .run(|_, v| v[0].mean_pool(window));
    }
}

#[test]
fn group_norm() {
    for groups in [1, 2, 4] {
        Check::new(format!("{groups} groups"))
            .param("x", &[2, 3, 2, 4])
            .param("gain", &[4])
            .param("bias", &[4])
            .run(|_, v| v[0].group_norm(groups, v[1], v[2], 1e-3));
    }
}
