#!/usr/bin/env python3
"""Steps that ranks take together beside steps that wait for each other, in alternating runs.

    cargo build --release
    python3 tools/bench/together.py target/release/phalanx [--pp 2] [--rounds 5]

Post-validation: zb-h2, zb-v and zb-auto with and without it. Pipelines without a flush: rows of 32 steps beside steps that pause
after each (an evaluation of nothing else would change the work, so a checkpoint-free run of single steps is made by
`train.eval_every=1` and its evaluations are not counted in `step_ms`). Prints the median time of a step of each run, and the
median of the ratios. Give every rank a core of its own, and leave the machine alone."""

import argparse
import json
import statistics
import subprocess
import tempfile


def step_ms(args, sets):
    """The median time of a step of one run, without its first block."""
    with tempfile.TemporaryDirectory() as folder:
        command = [args.phalanx, "train", "--json", "--preset", args.preset]
        for key, value in sets.items():
            command += ["--set", f"{key}={value}"]
        command += ["--set", f"run.dir={folder}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    times = [line["step_ms"] for line in lines if "step" in line and "step_ms" in line]
    return statistics.median(times[len(times) // 4 :])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("phalanx")
    parser.add_argument("--preset", default="bench-13m")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    common = {
        "parallel.pp": args.pp,
        "train.microbatches": args.microbatches,
        "train.steps": args.steps,
        "run.threads": 1,
    }
    alone = {"train.eval_every": 0}
    pairs = []
    for schedule in ["zb-h2", "zb-v", "zb-auto"]:
        own = {**common, **alone, "parallel.schedule": schedule, "optim.clip": 1e6}
        if schedule == "zb-auto":
            own["parallel.schedule_memory"] = 2
        pairs.append((f"{schedule}, post-validation", own, {**own, "parallel.post_validation": "true"}))
    for schedule in ["pipedream", "pipedream-2bw"]:
        own = {**common, "parallel.schedule": schedule, "optim.clip": "none"}
        pairs.append((f"{schedule}, in rows", {**own, "train.eval_every": 1}, {**own, **alone}))
    for name, waits, goes in pairs:
        rows = [(step_ms(args, waits), step_ms(args, goes)) for _ in range(args.rounds)]
        before, after = (statistics.median(column) for column in zip(*rows))
        ratio = statistics.median(b / a for a, b in rows)
        print(f"{name}: {before:.2f} ms waiting, {after:.2f} ms together, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
