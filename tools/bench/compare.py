"""Times a training step of Phalanx and of PyTorch on the same work, alternating, and prints one table per case.

The peer is a script that takes a mode (`single1`, `single2`, `ddp2`, `fsdp2`, `tp2`, `pp2`) and optionally `compile`, and prints
`… 1234 ms/step …`: a decoder of the size of preset `bench-13m`. Machines are noisy and shared, so what counts are ratios of medians
over alternating rounds; `--prefix "chrt -r 5"` gives both programs a priority above all others.

    cargo build --release
    python -m venv venv && venv/bin/pip install torch
    venv/bin/python tools/bench/compare.py --peer PATH/torch_cpu_baseline.py --rounds 5
    venv/bin/python tools/bench/compare.py --peer PATH/torch_cpu_baseline.py --cases ddp2,fsdp2,tp2 --rounds 5
"""
import argparse, json, os, re, shlex, statistics, subprocess, sys, tempfile, time

EAGER, COMPILED = "PyTorch", "PyTorch compiled"
# Another schedule of Phalanx, besides the one of the case.
ZERO_BUBBLE = "Phalanx zb-h1"
PIPELINE = ["run.threads=1", "parallel.pp=2", "train.microbatches=4"]
# Settings of Phalanx, the peers' arguments, and how many times as fast it should be if there is a target.
CASES = {
    "single1": (["run.threads=1"], {EAGER: ["single1"], COMPILED: ["single1", "compile"]}, None),
    "single2": (["run.threads=2"], {EAGER: ["single2"], COMPILED: ["single2", "compile"]}, None),
    "ddp2": (["run.threads=1", "parallel.dp=2"], {EAGER: ["ddp2"]}, 1.25),
    "fsdp2": (["run.threads=1", "parallel.dp=2", "parallel.zero=3"], {EAGER: ["fsdp2"]}, 1.5),
    "tp2": (["run.threads=1", "parallel.tp=2"], {EAGER: ["tp2"]}, 1.6),
    "pp2": (PIPELINE, {EAGER: ["pp2"], ZERO_BUBBLE: PIPELINE + ["parallel.schedule=zb-h1"]}, 1.2),
}
FLOOR_TARGET = 0.75


def run(command):
    """Runs a command to its end: its output and the peak memory of its largest process, in bytes."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return text, usage.ru_maxrss * 1024


def ours(args, settings):
    sets = [word for setting in settings for word in ("--set", setting)]
    text, memory = run(args.prefix + [args.binary, "bench", "step", "--preset", "bench-13m", "--json"] + sets)
    row = json.loads(text.strip().splitlines()[-1])
    return {"ms": row["median_ms"], "memory": memory, "floor_ms": row["floor_ms"], "fraction": row["floor_fraction"]}


def peer(args, mode):
    text, memory = run(args.prefix + [sys.executable, args.peer] + mode)
    return {"ms": float(re.search(r"([\d.,]+) ms/step", text).group(1).replace(",", "")), "memory": memory}


def median(rows, key):
    return statistics.median(row[key] for row in rows)


def report(case, target, rows, rounds):
    own = rows["Phalanx"]
    fraction = median(own, "fraction")
    print(f"\n{case}, {rounds} alternating round{'s' if rounds > 1 else ''} (median ms per step)\n")
    print("| | ms | peak memory of a process | against Phalanx |\n|---|---|---|---|")
    ratios = {}
    for name in rows.keys() - {"Phalanx"}:
        ratios[name] = statistics.median(p["ms"] / o["ms"] for p, o in zip(rows[name], own))
    for name in sorted(ratios):
        memory = max(row["memory"] for row in rows[name])
        against = f"{ratios[name]:.2f}× slower" if ratios[name] >= 1 else f"{1 / ratios[name]:.2f}× faster"
        print(f"| {name} {case} | {median(rows[name], 'ms'):.0f} | {memory / 2**20:.0f} MiB | {against} |")
    print(f"| Phalanx | {median(own, 'ms'):.0f} | {max(row['memory'] for row in own) / 2**20:.0f} MiB | |")
    print(f"| floor (its matrix products alone) | {median(own, 'floor_ms'):.0f} | | {100 * fraction:.0f}% reached |")
    if target:
        reached = ratios[EAGER] >= target or fraction >= FLOOR_TARGET
        print(f"\ntarget: {target}× or {100 * FLOOR_TARGET:.0f}% of the floor: {'reached' if reached else 'missed'}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the PyTorch script")
    parser.add_argument("--binary", default="target/release/phalanx")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="single1,single2", help=f"some of {','.join(CASES)}")
    parser.add_argument("--prefix", default="", type=shlex.split, help="put before every command")
    args = parser.parse_args()
    unknown = [case for case in args.cases.split(",") if case not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)}")
    for case in args.cases.split(","):
        settings, peers, target = CASES[case]
        rows = {name: [] for name in ["Phalanx", *peers]}
        for n in range(args.rounds):
            start = time.time()
            rows["Phalanx"].append(ours(args, settings))
            for name, mode in peers.items():
                rows[name].append(ours(args, mode) if name == ZERO_BUBBLE else peer(args, mode))
            print(f"{case} round {n + 1}/{args.rounds} ({time.time() - start:.0f} s): "
                  + ", ".join(f"{k} {v[-1]['ms']:.0f}" for k, v in rows.items()), file=sys.stderr, flush=True)
        report(case, target, rows, args.rounds)


if __name__ == "__main__":
    main()
