"""Times a training step of Phalanx beside PyTorch's on the same work, alternating, and prints one table.

The peer is a script that takes a mode (`single1`, `single2`) and optionally `compile`, and prints `… 1234 ms/step …`: a decoder of
the size of preset `bench-13m`. Machines are noisy and shared, so what counts are ratios of medians over alternating rounds.

    cargo build --release
    python -m venv venv && venv/bin/pip install torch
    venv/bin/python tools/bench/compare.py --peer PATH/torch_cpu_baseline.py --rounds 5
"""
import argparse, json, os, re, statistics, subprocess, sys, tempfile, time


def run(command):
    """Runs a command to its end: its output and the peak memory of its process, in bytes."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        text = out.read()
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return text, usage.ru_maxrss * 1024


def ours(binary, threads):
    text, memory = run([binary, "bench", "step", "--preset", "bench-13m", "--set", f"run.threads={threads}", "--json"])
    row = json.loads(text.strip().splitlines()[-1])
    return {"ms": row["median_ms"], "memory": memory, "floor_ms": row["floor_ms"], "fraction": row["floor_fraction"],
            "gemm": row["gemm_fraction"]}


def peer(script, threads, compiled):
    text, memory = run([sys.executable, script, f"single{threads}"] + (["compile"] if compiled else []))
    return {"ms": float(re.search(r"([\d.,]+) ms/step", text).group(1).replace(",", "")), "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the PyTorch script")
    parser.add_argument("--binary", default="target/release/phalanx")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    args = parser.parse_args()
    for threads in map(int, args.threads.split(",")):
        rows = {"eager": [], "compiled": [], "phalanx": []}
        for n in range(args.rounds):
            start = time.time()
            rows["phalanx"].append(ours(args.binary, threads))
            rows["eager"].append(peer(args.peer, threads, False))
            rows["compiled"].append(peer(args.peer, threads, True))
            print(f"threads {threads} round {n + 1}/{args.rounds} ({time.time() - start:.0f} s): "
                  + ", ".join(f"{k} {v[-1]['ms']:.0f}" for k, v in rows.items()), file=sys.stderr, flush=True)
        median = {k: statistics.median(r["ms"] for r in v) for k, v in rows.items()}
        ratios = {k: statistics.median(p["ms"] / o["ms"] for p, o in zip(rows[k], rows["phalanx"])) for k in ("eager", "compiled")}
        own = rows["phalanx"]
        print(f"\n{threads} thread{'s' if threads > 1 else ''}, {args.rounds} alternating rounds (median ms per step)\n")
        print("| | ms | peak memory | against Phalanx |\n|---|---|---|---|")
        for name in ("eager", "compiled"):
            memory = max(r["memory"] for r in rows[name])
            print(f"| PyTorch {name} | {median[name]:.0f} | {memory / 2**20:.0f} MiB | {ratios[name]:.2f}× slower |")
        print(f"| Phalanx | {median['phalanx']:.0f} | {max(r['memory'] for r in own) / 2**20:.0f} MiB | |")
        print(f"| floor (its matrix products alone) | {statistics.median(r['floor_ms'] for r in own):.0f} | | "
              f"{100 * statistics.median(r['fraction'] for r in own):.0f}% reached |\n", flush=True)


if __name__ == "__main__":
    main()
