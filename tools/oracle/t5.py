"""Makes tests/fixtures/t5, t5_gated and t5_kinds.json: small random T5 models of `transformers`, with their results.

    .venv/bin/python tools/oracle/t5.py            # rewrites them
    .venv/bin/python tools/oracle/t5.py --out DIR  # somewhere else

The files of a model are those of make_fixtures.py. Both precisions come from `transformers` (see wide.py). A row of
`ids` is one text: the encoder reads its first half and the decoder gets the other, so logits and targets that count
are those of the second half. t5_kinds.json has the kinds of distances that `transformers` computes in f32: for each
setting the distances (key minus query) from -LONGEST on at which a new run of one kind begins.
"""

import argparse
import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, T5Config
from transformers.models.t5 import modeling_t5

import make_fixtures
from make_fixtures import BATCHES, OPTIM, disagreement, loss_of, make_batches
from wide import wide

LONGEST = 3000
PLAIN = dict(
    vocab_size=43, d_model=16, d_kv=8, num_heads=2, d_ff=24, num_layers=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=9, feed_forward_proj="relu", tie_word_embeddings=True,
)
# Version 1.1: a gate, a head of its own; heads that are not the width together.
GATED = dict(
    vocab_size=37, d_model=12, d_kv=5, num_heads=3, d_ff=20, num_layers=2, layer_norm_epsilon=1e-5,
    feed_forward_proj="gated-gelu", tie_word_embeddings=False,  # which also means that its input is not scaled
)
CASES = [("t5", 21, 23, PLAIN), ("t5_gated", 22, 36, GATED)]


def load(folder, dtype):
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval().to(dtype)


def logits_of(model, ids):
    source = ids.shape[1] // 2
    return model(input_ids=ids[:, :source], decoder_input_ids=ids[:, source:], use_cache=False).logits


def loss(model, ids, targets):
    return loss_of(logits_of(model, ids), targets[:, ids.shape[1] // 2 :])


def ours(tensors):
    """Under our names and in our layouts."""
    out = {}
    for name, tensor in tensors.items():
        name = name.removesuffix(".weight")
        stack, _, rest = name.partition(".")
        parts = rest.split(".")
        if name in ("shared", "lm_head"):
            out["embed" if name == "shared" else "head"] = tensor if name == "shared" else tensor.T
        elif rest == "final_layer_norm":
            out["encoder.norm" if stack == "encoder" else "norm"] = tensor
        elif parts[-1] == "relative_attention_bias":
            out[f"{stack}.bias"] = tensor
        elif parts[-1] == "layer_norm":
            out[f"{stack}.blocks.{parts[1]}.norm{int(parts[3]) + 1}"] = tensor
        else:
            kind = {"SelfAttention": "attn", "EncDecAttention": "cross", "DenseReluDense": "mlp"}[parts[4]]
            end = {"o": "out", "wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}.get(parts[5], parts[5])
            out[f"{stack}.blocks.{parts[1]}.{kind}.{end}"] = tensor.T
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}


def randomise(model, generator):
    """Weights with which every part matters, also the tables of distances."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.copy_(1.0 + 0.2 * noise)
            elif "shared" in name or "relative_attention_bias" in name:
                p.copy_(0.7 * noise)
            else:
                # Scores have no scale.
                scale = model.config.d_kv ** -0.5 if name.endswith(".q.weight") else 1.0
                p.copy_(scale * noise * p.shape[-1] ** -0.5)


def results(folder, dtype, ids, targets):
    model = load(folder, dtype)
    logits = logits_of(model, ids[0])
    first = loss(model, ids[0], targets[0])
    first.backward()
    out = {"logits": logits.detach(), "loss": first.detach().reshape(1)}
    out |= {f"grad.{n}": g for n, g in ours({n: p.grad for n, p in model.named_parameters()}).items()}
    model = load(folder, dtype)
    losses, norms = make_fixtures.train(lambda x, y: loss(model, x, y), list(model.parameters()), ids, targets)
    final = ours({n: p.detach() for n, p in model.named_parameters()})
    return out, losses, norms, {n: w.norm().item() for n, w in final.items()}


def make_case(out, name, seed, length, sizes):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    config = T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    if not sizes["tie_word_embeddings"]:
        # `transformers` begins with a tied head anyhow.
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    randomise(model, generator)
    make_fixtures.write_model(folder, model, {})
    ids, targets = make_batches(generator, sizes["vocab_size"], length)
    targets[..., : length // 2] = -100
    single, losses32, norms32, _ = results(folder, torch.float32, ids, targets)
    with wide(modeling_t5):
        double, losses64, norms64, final = results(folder, torch.float64, ids, targets)
    assert all(t.dtype == torch.float64 for t in double.values())

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
    print(name, losses64[0], losses64[-1], norms64[0], worst)
    assert all(worst[k] < limit for k, limit in {"logits": 1e-5, "loss": 1e-5, "grad": 1e-5, "losses": 1e-4}.items())


def make_kinds(out):
    distances = torch.arange(-LONGEST, LONGEST + 1)
    rows = []
    for buckets, far in [(32, 128), (8, 9), (16, 64), (64, 1000), (4, 7)]:
        for both in (True, False):
            kinds = modeling_t5.T5Attention._relative_position_bucket(
                distances, bidirectional=both, num_buckets=buckets, max_distance=far).tolist()
            runs = [(d - LONGEST, kind) for d, kind in enumerate(kinds) if d == 0 or kinds[d - 1] != kind]
            rows.append({"buckets": buckets, "far": far, "both_ways": both, "runs": runs})
    lines = ",\n".join(json.dumps(row) for row in rows)
    (out / "t5_kinds.json").write_text(f"[\n{lines}\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures")
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for case in CASES:
        make_case(out, *case)
    make_kinds(out)


if __name__ == "__main__":
    main()
