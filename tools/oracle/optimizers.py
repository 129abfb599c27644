"""Makes tests/fixtures/<case>/optimizers.json: twenty steps of each update rule in f64.

    .venv/bin/python tools/oracle/optimizers.py            # rewrites the files, after make_fixtures.py
    .venv/bin/python tools/oracle/optimizers.py --out DIR  # somewhere else

Adam and SGD are those of `torch.optim`. Lion, LAMB and Adafactor are the equations of their papers
(Chen et al., 2023, algorithm 2; You et al., 2020, algorithm 2 with the identity as phi; Shazeer and Stern,
2018, algorithms 4 and 5 with relative steps of at most lr, and decoupled decay), written below line by line. Models, batches, clipping and which parameters decay are those of make_fixtures.py. Per rule:
its settings, the loss before and the gradient norm (before clipping) at each step, and the norm of every
parameter after the last step.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import plain

CASES = ["gpt2_bare", "llama_tied"]
STEPS, CLIP = 20, 1.0
RULES = {
    "adam": {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05},
    "sgd": {"lr": 3e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    "lamb": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.05},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.05},
    "adafactor": {"lr": 1e-2, "eps": 1e-30, "least": 1e-3, "longest": 1.0, "weight_decay": 0.05},
}


class Lamb:
    def __init__(self, groups, lr, betas, eps):
        self.groups, self.lr, self.betas, self.eps, self.t = groups, lr, betas, eps, 0
        self.m = {id(p): torch.zeros_like(p) for g in groups for p in g["params"]}
        self.v = {id(p): torch.zeros_like(p) for g in groups for p in g["params"]}

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for group in self.groups:
            for x in group["params"]:
                g, m, v = x.grad, self.m[id(x)], self.v[id(x)]
                m.copy_(b1 * m + (1 - b1) * g)
                v.copy_(b2 * v + (1 - b2) * g * g)
                r = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
                u = r + group["weight_decay"] * x
                trust = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
                x -= self.lr * trust * u


class Lion:
    def __init__(self, groups, lr, betas):
        self.groups, self.lr, self.betas = groups, lr, betas
        self.m = {id(p): torch.zeros_like(p) for g in groups for p in g["params"]}

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for group in self.groups:
            for x in group["params"]:
                g, m = x.grad, self.m[id(x)]
                c = b1 * m + (1 - b1) * g
                x -= self.lr * (c.sign() + group["weight_decay"] * x)
                m.copy_(b2 * m + (1 - b2) * g)


class Adafactor:
    def __init__(self, groups, lr, eps, least, longest):
        self.groups, self.lr, self.eps, self.least, self.longest, self.t = groups, lr, eps, least, longest, 0
        self.state = {}

    @torch.no_grad()
    def step(self):
        self.t += 1
        beta, rho = 1 - self.t**-0.8, min(self.lr, self.t**-0.5)
        for group in self.groups:
            for x in group["params"]:
                g, squares = x.grad, x.grad**2 + self.eps
                if x.ndim < 2:
                    v = beta * self.state.get(id(x), 0.0) + (1 - beta) * squares
                    self.state[id(x)] = v
                else:
                    r, c = self.state.get(id(x), (0.0, 0.0))
                    r = beta * r + (1 - beta) * squares.sum(-1)
                    c = beta * c + (1 - beta) * squares.sum(-2)
                    self.state[id(x)] = (r, c)
                    v = torch.outer(r, c) / r.sum()
                u = g / v.sqrt()
                u = u / max(1.0, (u.square().mean().sqrt() / self.longest).item())
                alpha = max(self.least, x.square().mean().sqrt().item()) * rho
                x.copy_(x - self.lr * group["weight_decay"] * x - alpha * u)


def optimizer(kind, settings, parameters):
    settings = dict(settings)
    decay = settings.pop("weight_decay")
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "lamb": Lamb, "lion": Lion,
            "adafactor": Adafactor}
    return make[kind](groups, **settings)


def sizes_of(config):
    if config["model_type"] == "gpt2":
        heads, width = config["n_head"], config["n_embd"]
        return {"family": "gpt2", "layers": config["n_layer"], "heads": heads, "kv_heads": heads,
                "head_dim": width // heads, "eps": config["layer_norm_epsilon"]}
    return {"family": "llama", "layers": config["num_hidden_layers"], "heads": config["num_attention_heads"],
            "kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"],
            "eps": config["rms_norm_eps"], "rope": config["rope_parameters"]}


def weights_of(folder, sizes):
    tensors = load_file(folder / "model.safetensors")
    prefix = "transformer." if sizes["family"] == "gpt2" else "model."
    named = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn.bias"):
            continue  # a stored mask
        whole = name.startswith(prefix) or name.startswith("lm_head")
        named[name if whole else prefix + name] = tensor
    return plain.from_hf(sizes["family"], sizes["layers"], named)


def run(kind, settings, weights, sizes, ids, targets):
    p = {n: w.double().requires_grad_() for n, w in weights.items()}
    rule = optimizer(kind, settings, list(p.values()))
    losses, norms = [], []
    for step in range(STEPS):
        batch = step % len(ids)
        for w in p.values():
            w.grad = None
        logits = plain.logits(p, sizes, ids[batch].long())
        loss = F.cross_entropy(logits.flatten(0, 1), targets[batch].long().flatten(), ignore_index=-100)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(list(p.values()), CLIP).item())
        rule.step()
        losses.append(loss.item())
    final = {n: w.detach().norm().item() for n, w in p.items()}
    return {"settings": {**settings, "clip": CLIP}, "losses": losses, "grad_norms": norms, "final_norms": final}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures"
    parser.add_argument("--out", type=pathlib.Path, default=home)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for case in CASES:
        sizes = sizes_of(json.loads((home / case / "config.json").read_text()))
        weights = weights_of(home / case, sizes)
        data = load_file(home / case / "oracle.safetensors")
        record = {kind: run(kind, settings, weights, sizes, data["ids"], data["targets"])
                  for kind, settings in RULES.items()}
        folder = out / case
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "optimizers.json").write_text(json.dumps(record, indent=1) + "\n")
        for kind, row in record.items():
            print(f"{case:12} {kind:10} {row['losses'][0]:8.4f} {row['losses'][-1]:8.4f}")


main()
