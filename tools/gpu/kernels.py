"""Kernels of a traced step (`train --trace FILE`): how often each ran and how long, largest first."""
import collections, json, sys

def main(path, most):
    events = json.load(open(path))["traceEvents"]
    found = collections.defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            found[event["name"]].append(event["dur"] / 1e3)
    total = sum(map(sum, found.values()))
    ran = [e for e in events if e.get("cat") == "compute"]
    span = (max(e["ts"] + e["dur"] for e in ran) - min(e["ts"] for e in ran)) / 1e3
    print(f"kernels {total:.2f} ms of {span:.2f} ms, {sum(map(len, found.values()))} launches")
    print(f"{'ms':>8} {'each µs':>9} {'count':>6}  kernel")
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(times):8.2f} {1e3 * sum(times) / len(times):9.1f} {len(times):6}  {name}")

main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
