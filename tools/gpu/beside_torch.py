#!/usr/bin/env python3
"""Times `bench step` beside compiled PyTorch on one GPU, in turns.

    tools/gpu/beside_torch.py PHALANX [--rounds N] [--preset NAME]... [--small] [-- --set KEY=VALUE …]

PyTorch compiles its model once and keeps it on the GPU while `bench step` runs, so both are measured in turns on a
GPU that is equally warm. PyTorch: bf16 autocast, fused AdamW, clipping by norm; experts in a loop, which is not
compiled, because how many rows each has differs from step to step. Phalanx: compute, weights and gradients in bf16
with f32 masters. `experts` is experts.toml beside this file. Prints the times of each round and the ratio of the
medians; by default of the models without experts. --small runs PyTorch's part alone, tiny and on the processor.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tomllib

import torch
import torch.nn.functional as F
from torch import nn

# As the presets of these names: layers, width, heads, inner width, vocabulary, positions, sequences.
MODELS = {
    "gpt2-124m": (12, 768, 12, 3072, 50304, 1024, 32),
    "llama-0.95b": (16, 2048, 16, 5632, 32000, 4096, 4),
}
EXPERTS = pathlib.Path(__file__).with_name("experts.toml")


def sizes_of(preset):
    """The sizes as above, and of experts: how many, their inner width, and how many a token takes."""
    if preset != "experts":
        return MODELS[preset], None
    found = tomllib.loads(EXPERTS.read_text())
    model, train = found["model"], found["train"]
    sizes = [model[key] for key in ("layers", "width", "heads", "ffn", "vocab")]
    sizes += [train["seq_len"], train["batch_size"]]
    return sizes, [model[key] for key in ("experts", "expert_ffn", "top_k")]


class Expert(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """A loop over experts: each takes its tokens, and adds what it makes of them. Nobody is dropped."""

    def __init__(self, width, count, inner, taken):
        super().__init__()
        self.taken = taken
        self.router = nn.Linear(width, count, bias=False)
        self.all = nn.ModuleList(Expert(width, inner) for _ in range(count))

    @torch._dynamo.disable
    def forward(self, x):
        tokens = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            likely = F.linear(tokens.float(), self.router.weight).softmax(-1)
            share, chosen = likely.topk(self.taken, -1)
            share = share / share.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens, dtype=torch.bfloat16)
        for number, expert in enumerate(self.all):
            token, place = torch.where(chosen == number)
            made = expert(tokens[token]) * share[token, place, None]
            result.index_add_(0, token, made.to(result.dtype))
        load = F.one_hot(chosen, len(self.all)).float().mean((0, 1))
        self.balance = len(self.all) * (load * likely.mean(0)).sum()
        return result.view(x.shape)


class Layer(nn.Module):
    def __init__(self, width, heads, inner, plain, experts):
        super().__init__()
        norm = nn.LayerNorm if plain else lambda size: nn.RMSNorm(size, eps=1e-5)
        self.heads, self.plain = heads, plain
        self.before_attention, self.before_inner = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=plain)
        self.out = nn.Linear(width, width, bias=plain)
        self.experts = Experts(width, *experts) if experts else None
        if not experts:
            self.up = nn.Linear(width, inner if plain else 2 * inner, bias=plain)
            self.down = nn.Linear(inner, width, bias=plain)

    def forward(self, x, angles):
        batch, positions, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, positions, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if not self.plain:
            q, k = turned(q, angles), turned(k, angles)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, positions, width))
        if self.experts is not None:
            return x + self.experts(self.before_inner(x))
        inner = self.up(self.before_inner(x))
        if self.plain:
            return x + self.down(F.gelu(inner, approximate="tanh"))
        gate, up = inner.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def turned(x, angles):
    (cos, sin), (a, b) = angles, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Network(nn.Module):
    def __init__(self, layers, width, heads, inner, vocabulary, positions, plain, experts):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(positions, width) if plain else None
        self.layers = nn.ModuleList(
            Layer(width, heads, inner, plain, experts if at % 2 else None) for at in range(layers))
        self.last = nn.LayerNorm(width) if plain else nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angle = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angle.cos().bfloat16())
        self.register_buffer("sin", angle.sin().bfloat16())
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
        if plain:
            self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places.weight
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        logits = self.head(self.last(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + 0.01 * sum(layer.experts.balance for layer in self.layers if layer.experts is not None)


class Torch:
    """A compiled model, on the GPU if it is not a small one."""

    def __init__(self, preset, sizes, experts, device="cuda"):
        *sizes, batch = sizes
        torch.manual_seed(0)
        plain = preset.startswith("gpt2")
        self.model, self.device = Network(*sizes, plain, experts).to(device), device
        self.compiled = torch.compile(self.model) if device == "cuda" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        self.batch = [torch.randint(sizes[4], (batch, sizes[5]), device=device) for _ in range(2)]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(8):
            self.loss = self.step()

    def step(self):
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.compiled(*self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def median_ms(self, steps=25):
        times = []
        for _ in range(steps):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        # The first ones warm the GPU.
        return statistics.median(times[5:])


def phalanx(binary, preset, settings):
    narrow = ["run.device=cuda", "train.microbatches=1"]
    narrow += [f"precision.{part}=bf16" for part in ("compute", "weights", "grads")]
    command = [binary, "bench", "step", "--json"]
    command += [str(EXPERTS)] if preset == "experts" else ["--preset", preset]
    command += [word for setting in narrow for word in ("--set", setting)] + settings
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["median_ms"], found["peak_device_bytes"] / 2**30


def main():
    torch.set_float32_matmul_precision("high")
    own, settings = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, settings = own[:at], own[at + 1 :]
    if not own:
        sys.exit(__doc__)
    rounds = int(own[own.index("--rounds") + 1]) if "--rounds" in own else 4
    presets = [own[at + 1] for at, word in enumerate(own) if word == "--preset"] or list(MODELS)
    if "--small" in own:
        for preset in presets:
            experts = (4, 48, 2) if preset == "experts" else None
            small = Torch(preset, (2, 32, 2, 64, 96, 16, 2), experts, device="cpu")
            print(f"{preset}: the loss of PyTorch's eighth step is {small.loss:.3f}")
        return
    for preset in presets:
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        theirs, found = Torch(preset, *sizes_of(preset)), []
        for _ in range(rounds):
            ours, memory = phalanx(own[0], preset, settings)
            found.append((theirs.median_ms(), ours))
            print(f"{preset}: PyTorch {found[-1][0]:.1f} ms, phalanx {ours:.1f} ms", flush=True)
        torch_ms, own_ms = (statistics.median(column) for column in zip(*found))
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{preset}: {torch_ms / own_ms:.3f} of compiled PyTorch, memory {memory:.1f} beside {peak:.1f} GiB")
        del theirs


if __name__ == "__main__":
    main()
