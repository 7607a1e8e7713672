"""Times kernels that sweeps did not have yet, at their shapes, and writes the sweeps with them.

    python benchmarks/sweep_more.py 'pingpong' benchmarks/results/h200/sweep.json --tokens 192 8192 --out FOLDER

The first argument is a regular expression for the kernels' names. Each is timed beside the two that the sweep found fastest
at the shape, in turns; what these take now over what they took then divides its time, so that the row stays one of the
sweep's run.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import octofuse
from bench_float8 import operands as float8_operands
from bench_gemm import operand_sets
from octofuse import _C
from octofuse.ops.measure import Captured, device_times, overlap
from octofuse.testing.timing import source_hash

REPEATS = 5
FLOAT8 = {"wgmma_float8": False, "wgmma_float8_fast": True}  # fast_accumulate
BESIDE = 2
LONG = 100  # us, from which on fewer calls make a graph


def call_of(name: str) -> Callable[[Any], Any]:
    """Of a set of operands."""
    fast = FLOAT8.get(name.split("/")[0])
    if fast is None:
        return lambda s: octofuse.i8f16_linear(*s, engine=name, constant_weight=True)
    return lambda s: octofuse.linear(s["f"], s["wf"], s["fs"], s["wfs"], s["bias"], engine=name, fast_accumulate=fast)


def add(row: dict[str, float], names: list[str], m: int, n: int, k: int) -> None:
    """Times of `names`, and which of an engine they stand beside."""
    engine = names[0].split("/")[0]
    known = {name: us for name, us in row.items() if (name.split("/")[0] in FLOAT8) == (engine in FLOAT8)}
    known = {name: us for name, us in known.items() if engine not in FLOAT8 or name.startswith(f"{engine}/")}
    known = {name: us for name, us in known.items() if name in _C.candidates() and name not in names}
    if not known:
        return
    beside = sorted(known, key=known.__getitem__)[:BESIDE]
    sets = (float8_operands if engine in FLOAT8 else operand_sets)(m, n, k)
    calls = {name: call_of(name) for name in (*beside, *names)}
    least = 48 if min(known.values()) < LONG else 12
    with overlap(False):
        graphs = {name: Captured([lambda s=s, f=f: f(s) for s in sets], least=least) for name, f in calls.items()}
    now = device_times(graphs, repeats=REPEATS)
    rate = sum(now[name] for name in beside) / sum(known[name] for name in beside)
    row |= {name: round(now[name] / rate, 3) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=re.compile)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, nargs=2, default=(1, 1 << 20), help="the smallest M and the largest")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="stops after so many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    engines: dict[str, list[str]] = {}
    for name in _C.candidates():
        if args.kernels.search(name):
            engines.setdefault(name.split("/")[0], []).append(name)
    for sweep in args.sweeps:
        record = json.loads(sweep.read_text())
        record.setdefault("added", []).append({"kernels": args.kernels.pattern, "cpp": source_hash()})
        done = 0
        for shape, row in record["us"].items():
            m, n, k = map(int, shape.split(","))
            if args.tokens[0] <= m <= args.tokens[1] and time.monotonic() < end:
                for names in engines.values():
                    add(row, names, m, n, k)
                done += 1
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / sweep.name).write_text(json.dumps(record) + "\n")
        print(f"{sweep.name}: {done} shapes, {end - time.monotonic():.0f} s left", flush=True)


if __name__ == "__main__":
    main()
