#!/usr/bin/env python3
"""Squares of ranks beside lines, rings beside gathered keys, and the balance of causal attention, in alternating runs.

    cargo build --release
    python3 tools/bench/shapes.py target/release/phalanx [--rounds 5]

- `bench-13m`, tp 4 as a square beside a line, and cp 2 as a ring beside gathered keys: time of a step where every rank has
  a core, processor time over all ranks elsewhere; and how much communication memory the two kinds of cp take.
- 8,192 tokens on four ranks in a ring: time inside attention on the rank that needs most of it, contiguous blocks beside
  zigzag, from traced steps. It counts only where every rank has a core.

Ratios are medians over rounds; each round runs both sides once, in turns. Leave the machine alone."""

import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

LONG = {
    "model.layers": 1,
    "model.width": 64,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.ffn": 64,
    "model.vocab": 64,
    "model.context": 8192,
    "train.seq_len": 8192,
    "train.batch_size": 1,
    "train.eval_every": 0,
    "parallel.cp": 4,
    "parallel.cp_kind": "ring",
    "run.threads": 1,
}


def run(args, words, sets, folder):
    command = [args.phalanx, *words, "--preset", "bench-13m"]
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def step(args, sets, ranks, folder):
    """Milliseconds of a step, or of its processor time where ranks share cores."""
    found = run(args, ["bench", "step", "--json"], {**sets, "run.threads": 1}, folder)[-1]
    return found["median_ms"] if len(os.sched_getaffinity(0)) >= ranks else found["busy_ms"]


def attention(args, order, folder):
    """Milliseconds inside attention of the rank that needs most, in a traced step."""
    trace = pathlib.Path(folder) / "trace.json"
    sets = {**LONG, "parallel.cp_order": order, "train.steps": 4, "run.dir": folder}
    run(args, ["train", "--json", "--trace", str(trace)], sets, folder)
    spent = collections.Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "kernel" and event["name"].startswith("attend"):
            spent[event["pid"]] += event["dur"] / 1e3
    assert len(spent) == 4, spent
    return max(spent.values())


def compare(what, rounds, left, right):
    rows = [(left(), right()) for _ in range(rounds)]
    medians = [statistics.median(column) for column in zip(*rows)]
    ratios = [a / b for a, b in rows]
    print(f"{what}: {medians[0]:.1f} and {medians[1]:.1f} ms, ratio {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("phalanx", type=os.path.abspath)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory() as folder:
        line, square = {"parallel.tp": 4}, {"parallel.tp": 4, "parallel.tp_kind": "2d"}
        cp = {kind: {"parallel.cp": 2, "parallel.cp_kind": kind} for kind in ["ring", "allgather"]}
        compare("tp 4, 2d beside 1d", args.rounds,
                lambda: step(args, square, 4, folder), lambda: step(args, line, 4, folder))
        compare("cp 2, ring in zigzag beside gathered keys", args.rounds,
                lambda: step(args, cp["ring"], 2, folder), lambda: step(args, cp["allgather"], 2, folder))
        for kind, sets in cp.items():
            memory = run(args, ["explain", "--json"], sets, folder)[-1]["memory"]
            print(f"cp 2, {kind}: {memory['foreign_bytes'] / 2**20:.2f} MiB of communication memory", flush=True)
        compare("8,192 tokens, cp 4, attention of the slowest rank, contiguous beside zigzag", args.rounds,
                lambda: attention(args, "block", folder), lambda: attention(args, "zigzag", folder))


main()
