#!/usr/bin/env python3
"""Steps that ranks take together beside steps that wait for each other, in alternating runs.

    cargo build --release -p phalanx-cli
    python3 tools/bench/together.py target/release/phalanx [--pp 2] [--rounds 5] [--only post-validation]

Post-validation: zb-h2, zb-v and zb-auto with and without it. Pipelines without a flush: rows of steps, and steps with an
evaluation after each, which makes them wait (evaluations are not part of a step's time). Each run leaves out its first
quarter. Prints the medians over rounds of a run's median step, and the median of the ratios, with the lowest and the
highest of them. Every rank needs a core of its own, and the machine must have nothing else to do."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

VALIDATED = ["zb-h2", "zb-v", "zb-auto"]
ROLLING = ["pipedream", "pipedream-2bw"]


def step_ms(args, sets):
    """The median time of a step of one run, without its first quarter, by the metrics that it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        sets = {**sets, "run.dir": f"{folder}/", "run.name": "measured"}
        command = [args.phalanx, "train", "--preset", args.preset]
        for key, value in sets.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        metrics = pathlib.Path(folder, "measured", "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in metrics]
    times = [line["step_ms"] for line in lines if "step_ms" in line]
    assert len(times) == args.steps, f"{len(times)} of {args.steps} steps were measured"
    if any(line.get("event") == "repeated" for line in lines):
        sys.exit("a step was clipped and done twice: choose a larger optim.clip")
    return statistics.median(times[len(times) // 4 :])


def pairs(args):
    """A name, the settings of steps that wait, and of steps that do not."""
    common = {
        "parallel.pp": args.pp,
        "train.microbatches": args.microbatches,
        "train.batch_size": args.microbatches * args.samples,
        "train.steps": args.steps,
        "run.threads": 1,
    }
    for schedule in VALIDATED:
        own = {**common, "parallel.schedule": schedule, "optim.clip": 1e6}
        if schedule == "zb-auto":
            own["parallel.schedule_memory"] = 2
        yield f"{schedule}, post-validation", own, {**own, "parallel.post_validation": "true"}
    for schedule in ROLLING:
        own = {**common, "parallel.schedule": schedule, "optim.clip": "none"}
        yield f"{schedule}, rows", {**own, "train.eval_every": 1, "train.eval_batches": 1}, own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--preset", default="bench-13m")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{args.preset}, pp {args.pp}, {args.microbatches} micro-batches of {args.samples}, {cores} cores", flush=True)
    if cores < args.pp:
        print("fewer cores than ranks: times say little", flush=True)
    chosen = [pair for pair in pairs(args) if args.only in pair[0]]
    if not chosen:
        sys.exit(f"no pair's name contains `{args.only}`")
    for name, waits, goes in chosen:
        before, after = [], []
        for number in range(args.rounds):
            # Who goes first takes turns, too.
            both = [(waits, before), (goes, after)]
            for sets, times in both if number % 2 == 0 else both[::-1]:
                times.append(step_ms(args, sets))
        ratios = [b / a for a, b in zip(before, after)]
        print(
            f"{name}: {statistics.median(before):.2f} ms waiting, {statistics.median(after):.2f} ms together, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {args.rounds} rounds)",
            flush=True,
        )


if __name__ == "__main__":
    main()
