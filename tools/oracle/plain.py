"""GPT-2 and LLaMA in plain torch, in any precision, and the names Phalanx gives their parameters.

`transformers` cannot serve as a double-precision oracle: in f64 it still computes LLaMA's RMSNorm,
its rotary tables and every loss in f32. The functions below use nothing but elementary torch
operations on a dictionary of parameters, so that every intermediate value has the dtype of the
parameters. Weights are [in, out], as Phalanx keeps them.
"""

import math

import torch
import torch.nn.functional as F


def from_hf(family, layers, tensors):
    """Renames a dictionary of Hugging Face tensors (weights or gradients) and turns linear layers
    of LLaMA from [out, in] to [in, out]. GPT-2's layers are [in, out] already, but query, key and
    value lie side by side in one tensor."""
    out = {}

    def take(ours, theirs, transpose=False):
        tensor = tensors[theirs]
        out[ours] = (tensor.T if transpose else tensor).contiguous()

    if family == "llama":
        take("embed", "model.embed_tokens.weight")
        for i in range(layers):
            b, h = f"blocks.{i}", f"model.layers.{i}"
            take(f"{b}.norm1", f"{h}.input_layernorm.weight")
            take(f"{b}.norm2", f"{h}.post_attention_layernorm.weight")
            for ours, theirs in [("q", "q"), ("k", "k"), ("v", "v"), ("out", "o")]:
                take(f"{b}.attn.{ours}", f"{h}.self_attn.{theirs}_proj.weight", True)
            for name in ["gate", "up", "down"]:
                take(f"{b}.mlp.{name}", f"{h}.mlp.{name}_proj.weight", True)
        take("norm", "model.norm.weight")
        if "lm_head.weight" in tensors:
            take("head", "lm_head.weight", True)
        return out

    take("embed", "transformer.wte.weight")
    take("pos", "transformer.wpe.weight")
    for i in range(layers):
        b, h = f"blocks.{i}", f"transformer.h.{i}"
        for ours, theirs in [("norm1", "ln_1"), ("norm2", "ln_2")]:
            take(f"{b}.{ours}.gain", f"{h}.{theirs}.weight")
            take(f"{b}.{ours}.bias", f"{h}.{theirs}.bias")
        weights = tensors[f"{h}.attn.c_attn.weight"].chunk(3, dim=1)
        biases = tensors[f"{h}.attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip("qkv", weights, biases):
            out[f"{b}.attn.{name}"] = weight.contiguous()
            out[f"{b}.attn.{name}_bias"] = bias.contiguous()
        for ours, theirs in [("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")]:
            take(f"{b}.{ours}", f"{h}.{theirs}.weight")
            take(f"{b}.{ours}_bias", f"{h}.{theirs}.bias")
    take("norm.gain", "transformer.ln_f.weight")
    take("norm.bias", "transformer.ln_f.bias")
    return out


def inverse_frequencies(head_dim, rope):
    """Rotary angles per position, in f64, from the settings of `rope_parameters`."""
    base = [rope["rope_theta"] ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        base = [f / rope["factor"] for f in base]
    elif kind == "llama3":
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        context = rope["original_max_position_embeddings"]

        def scaled(f):
            turns = context * f / (2 * math.pi)
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
            return (1 - share) * f / factor + share * f

        base = [scaled(f) for f in base]
    elif kind != "default":
        raise ValueError(f"rope type {kind} has no plain version")
    return torch.tensor(base, dtype=torch.float64)


def logits(p, c, ids):
    """The logits of model `c` (a dictionary of sizes) with parameters `p`."""
    x = p["embed"][ids]
    if c["family"] == "gpt2":
        x = x + p["pos"][: ids.shape[1]]
    for i in range(c["layers"]):
        b = f"blocks.{i}"
        x = x + _attention(p, c, b, _norm(p, c, f"{b}.norm1", x))
        x = x + _mlp(p, c, b, _norm(p, c, f"{b}.norm2", x))
    head = p["head"] if "head" in p else p["embed"].T
    return _norm(p, c, "norm", x) @ head


def _norm(p, c, name, x):
    if c["family"] == "gpt2":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c["eps"])
    if c["family"] == "gpt2":
        return x * p[f"{name}.gain"] + p[f"{name}.bias"]
    return x * p[name]


def _linear(p, name, x):
    y = x @ p[name]
    return y + p[f"{name}_bias"] if f"{name}_bias" in p else y


def _attention(p, c, b, x):
    heads, groups, size = c["heads"], c["kv_heads"], c["head_dim"]
    batch, length, _ = x.shape
    q = _linear(p, f"{b}.attn.q", x).view(batch, length, heads, size).transpose(1, 2)
    k = _linear(p, f"{b}.attn.k", x).view(batch, length, groups, size).transpose(1, 2)
    v = _linear(p, f"{b}.attn.v", x).view(batch, length, groups, size).transpose(1, 2)
    if c["family"] == "llama":
        q, k = _rotate(c, q), _rotate(c, k)
    k = k.repeat_interleave(heads // groups, dim=1)
    v = v.repeat_interleave(heads // groups, dim=1)
    scores = q @ k.transpose(2, 3) / math.sqrt(size)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return _linear(p, f"{b}.attn.out", (weights @ v).transpose(1, 2).reshape(batch, length, heads * size))


def _rotate(c, x):
    half = c["head_dim"] // 2
    positions = torch.arange(x.shape[2], dtype=torch.float64)
    angles = torch.outer(positions, inverse_frequencies(c["head_dim"], c["rope"]))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mlp(p, c, b, x):
    if c["family"] == "gpt2":
        return _linear(p, f"{b}.mlp.down", F.gelu(_linear(p, f"{b}.mlp.up", x), approximate="tanh"))
    return _linear(p, f"{b}.mlp.down", F.silu(x @ p[f"{b}.mlp.gate"]) * (x @ p[f"{b}.mlp.up"]))
