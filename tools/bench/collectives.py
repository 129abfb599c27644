"""Times collectives of Phalanx, Gloo and an MPI library on the same machine, alternating, and prints one table.

The Gloo peer is a script that takes the number of ranks and prints `gloo 2 ranks all_reduce 4 KiB 300 us …`; the MPI peer is
collectives_mpi.c of this folder, compiled here by `mpicc`. Machines are noisy and shared, so what counts are ratios of medians over
alternating rounds. `copy` is the share of the copy limit that is reached: the time in which all ranks, copying at once, would read and
write as many bytes as the call must.

    cargo build --release
    venv/bin/python tools/bench/collectives.py --gloo PATH/gloo_collectives.py --mpirun "mpirun --allow-run-as-root" --rounds 3

`--ours` says how Phalanx is started, such as "target/release/phalanx launch -n 2 --" for ranks as processes.
"""
import argparse, json, os, re, shlex, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def rows(text):
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(row["op"], row["bytes"]): row for row in found}


def gloo_rows(text):
    found = re.findall(r"gloo \d+ ranks (\w+)\s+(\d+) KiB\s+([\d.]+) us", text)
    return {(op, int(kib) << 10): {"median_us": float(us)} for op, kib, us in found}


def median(values):
    return statistics.median(values) if values else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gloo", help="the PyTorch script")
    parser.add_argument("--mpirun", help="the command that starts MPI programs, with its options")
    parser.add_argument("--ours", default="target/release/phalanx", help="the command that starts Phalanx, with its options")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = {"phalanx": (shlex.split(args.ours) + ["bench", "collectives", "--ranks", str(args.ranks), "--json"], rows)}
        if args.gloo:
            commands["gloo"] = ([sys.executable, args.gloo, str(args.ranks)], gloo_rows)
        if args.mpirun:
            program = os.path.join(folder, "collectives_mpi")
            run([os.environ.get("MPICC", "mpicc"), "-O2", os.path.join(HERE, "collectives_mpi.c"), "-o", program])
            commands["mpi"] = (shlex.split(args.mpirun) + ["-n", str(args.ranks), program], rows)
        measured = {name: [] for name in commands}
        for n in range(args.rounds):
            start = time.time()
            for name, (command, read) in commands.items():
                measured[name].append(read(run(command)))
            print(f"round {n + 1}/{args.rounds} ({time.time() - start:.0f} s)", file=sys.stderr, flush=True)
    report(args, measured)


def report(args, measured):
    ours = measured["phalanx"]
    print(f"\n{args.ranks} ranks, {args.rounds} alternating rounds (median µs of a call; ratios: median over rounds)\n")
    print("| call | KiB | Phalanx | copy | Gloo | ratio | MPI | ratio | |\n|---|---|---|---|---|---|---|---|---|")
    for key in ours[0]:
        us = median([r[key]["median_us"] for r in ours])
        copy = median([r[key]["copy_limit_us"] / r[key]["median_us"] for r in ours])
        cells, ratio = [], {}
        for name in ("gloo", "mpi"):
            pairs = [(peer[key]["median_us"], own[key]["median_us"]) for peer, own in zip(measured.get(name, []), ours) if key in peer]
            ratio[name] = median([peer / own for peer, own in pairs])
            cells += [f"{median([peer for peer, _ in pairs]):.1f}", f"{ratio[name]:.2f}"] if pairs else ["", ""]
        good = (not args.gloo or ratio["gloo"] >= 4 or copy >= 0.85) and (key[0] != "all_reduce" or not args.mpirun or ratio["mpi"] >= 1.3)
        print(f"| {key[0]} | {key[1] >> 10} | {us:.2f} | {copy:.2f} | {' | '.join(cells)} | {'' if good else 'missed'} |")


if __name__ == "__main__":
    main()
