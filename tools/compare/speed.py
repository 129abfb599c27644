#!/usr/bin/env python3
"""Compares the speed of a step in two builds of the command.

    tools/compare/speed.py OLD NEW [--pairs N] -- --preset tiny --set parallel.dp=2 …

Runs `bench step` with both in turn, so that other load on the machine affects both equally, and prints the
medians of processor time and of time by the clock, and the ratios new / old.
"""
import json
import statistics
import subprocess
import sys


def bench(binary, arguments):
    command = [binary, "bench", "step", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    own, arguments = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    pairs = int(own[own.index("--pairs") + 1]) if "--pairs" in own else 15
    rows = {key: [[], []] for key in ("busy_ms", "median_ms", "best_ms", "floor_ms")}
    for pair in range(pairs):
        # Who goes first takes turns, too.
        for build in (0, 1) if pair % 2 == 0 else (1, 0):
            found = bench(own[build], arguments)
            for key, values in rows.items():
                if found.get(key) is not None:
                    values[build].append(found[key])
    for key, (old, new) in rows.items():
        if old and new:
            a, b = statistics.median(old), statistics.median(new)
            print(f"{key:>10}: old {a:9.2f}  new {b:9.2f}  new / old {b / a:.3f}  ({len(old)} pairs)", flush=True)


if __name__ == "__main__":
    main()
