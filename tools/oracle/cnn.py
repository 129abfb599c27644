"""Makes tests/fixtures/cnn.json: the MNIST network by PyTorch, in f64, with Adam.

    .venv/bin/python tools/oracle/cnn.py

Neither weights nor images are stored: both are whole numbers times a power of two, the same on both sides
(`numbers`). Weights are made in our order (images [b, h, w, c], weights [k, l, in, out], fully connected
[in, out], features as places, then channels) and turned into PyTorch's. Stored are the logits and the loss
of the first batch, for every parameter the norm of its gradient and some of its elements, and the losses
and gradient norms of 20 steps.
"""

import json
import pathlib

import torch
import torch.nn.functional as F

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "cnn.json"
BATCH, STEPS, SAMPLES = 4, 20, 16
SHAPES = {
    "conv1.weight": [3, 3, 1, 32], "conv1.bias": [32], "conv2.weight": [3, 3, 32, 64], "conv2.bias": [64],
    "fc1.weight": [50176, 128], "fc1.bias": [128], "fc2.weight": [128, 10], "fc2.bias": [10],
}
SCALES = {"conv1": 2, "conv2": 4, "fc1": 7, "fc2": 3}


def numbers(shape, phase, scale):
    """Number i is (7919 i + 104729 phase) mod 2003, less 1001, over 1024, times 2^-scale."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    whole = (7919 * i + 104729 * phase) % 2003 - 1001
    return (whole.double() / 1024 / 2**scale).reshape(shape)


torch.set_default_dtype(torch.float64)
params = {
    name: numbers(shape, phase, SCALES[name.split(".")[0]]).requires_grad_()
    for phase, (name, shape) in enumerate(SHAPES.items())
}
images = [numbers([BATCH, 28, 28, 1], 20 + k, 0) for k in range(2)]
labels = [torch.tensor([(3 * i + 5 * k + 1) % 10 for i in range(BATCH)]) for k in range(2)]


def forward(x):
    h = x.permute(0, 3, 1, 2)
    for name in ["conv1", "conv2"]:
        h = F.relu(F.conv2d(h, params[f"{name}.weight"].permute(3, 2, 0, 1), params[f"{name}.bias"], padding=1))
    h = h.permute(0, 2, 3, 1).reshape(BATCH, -1)
    h = F.relu(h @ params["fc1.weight"] + params["fc1.bias"])
    return h @ params["fc2.weight"] + params["fc2.bias"]


def norm(tensors):
    return torch.sqrt(sum((t * t).sum() for t in tensors)).item()


result = {"torch": torch.__version__}
optimizer = torch.optim.Adam(params.values(), lr=1e-3)
losses, norms = [], []
for step in range(STEPS):
    optimizer.zero_grad()
    logits = forward(images[step % 2])
    loss = F.cross_entropy(logits, labels[step % 2])
    loss.backward()
    if step == 0:
        result["logits"] = logits.detach().reshape(-1).tolist()
        grads = {}
        for name, p in params.items():
            flat = p.grad.reshape(-1)
            picked = [k * (flat.numel() // SAMPLES) % flat.numel() + k % 7 for k in range(SAMPLES)]
            picked = [at % flat.numel() for at in picked]
            grads[name] = {"norm": norm([flat]), "at": picked, "values": flat[picked].tolist()}
        result["gradients"] = grads
    losses.append(loss.item())
    norms.append(norm([p.grad for p in params.values()]))
    optimizer.step()
result |= {"losses": losses, "grad_norms": norms}
result["final_norms"] = {name: norm([p.detach()]) for name, p in params.items()}
OUT.write_text(json.dumps(result) + "\n")
print(OUT, OUT.stat().st_size, losses)
