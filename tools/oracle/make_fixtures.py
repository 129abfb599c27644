"""Makes tests/fixtures: small random GPT-2 and LLaMA models of `transformers`, with their results.

    python -m venv .venv && .venv/bin/pip install torch transformers safetensors
    .venv/bin/python tools/oracle/make_fixtures.py            # rewrites tests/fixtures
    .venv/bin/python tools/oracle/make_fixtures.py --out DIR  # somewhere else

Per case, tests/fixtures/<case>/ holds
  config.json, model.safetensors      the model, as `transformers` reads it (one case: two shards and
                                      an index)
  oracle.safetensors                  by `transformers`, f32:
      ids, targets   i32 [4, 2, T]    four batches; targets are shifted already, -100 is masked
      logits         [2, T, V]        of batch 0
      loss           [1]              mean cross-entropy over the unmasked targets of batch 0
      grad.<name>                     its gradients, under OUR parameter names, linear layers [in, out]
      inv_freq       [head_dim / 2]   rotary inverse frequencies (LLaMA)
  oracle_f64.safetensors              the same (without ids and targets) by tools/oracle/plain.py, f64
  losses.json                         AdamW from these weights: settings, and per precision the loss
                                      before and the gradient norm (before clipping) at each of 20
                                      steps; step s uses batch s mod 4. `final_norms_f64`: the norm
                                      of every parameter after the last step.
tests/fixtures/rope.json: config.json fragments and the inverse frequencies `transformers` derives.

The script fails if f32 and f64 disagree, or if the folder would grow beyond 2 MiB.
"""

import argparse
import json
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import plain

BATCHES, BATCH, STEPS = 4, 2, 20
OPTIM = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def gpt2(**sizes):
    return GPT2Config(n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **sizes)


def llama(**sizes):
    return LlamaConfig(num_hidden_layers=2, bos_token_id=0, eos_token_id=0, **sizes)


def cases():
    """Name, seed, sequence length, configuration and how the folder is written.
    The two cases with Llama-3 rotary scaling are one model in the two spellings."""
    scaled = dict(
        vocab_size=40, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        max_position_embeddings=128, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 500.0, **LLAMA3},
    )
    return [
        ("gpt2", 1, 12, gpt2(vocab_size=48, n_embd=24, n_head=3, n_positions=16), {}),
        # Head size 6, an inner width that is not 4 times the width, and the file as the original
        # GPT-2 has it: no prefix, and the causal mask of each layer stored as a buffer.
        ("gpt2_bare", 2, 10, gpt2(vocab_size=41, n_embd=18, n_head=3, n_positions=10, n_inner=44), {"bare": True}),
        ("llama_gqa", 3, 12, llama(
            vocab_size=48, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
            max_position_embeddings=64, rms_norm_eps=1e-5), {"shards": 2}),
        ("llama_hd6", 4, 11, llama(
            vocab_size=43, hidden_size=24, num_attention_heads=4, num_key_value_heads=2, intermediate_size=36,
            max_position_embeddings=32, rms_norm_eps=1e-6), {"bare": True, "calm": 0.6}),
        # Heads wider than width / heads, one key-value head per query head.
        ("llama_tied", 5, 8, llama(
            vocab_size=64, hidden_size=20, num_attention_heads=2, num_key_value_heads=2, head_dim=14,
            intermediate_size=32, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=True), {}),
        ("llama_rope_old", 6, 12, llama(**scaled), {"old_rope": True}),
        ("llama_rope_new", 6, 12, llama(**scaled), {}),
    ]


def randomise(model, generator, calm):
    """Weights large enough that every part of the model matters to the loss; default initialisation
    leaves norms at one, biases at zero and logits near zero, which would hide mistakes. A calm head
    and final norm make gradients so small that some steps are not clipped."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.copy_(0.2 * noise if name.endswith("bias") else 1.0 + 0.2 * noise)
            elif "wte" in name or "wpe" in name or "embed_tokens" in name:
                p.copy_(0.5 * noise)
            else:
                fan_in = p.shape[0 if ".c_" in name else 1]  # GPT-2's layers are [in, out]
                p.copy_(noise * fan_in**-0.5)
        if calm != 1.0:
            model.lm_head.weight.mul_(calm)
            model.model.norm.weight.mul_(calm)


def write_model(folder, model, style):
    if "shards" in style:
        size = sum(p.numel() * 4 for p in model.parameters())
        model.save_pretrained(folder, max_shard_size=size // 2 + size // 8)
        assert len(list(folder.glob("model-*.safetensors"))) == style["shards"]
    else:
        model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if style.get("bare"):
        strip_prefix(folder / "model.safetensors", model.config)
    if style.get("old_rope"):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        path.write_text(json.dumps(config, indent=2) + "\n")


def strip_prefix(path, config):
    tensors = {}
    for name, tensor in load_file(path).items():
        tensors[name.removeprefix("transformer.").removeprefix("model.")] = tensor
    if config.model_type == "gpt2":
        size = config.n_positions
        for i in range(config.n_layer):
            tensors[f"h.{i}.attn.bias"] = torch.ones(size, size, dtype=torch.uint8).tril().view(1, 1, size, size)
    save_file(tensors, path, {"format": "pt"})


def make_batches(generator, vocab, length):
    tokens = torch.randint(vocab, (BATCHES, BATCH, length + 1), generator=generator)
    ids, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.15] = -100
    targets[:, 0, :3] = -100  # a prompt that is not learnt, as in fine-tuning
    return ids, targets


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def train(loss_on, parameters, ids, targets):
    """The losses, by a function of ids and targets, and gradient norms of AdamW; matrices decay, vectors do not.
    Clipping is torch's: gradients are multiplied by min(1, clip / (norm + 1e-6))."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": OPTIM["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"], betas=tuple(OPTIM["betas"]), eps=OPTIM["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_on(ids[step % BATCHES], targets[step % BATCHES])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, OPTIM["clip"]).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def results_f32(folder, family, layers, ids, targets):
    def load():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        return model.eval()

    model = load()
    logits = model(ids[0], use_cache=False).logits
    loss = loss_of(logits, targets[0])
    loss.backward()
    grads = plain.from_hf(family, layers, {n: p.grad for n, p in model.named_parameters()})
    weights = plain.from_hf(family, layers, {n: p.detach() for n, p in model.named_parameters()})
    out = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    if family == "llama":
        out["inv_freq"] = model.model.rotary_emb.inv_freq.clone()
    out |= {f"grad.{n}": g for n, g in grads.items()}
    model = load()
    losses, norms = train(
        lambda x, y: loss_of(model(x, use_cache=False).logits, y), list(model.parameters()), ids, targets)
    return weights, out, losses, norms


def results_f64(weights, sizes, ids, targets):
    fresh = lambda: {n: w.double().requires_grad_() for n, w in weights.items()}
    p = fresh()
    logits = plain.logits(p, sizes, ids[0])
    loss = loss_of(logits, targets[0])
    loss.backward()
    out = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    if sizes["family"] == "llama":
        out["inv_freq"] = plain.inverse_frequencies(sizes["head_dim"], sizes["rope"])
    out |= {f"grad.{n}": w.grad for n, w in p.items()}
    p = fresh()
    losses, norms = train(lambda x, y: loss_of(plain.logits(p, sizes, x), y), list(p.values()), ids, targets)
    return out, losses, norms, {n: w.detach().norm().item() for n, w in p.items()}


def sizes_of(config):
    if config.model_type == "gpt2":
        return {"family": "gpt2", "layers": config.n_layer, "heads": config.n_head, "kv_heads": config.n_head,
                "head_dim": config.n_embd // config.n_head, "eps": config.layer_norm_epsilon}
    return {"family": "llama", "layers": config.num_hidden_layers, "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "eps": config.rms_norm_eps,
            "rope": config.rope_parameters}


def disagreement(single, double):
    """Largest |f32 - f64| of the results, each relative to the tensor's largest entry, or for
    gradients that vanish (GPT-2's key biases) to the root mean square of all gradients."""
    grads = [t for n, t in double.items() if n.startswith("grad.")]
    floor = (sum(g.square().sum() for g in grads) / sum(g.numel() for g in grads)).sqrt()
    worst = {"logits": 0.0, "loss": 0.0, "inv_freq": 0.0, "grad": 0.0}
    for name, expected in double.items():
        kind = name.split(".")[0]
        scale = max(expected.abs().max(), floor if kind == "grad" else 0.0)
        error = ((single[name].double() - expected).abs().max() / scale).item()
        worst[kind] = max(worst[kind], error)
    return worst


def make_case(out, name, seed, length, config, style):
    folder = out / name
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, generator, style.get("calm", 1.0))
    write_model(folder, model, style)
    ids, targets = make_batches(generator, config.vocab_size, length)
    sizes = sizes_of(config)
    weights, single, losses32, norms32 = results_f32(folder, sizes["family"], sizes["layers"], ids, targets)
    double, losses64, norms64, final = results_f64(weights, sizes, ids, targets)

    data = {"ids": ids.int(), "targets": targets.int()}
    save_file({n: t.contiguous() for n, t in (data | single).items()}, folder / "oracle.safetensors")
    save_file({n: t.contiguous() for n, t in double.items()}, folder / "oracle_f64.safetensors")
    record = {
        "optimizer": {"kind": "adamw", **OPTIM, "schedule": "constant", "decay": "parameters of two or more dims",
                      "clipping": "gradients times min(1, clip / (norm + 1e-6))"},
        "batches": BATCHES,
        "losses_f32": losses32, "grad_norms_f32": norms32,
        "losses_f64": losses64, "grad_norms_f64": norms64,
        "final_norms_f64": final,
    }
    (folder / "losses.json").write_text(json.dumps(record, indent=1) + "\n")

    worst = disagreement(single, double)
    worst["losses"] = max(abs(a - b) / b for a, b in zip(losses32, losses64))
    clipped = sum(n > OPTIM["clip"] for n in norms64)
    count = sum(w.numel() for w in weights.values())
    print(f"{name:15} {count:6} {length:3} {losses64[0]:8.4f} {losses64[-1]:8.4f} {clipped:8} "
          + " ".join(f"{worst[k]:9.1e}" for k in ("logits", "loss", "grad", "inv_freq", "losses")))
    limits = {"logits": 1e-5, "loss": 1e-5, "grad": 1e-5, "inv_freq": 1e-6, "losses": 1e-4}
    assert all(worst[k] < limit for k, limit in limits.items()), worst
    return clipped


def make_rope_table(out):
    """Rotary settings as config.json has them, in both spellings, and what `transformers` makes of them."""
    real = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    settings = [
        {},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 500000.0, "rope_scaling": real},
        {"rope_parameters": {"rope_theta": 500000.0, **real}},
        {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}},
        {"rope_theta": 777.0, "rope_parameters": {"rope_type": "default"}},
        # The scaling of the older spelling wins when a file has both.
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "default", "rope_theta": 600.0}},
        # The trained context defaults to the context.
        {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}},
    ]
    rows = []
    for setting in settings:
        config = {"model_type": "llama", "vocab_size": 40, "hidden_size": 256, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 131072, **setting}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
        rows.append({"config": config, "inv_freq": rotary.inv_freq.tolist()})
    (out / "rope.json").write_text(json.dumps(rows) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures")
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print("                                    loss at step    steps     largest relative |f32 - f64|")
    print("case            params   T        0       19  clipped    logits      loss      grad  inv_freq    losses")
    clipped = []
    for case in cases():
        shutil.rmtree(out / case[0], ignore_errors=True)
        clipped.append(make_case(out, *case))
    assert any(c == STEPS for c in clipped) and any(0 < c < STEPS for c in clipped), "clipping is not tested"
    make_rope_table(out)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(f"{size / 2**20:.2f} MiB in {out}")
    sys.exit(0 if size <= 2 * 2**20 else "the fixtures exceed 2 MiB")


if __name__ == "__main__":
    main()
