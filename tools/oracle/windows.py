"""Makes tests/fixtures/windows.json: convolution, pooling and group norm by PyTorch, in f64.

    .venv/bin/python tools/oracle/windows.py

Inputs are not stored: number i of an input is sin(1.3 i + phase), the same on both sides. Images are
[batch, height, width, channels] and weights [k, l, in, out] here; PyTorch's own order is made from it.
Results and gradients are stored whole; gradients are those of the sum of results times numbers of phase 9.
"""

import json
import pathlib

import torch
import torch.nn.functional as F

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "windows.json"


def numbers(shape, phase):
    count = torch.Size(shape).numel()
    return torch.sin(1.3 * torch.arange(count, dtype=torch.float64) + phase).reshape(shape)


def case(name, op, inputs, **settings):
    tensors = [numbers(shape, phase).requires_grad_() for phase, shape in enumerate(inputs, start=1)]
    result = op(*tensors)
    (result * numbers(result.shape, 9)).sum().backward()
    flat = lambda t: t.reshape(-1).tolist()
    return {
        "name": name, "inputs": inputs, **settings, "shape": list(result.shape),
        "result": flat(result.detach()), "gradients": [flat(t.grad) for t in tensors],
    }


def channels_first(x):
    return x.permute(0, 3, 1, 2)


def channels_last(x):
    return x.permute(0, 2, 3, 1)


def conv(size, stride, dilation, pad, image, channels):
    def op(x, w):
        y = F.conv2d(channels_first(x), w.permute(3, 2, 0, 1), stride=stride, dilation=dilation, padding=pad)
        return channels_last(y)
    shapes = [[2, *image, channels[0]], [*size, *channels]]
    return case("conv2d", op, shapes, size=size, stride=stride, dilation=dilation, pad=pad)


def pool(name, size, stride, pad, image):
    def op(x):
        f = F.max_pool2d if name == "max_pool" else F.avg_pool2d
        return channels_last(f(channels_first(x), size, stride=stride, padding=pad))
    return case(name, op, [[2, *image, 3]], size=size, stride=stride, dilation=[1, 1], pad=pad)


def group_norm(groups):
    def op(x, gain, bias):
        return channels_last(F.group_norm(channels_first(x), groups, gain, bias, eps=1e-3))
    return case("group_norm", op, [[2, 3, 4, 6], [6], [6]], groups=groups)


def layer_norm():
    def op(x, gain, bias):
        return F.layer_norm(x, [6], gain, bias, eps=1e-3)
    return case("layer_norm", op, [[2, 3, 4, 6], [6], [6]])


cases = [
    conv([3, 3], [1, 1], [1, 1], [1, 1], [5, 6], [2, 3]),
    conv([2, 3], [2, 1], [1, 2], [1, 0], [5, 7], [3, 2]),
    conv([3, 1], [3, 2], [2, 1], [2, 0], [7, 5], [1, 4]),
    pool("max_pool", [2, 2], [2, 2], [0, 0], [6, 4]),
    pool("max_pool", [3, 3], [2, 1], [1, 1], [5, 4]),
    pool("mean_pool", [2, 2], [2, 2], [0, 0], [6, 4]),
    pool("mean_pool", [3, 2], [1, 2], [1, 1], [5, 4]),
    group_norm(1),
    group_norm(3),
    layer_norm(),
]
OUT.write_text(json.dumps({"torch": torch.__version__, "cases": cases}) + "\n")
print(OUT, OUT.stat().st_size)
