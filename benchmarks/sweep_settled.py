"""Times the kernels that earlier sweeps found fastest once more, of calls so long that the card lowers its clock, each
behind calls of its own (`settle` of device_times): sweep_settled.json, for fit_select.py.

    python benchmarks/sweep_settled.py benchmarks/results/h200/sweep*.json --out benchmarks/results/h200

In turns of a few ms a kernel runs at the clock that those before it left, and 512 x 10240 x 8192 by the fastest of such a
sweep took 65 us there and 78 behind calls of its own (float8, one H200). Prompts keep the card busy for longer.

fit_select.py takes these times alone where there are any: a new kernel needs both, its own in the other sweeps and these.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import octofuse
from bench_float8 import operands
from fit_select import Times, of_engine, times_of
from octofuse.ops.measure import POWER_LIMITED, SETTLE, Captured, device_times, overlap
from octofuse.testing.timing import environment

ENGINES = {"int8": "", "float8, fast sums": "wgmma_float8_fast/"}  # what the names of their kernels begin with
WORTH = 1.12  # times the fastest of the earlier sweeps
MOST = 6  # kernels of a shape
LEAST_TOKENS = 65  # fewer stream weights, which takes no such power
REPEATS = 2


def worth_timing(row: dict[str, float]) -> list[str]:
    limit = WORTH * min(row.values())
    return sorted((name for name, us in row.items() if us <= limit), key=row.__getitem__)[:MOST]


def long_shapes(times: Times, engine: str) -> Times:
    return {
        mnk: row
        for mnk, row in sorted(of_engine(times, engine).items())
        if mnk[0] >= LEAST_TOKENS and min(row.values()) * 1e-6 > POWER_LIMITED
    }


def call_of(name: str, s: dict[str, Any]) -> Callable[[], Any]:
    """On normal numbers, quantised: of uniform ones a product takes more energy."""
    if name.startswith("wgmma_float8"):
        return lambda: octofuse.linear(s["f"], s["wf"], s["fs"], s["wfs"], s["bias"], engine=name, fast_accumulate=True)
    return lambda: octofuse.linear(s["q"], s["w8"], s["qs"], s["w8s"], s["bias"], engine=name)


def settled_row(names: list[str], m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds by kernel."""
    sets = operands(m, n, k)[:3]  # what they read is far from all
    with overlap(False):
        graphs = {name: Captured([call_of(name, s) for s in sets], least=6) for name in names}
    times = device_times(graphs, repeats=REPEATS, settle=SETTLE)
    return {name: round(us, 3) for name, us in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="earlier sweeps")
    parser.add_argument("--out", type=Path, required=True, help="folder, whose file is rewritten after every row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no row after so many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    times = times_of([json.loads(source.read_text(encoding="utf-8")) for source in args.sources])
    settled: dict[str, dict[str, float]] = {}
    names = " ".join(map(str, args.sources))
    about = environment(f"python benchmarks/sweep_settled.py {names} --out {args.out}")
    record = {**about, "seconds of its own before": SETTLE, "us, settled": settled}
    args.out.mkdir(parents=True, exist_ok=True)
    for engine in ENGINES.values():
        for mnk, row in long_shapes(times, engine).items():
            if time.monotonic() > end:
                return
            found = settled_row(worth_timing(row), *mnk)
            settled.setdefault(",".join(map(str, mnk)), {}).update(found)
            print(mnk, min(found, key=found.__getitem__), found, flush=True)
            (args.out / "sweep_settled.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
