"""Makes tests/fixtures/mixtral: a small random Mixtral of `transformers`, with its results.

    .venv/bin/python tools/oracle/mixtral.py            # rewrites tests/fixtures/mixtral
    .venv/bin/python tools/oracle/mixtral.py --out DIR  # somewhere else

The files are those of make_fixtures.py. Both precisions come from `transformers` (see wide.py).
The loss is the cross-entropy plus the balancing loss of each layer, by the function of `transformers`:
COEFFICIENT / k times the sum over layers. (It takes all layers together; here each has its own.)
"""

import argparse
import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.mixtral import modeling_mixtral

import make_fixtures
from make_fixtures import BATCHES, OPTIM, disagreement, loss_of, make_batches
from wide import wide

COEFFICIENT = 0.02
SEED, LENGTH = 11, 12
CONFIG = dict(
    vocab_size=45, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, sliding_window=None, bos_token_id=0, eos_token_id=0,
    router_aux_loss_coef=COEFFICIENT, attn_implementation="eager", experts_implementation="eager",
)


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    model = model.eval().to(dtype)
    if dtype == torch.float64:
        size = model.config.hidden_size // model.config.num_attention_heads
        places = torch.arange(0, size, 2, dtype=torch.float64) / size
        model.model.rotary_emb.inv_freq = model.config.rope_parameters["rope_theta"] ** -places
    return model


def total_loss(model, ids, targets):
    out = model(ids, use_cache=False, output_router_logits=True)
    k, experts = model.config.num_experts_per_tok, model.config.num_local_experts
    aux = sum(modeling_mixtral.load_balancing_loss_func((own,), experts, k) for own in out.router_logits)
    return out.logits, loss_of(out.logits, targets) + COEFFICIENT / k * aux


def ours(tensors):
    """Under our names and in our layouts: `[in, out]`, the experts of a layer in one tensor."""
    out = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").removesuffix(".weight")
        if "norm" in name or name == "embed_tokens":
            turned = tensor
        else:
            turned = tensor.transpose(-1, -2)
        name = name.replace("layers.", "blocks.").replace("embed_tokens", "embed").replace("lm_head", "head")
        name = name.replace("input_layernorm", "norm1").replace("post_attention_layernorm", "norm2")
        name = name.replace("self_attn.o_proj", "attn.out").replace("self_attn.", "attn.").replace("_proj", "")
        name = name.replace("mlp.gate", "experts.router").replace("mlp.experts.", "experts.")
        if name.endswith("gate_up"):
            gate, up = turned.chunk(2, dim=-1)
            out[name.replace("gate_up", "gate")], out[name.replace("gate_up", "up")] = gate, up
        else:
            out[name] = turned
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def results(folder, dtype, ids, targets):
    model = load(folder, dtype)
    logits, loss = total_loss(model, ids[0], targets[0])
    loss.backward()
    out = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    out |= {f"grad.{n}": g for n, g in ours({n: p.grad for n, p in model.named_parameters()}).items()}
    model = load(folder, dtype)
    losses, norms = make_fixtures.train(lambda x, y: total_loss(model, x, y)[1], list(model.parameters()), ids, targets)
    final = ours({n: p.detach() for n, p in model.named_parameters()})
    return out, losses, norms, {n: w.norm().item() for n, w in final.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures")
    folder = parser.parse_args().out / "mixtral"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**CONFIG), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1.0 + 0.2 * noise if p.ndim == 1 else noise * (0.5 if "embed" in name else p.shape[-1] ** -0.5))
    make_fixtures.write_model(folder, model, {})
    ids, targets = make_batches(generator, CONFIG["vocab_size"], LENGTH)
    single, losses32, norms32, _ = results(folder, torch.float32, ids, targets)
    with wide(modeling_mixtral):
        double, losses64, norms64, final = results(folder, torch.float64, ids, targets)
    assert all(t.dtype == torch.float64 for t in double.values())

    data = {"ids": ids.int(), "targets": targets.int()}
    save_file({n: t.contiguous() for n, t in (data | single).items()}, folder / "oracle.safetensors")
    save_file({n: t.contiguous() for n, t in double.items()}, folder / "oracle_f64.safetensors")
    record = {
        "optimizer": {"kind": "adamw", **OPTIM, "schedule": "constant", "decay": "parameters of two or more dims",
                      "clipping": "gradients times min(1, clip / (norm + 1e-6))"},
        "batches": BATCHES, "aux_loss": COEFFICIENT,
        "losses_f32": losses32, "grad_norms_f32": norms32,
        "losses_f64": losses64, "grad_norms_f64": norms64,
        "final_norms_f64": final,
    }
    (folder / "losses.json").write_text(json.dumps(record, indent=1) + "\n")
    worst = disagreement(single, double)
    worst["losses"] = max(abs(a - b) / b for a, b in zip(losses32, losses64))
    print(losses64[0], losses64[-1], worst)
    assert all(worst[k] < limit for k, limit in {"logits": 1e-5, "loss": 1e-5, "grad": 1e-5, "losses": 1e-4}.items())


if __name__ == "__main__":
    main()
