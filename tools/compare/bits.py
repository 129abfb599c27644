#!/usr/bin/env python3
"""Checks that two builds of the command train to the same bits.

    tools/compare/bits.py OLD NEW [--quick]

Trains a grid of layouts with both for a few steps and compares every loss and gradient norm, printed in
full precision, and every byte of the weights that a run leaves. Prints one line for each layout; exits
with 1 if one differs.
"""
import hashlib
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile

STEPS = 4
ONE = [
    [],
    ["train.microbatches=4"],
    ["train.recompute=full"],
    ["precision.compute=bf16", "precision.weights=bf16"],
    ["optim.kind=sgd"],
    ["model.tied=true"],
]
MANY = [
    ["parallel.dp=2"],
    ["parallel.dp=2", "parallel.zero=1"],
    ["parallel.dp=2", "parallel.zero=2", "train.microbatches=2"],
    ["parallel.dp=2", "parallel.zero=3"],
    ["parallel.dp=4", "parallel.zero=3", "parallel.dp_shard=2"],
    ["parallel.tp=2"],
    ["parallel.tp=2", "parallel.sp=true"],
    ["parallel.cp=2"],
    ["parallel.cp=2", "parallel.cp_kind=allgather"],
    ["parallel.dp=2", "parallel.tp=2", "parallel.cp=2", "parallel.zero=3"],
    ["parallel.dp=3", "train.batch_size=30"],
    ["parallel.tp=4", "model.kv_heads=2"],
]
PIPES = [
    [f"parallel.pp={pp}", "train.microbatches=4", f"parallel.schedule={schedule}", *more]
    for pp, schedule, more in [
        (2, "1f1b", []),
        (4, "1f1b", ["model.tied=true"]),
        (2, "gpipe", ["train.recompute=stage"]),
        (2, "interleaved", ["parallel.tp=2"]),
        (2, "breadth-first", ["parallel.dp=2", "parallel.zero=3"]),
        (2, "zb-h1", ["parallel.dp=2", "parallel.tp=2", "parallel.zero=3"]),
        (2, "zb-v", ["parallel.cp=2"]),
        (4, "zb-h2", ["parallel.dp=2", "parallel.zero=2"]),
    ]
]


def trained(binary, settings, folder):
    sets = itertools.chain.from_iterable(("--set", s) for s in settings)
    base = ["--preset", "tiny", "--set", f"train.steps={STEPS}", "--set", f"run.dir={folder}", "--json"]
    done = subprocess.run([binary, "train", *base, *sets], capture_output=True, text=True, cwd=folder)
    if done.returncode != 0:
        return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    numbers = [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    weights = sorted(pathlib.Path(folder).rglob("model.safetensors"))
    return numbers, [hashlib.sha256(file.read_bytes()).hexdigest() for file in weights]


def main():
    old, new = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:3])
    cases = ONE + MANY + PIPES
    cases += [[*case, "precision.compute=f64"] for case in MANY + PIPES]
    if "--quick" in sys.argv:
        cases = cases[::3]
    differ = 0
    for case in cases:
        found = []
        for binary in (old, new):
            with tempfile.TemporaryDirectory() as folder:
                found.append(trained(binary, case, folder))
        # What fails in both proves nothing.
        same = found[0] == found[1] and not isinstance(found[0], str)
        differ += not same
        print("same" if same else "DIFFERS", " ".join(case) or "one rank", flush=True)
        if not same:
            print("  old:", found[0], "\n  new:", found[1])
    print(f"{len(cases)} layouts, {differ} differ")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
