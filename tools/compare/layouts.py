#!/usr/bin/env python3
"""Runs `phalanx verify` on a sample of layouts, with ranks as processes and on two hosts, and compares what it says with ranks as threads: the
same bytes between ranks, the same memory, numbers within its tolerances; and `train` for two steps, with the same bits in every weight.

Layouts are drawn by a seed from the systems of the composition matrix. Those that one process refuses are not counted. The two hosts are two
names of the loopback device, so all messages between their ranks go over TCP.

    cargo build --release && tools/compare/layouts.py --phalanx target/release/phalanx --count 20
"""
import argparse, json, os, random, subprocess, sys, tempfile

TENSOR = [[], [], ["tp=2"], ["tp=2", "sp=true"], ["tp=4", "tp_kind=2d"]]
CONTEXT = [[], [], ["cp=2"], ["cp=2", "cp_kind=allgather"], ["cp=2", "cp_kind=ring"]]
DATA = [[], ["dp=2"], ["dp=2", "zero=1"], ["dp=2", "zero=2"], ["dp=2", "zero=3"], ["dp=4", "zero=3", "dp_shard=2"]]
STAGES = [[], []] + [["pp=2", f"schedule={name}"] for name in "gpipe 1f1b interleaved breadth-first zb-h1 zb-v".split()]
OTHER = [[], [], ["train.recompute=selective"], ["train.recompute=full"], ["model.kind=gpt2"]]


def draw(dice):
    keys = [f"parallel.{key}" for part in (TENSOR, CONTEXT, DATA, STAGES) for key in dice.choice(part)] + dice.choice(OTHER)
    ranks = 1
    for key in keys:
        name, value = key.split("=")
        ranks *= int(value) if name in ("parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp") else 1
    return ranks, keys


def run(args, folder, before, command, keys):
    sets = ["run.threads=1", "train.batch_size=16", "train.microbatches=4", "model.layers=4"] + keys
    words = [args.phalanx] + before + [command, "--preset", "tiny", "--json"] + [word for key in sets for word in ("--set", key)]
    words += ["--steps", "2"] if command == "verify" else ["--set", "train.steps=2"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)


def verified(args, folder, before, keys):
    done = run(args, folder, before, "verify", keys)
    if done.returncode != 0:
        sys.exit(f"{before} {keys}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["ok"], found["comm"], found["memory"]


def weights(args, folder, before, keys, name):
    done = run(args, folder, before, "train", keys + [f"run.name={name}"])
    if done.returncode != 0:
        sys.exit(f"{before} {keys}: exit code {done.returncode}\n{done.stderr[-1000:]}")
    with open(os.path.join(folder, "runs", name, "model.safetensors"), "rb") as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phalanx", default="target/release/phalanx")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.phalanx = os.path.abspath(args.phalanx)
    dice, count = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "rsh"), "w") as file:
            file.write('#!/bin/sh\nshift\nexec sh -c "$*"\n')
        os.chmod(os.path.join(folder, "rsh"), 0o755)
        while count < args.count:
            ranks, keys = draw(dice)
            if not 2 <= ranks <= 8 or run(args, folder, [], "verify", keys).returncode == 2:
                continue
            with open(os.path.join(folder, "hosts"), "w") as file:
                file.write(f"127.0.0.1 slots={ranks // 2}\nlocalhost slots={ranks - ranks // 2}\n")
            processes = ["launch", "-n", str(ranks), "--"]
            hosts = ["launch", "-n", str(ranks), "--hosts", "hosts", "--rsh", "./rsh", "--"]
            own, bits = verified(args, folder, [], keys), weights(args, folder, [], keys, f"t{count}")
            for name, before in (("processes", processes), ("hosts", hosts)):
                assert verified(args, folder, before, keys) == own, f"{name} {keys}: verify differs"
                assert weights(args, folder, before, keys, f"{name}{count}") == bits, f"{name} {keys}: weights differ"
            count += 1
            print(f"{count}: {ranks} ranks, {' '.join(keys)}: the same on threads, processes and two hosts", flush=True)
    print(f"{count} layouts of seed {args.seed}")


if __name__ == "__main__":
    main()
