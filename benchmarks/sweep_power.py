"""Times kernels for many tokens by themselves until the card's power limits them, for fit_select.py: sweep_power.json.

    python benchmarks/sweep_power.py --out benchmarks/results/h200

A prompt keeps the card busy for longer than the moments in which kernels that take turns are timed. Then a kernel's energy
decides: one that reads its operands less often runs at higher clocks. Each kernel runs alone for a tenth of a second before
it is timed for another one; its rate is the best of the shapes, which none of the tiles divides badly.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import octofuse
from octofuse.ops.measure import Captured, overlap
from octofuse.testing.timing import environment
from sweep_gemm import FOR_MANY_TOKENS

SHAPES = ((8192, 8192, 8192), (8192, 12288, 4096))
ENGINES = {"wgmma": torch.int8, "cutlass_sm90": torch.int8, "wgmma_float8_fast": torch.float8_e4m3fn}
SECONDS = 0.1
ROUNDS = 2
SETS = 3


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Normal numbers, quantised: of uniform ones every product takes more energy."""
    sets = []
    for _ in range(SETS):
        x, w = torch.randn(m, k, device="cuda").half(), torch.randn(n, k, device="cuda").half()
        x, w = octofuse.quantize_per_token(x, dtype), octofuse.quantize_per_token(w, dtype)
        sets.append((x[0], w[0], x[1], w[1].view(-1), torch.randn(n, device="cuda").half()))
    return sets


def steady_time(graph: Captured) -> float:
    """Microseconds of a call."""
    replays = max(2, round(SECONDS * 1e6 / (graph.replay() * graph.count)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        for _ in range(replays):
            graph.graph.replay()
        event.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / replays / graph.count


def call_of(name: str, operands: tuple[Any, ...]) -> Callable[[], Any]:
    fast = {"fast_accumulate": True} if "float8_fast" in name else {}
    return lambda: octofuse.linear(*operands, out_dtype=torch.float16, engine=name, **fast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    names = [name for name in octofuse.engines() if any(kind in name for kind in FOR_MANY_TOKENS)]
    rates: dict[str, float] = {}
    order = random.Random(0)
    for m, n, k in SHAPES:
        for engine, dtype in ENGINES.items():
            sets = operands(m, n, k, dtype)
            own = [name for name in names if name.split("/")[0] == engine and "swapped" not in name]
            with overlap(False):
                graphs = {name: Captured([call_of(name, s) for s in sets], least=SETS) for name in own}
            for _ in range(ROUNDS):
                order.shuffle(own)
                for name in own:
                    rate = steady_time(graphs[name]) * 1e9 / (m * n * k)
                    rates[name] = min(rate, rates.get(name, rate))
    args.out.mkdir(parents=True, exist_ok=True)
    record = {**environment("python benchmarks/sweep_power.py"), "us for 1e9 products": rates}
    (args.out / "sweep_power.json").write_text(json.dumps(record) + "\n")
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        print(f"{rate:.4f} {name}")


if __name__ == "__main__":
    main()
