"""Makes a module of `transformers` compute in double precision what it computes in single precision otherwise.

It computes norms, softmaxes, routers and rotary angles in f32 whatever the weights are. With `wide(module)` that
module sees another f32, which is f64.
"""

import contextlib

import torch


class WideTorch:
    """The module `torch`, whose single precision is double precision."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def wide(module):
    narrow = torch.Tensor.float
    module.torch, torch.Tensor.float = WideTorch(), torch.Tensor.double
    try:
        yield
    finally:
        module.torch, torch.Tensor.float = torch, narrow
