"""From sweeps in results/<gpu> to the table that select() reads: cpp/src/gemm/measured_<gpu>.inc.

    python benchmarks/sweep_gemm.py --out benchmarks/results/h200         # on the GPU: sweep.json
    python benchmarks/sweep_gemm.py --large --out benchmarks/results/h200 # sweep_large.json
    python benchmarks/sweep_gemm.py --one --out benchmarks/results/h200   # sweep_one.json, in place of their rows for M = 1
    python benchmarks/sweep_step.py --out benchmarks/results/h200         # sweep_step.json, decoders' steps
    python benchmarks/sweep_gemm.py --float8 --out benchmarks/results/h200 # sweep_float8.json
    python benchmarks/sweep_gemm.py --huge --out benchmarks/results/h200  # sweep_huge.json
    python benchmarks/sweep_power.py --out benchmarks/results/h200        # sweep_power.json
    python benchmarks/sweep_gemm.py --small --out benchmarks/results/h200 # sweep_tokens.json, for rows of few tokens
    python benchmarks/sweep_settled.py benchmarks/results/h200/sweep*.json --out benchmarks/results/h200  # calls over 50 us
    python benchmarks/fit_select.py benchmarks/results/h200/sweep*.json   # anywhere that octofuse is installed

and for a GPU whose sweep knew an earlier one's models, and left out what these put far behind:

    python benchmarks/fit_select.py benchmarks/results/h100/sweep*.json --like benchmarks/results/h200/sweep*.json

For every kernel it fits the non-negative numbers of gemm.h's TimeModel, near-best points weighing most, the last one by
products that are so large that power limits them. For every swept shape it keeps the kernel that was fastest, or whose
step was, where the fastest alone makes a step longer by more than NOISE. Where a kernel's energy counts as soon as a
prompt lasts, the fastest is that behind calls of its own (sweep_settled.json). Prints how far the models' choices lie
from the best.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from octofuse import _C

SMS = 132
FLOAT8 = "wgmma_float8"  # what the names of its kernels begin with
# Arithmetic of candidates.h, and what the names of its kernels begin with.
ARITHMETICS = {"kInt8": "", "kFloat8": "wgmma_float8/", "kFloat8Fast": "wgmma_float8_fast/"}
NOISE = 1.005  # between two measurements of a step
# candidates.cpp's: millions of products from which on power limits their rate, and the factor of kernels not timed there.
LIMITED, UNTIMED = 2e5, 1.25
Times = dict[tuple[int, ...], dict[str, float]]  # us by (M, N, K) and kernel
CPP = Path(__file__).resolve().parents[1] / "cpp/src/gemm"
HEADER = "// Written by benchmarks/fit_select.py on {device} from {sources}: measured.cpp's Table. Microseconds."


@functools.cache
def features(m: int, n: int, k: int) -> dict[str, list[float]]:
    """What features_of() in candidates.cpp gives, by kernel."""
    return _C.features(m, n, k, SMS)


def braces(values: Iterable[object]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


def non_negative_fit(a: np.ndarray, b: np.ndarray, rounds: int = 2000) -> np.ndarray:
    x = np.zeros(a.shape[1])
    gram, target = a.T @ a + 1e-9 * np.eye(a.shape[1]), a.T @ b
    for _ in range(rounds):
        for j in range(len(x)):
            x[j] = max(0.0, x[j] + (target[j] - gram[j] @ x) / gram[j, j])
    return x


def fit(times: Times, rates: dict[str, float]) -> dict[str, np.ndarray]:
    """By kernel. Rows of outputs that the copy engine cannot store, whose length is no multiple of 8, take persistent
    kernels up to twice as long: what is measured there stays in the table, but no model follows it."""
    models = {}
    times = {mnk: row for mnk, row in times.items() if mnk[1] % 8 == 0} or times
    for name in sorted({name for row in times.values() for name in row}):
        engine = next((e for e in ARITHMETICS.values() if e and name.startswith(e)), "")
        points = [(features(*mnk)[name], row[name], row[name] / min(row.values()))
                  for mnk, row in of_engine(times, engine).items()
                  if name in row and not has_no_estimate(name, *mnk, row)]  # fmt: skip
        limited = [t / f[-1] for f, t, _ in points if f[-1] >= LIMITED]
        rate = float(np.percentile(limited, 25)) if limited else 0.0  # the rest did not fill the GPU evenly
        if name in rates:
            rate = rates[name] / 1e3
        points = [point for point in points if point[0][-1] < LIMITED] or points
        if not points:
            continue
        weight = np.array([1 / (t * ratio**2) for _, t, ratio in points])
        a, b = np.array([f[:-1] for f, _, _ in points]), np.array([t for _, t, _ in points])
        models[name] = np.append(non_negative_fit(a * weight[:, None], b * weight), rate)
    return models


def has_no_estimate(name: str, m: int, n: int, k: int, row: dict[str, float]) -> bool:
    """Whether candidates.cpp leaves the kernel out here: CUTLASS's where a cluster's tiles reach beyond the last token,
    and int8's blocks that are made to share an SM ("_x2", "_x3") where each would be alone there and the same tile is
    offered as a block an SM."""
    if name.startswith("cutlass_sm90/"):
        return m % 256 != 0
    base = re.sub(r"_x\d$", "", name)
    if base == name or base not in row or name.startswith(FLOAT8):
        return False
    split = int(found[1]) if (found := re.search(r"_split(\d)", name)) else 1
    return features(m, n, k)[name][2] <= math.ceil(math.ceil(k / 128) / split)


def estimate(model: np.ndarray, features_of_one: list[float]) -> float:
    """estimated_time() of candidates.cpp."""
    found = float(np.dot(features_of_one[:-1], model[:-1]))
    if model[-1] == 0 and features_of_one[-1] >= LIMITED:
        return UNTIMED * found
    return float(max(found, features_of_one[-1] * model[-1]))


def held_in(times: Times, models: dict[str, np.ndarray]) -> list[float]:
    """How many times the best of each shape the kernel takes that the models choose."""
    ratios = []
    for mnk, row in times.items():
        served = [name for name in row if name in models and not has_no_estimate(name, *mnk, row)]
        chosen = min(served, key=lambda name, mnk=mnk: estimate(models[name], features(*mnk)[name]))
        ratios.append(row[chosen] / min(row.values()))
    return ratios


def held_out(times: Times, shape: tuple[int, ...], rates: dict[str, float]) -> list[float]:
    """The same on one N x K for models that have not seen it: what users' own shapes get."""
    seen = {mnk: row for mnk, row in times.items() if mnk[1:] != shape}
    return held_in({mnk: row for mnk, row in times.items() if mnk[1:] == shape}, fit(seen, rates))


def report(title: str, ratios: list[float]) -> None:
    print(f"{title}, {len(ratios)} shapes: {np.exp(np.mean(np.log(ratios))):.3f}x of the best on geometric mean, "
          f"95th percentile {np.percentile(ratios, 95):.3f}x, worst {max(ratios):.3f}x")  # fmt: skip


def fastest(row: dict[str, float] | None, steps: dict[str, float] | None, names: list[str]) -> int:
    """Index of the kernel that is kept, -1 where nothing was swept."""
    if not row:
        return -1
    alone = min(row, key=row.__getitem__)
    if steps:
        in_step = min(steps, key=steps.__getitem__)
        if steps.get(alone, float("inf")) > NOISE * steps[in_step]:
            return names.index(in_step)
    return names.index(alone)


def times_of(records: list[dict], kind: str = "us") -> Times:
    known = set(_C.candidates())  # a sweep may name kernels that have since gone
    times: Times = {}
    for record in records:
        for key, row in record.get(kind, {}).items():
            found = {name: t for name, t in row.items() if name in known}
            mnk = tuple(map(int, key.split(",")))
            before = times.get(mnk, {})
            if not any(name.startswith(FLOAT8) for name in found):  # of int8 a later sweep takes an earlier one's place
                before = {name: t for name, t in before.items() if name.startswith(FLOAT8)}
            times[mnk] = before | found
    return times


def fill(times: Times, like: Times) -> None:
    """Kernels that a sweep left out as too slow, as on another device, times what the shape's other kernels take of it.

    Without them a model would not know where its kernel is slow. Of an arithmetic that was not swept nothing is known.
    """
    for mnk, row in times.items():
        of_both = [t / like[mnk][name] for name, t in row.items() if name in like.get(mnk, {})]
        if of_both:
            rate = float(np.median(of_both))
            kinds = {name.split("/")[0] for name in row if name.startswith(FLOAT8)}
            row |= {name: t * rate for name, t in like[mnk].items()
                    if name not in row and (not name.startswith(FLOAT8) or name.split("/")[0] in kinds)}  # fmt: skip


def of_engine(times: Times, engine: str) -> Times:
    """The kernels of one float8 arithmetic, or of int8 (""), at the shapes where they were timed."""
    floats = tuple(name for name in ARITHMETICS.values() if name)

    def belongs(name: str) -> bool:
        return name.startswith(engine) if engine else not name.startswith(floats)

    found = {mnk: {name: t for name, t in row.items() if belongs(name)} for mnk, row in times.items()}
    return {mnk: row for mnk, row in found.items() if row}


def chosen_by(times: Times, settled: Times, engine: str) -> Times:
    """The times of an engine by which a shape's kernel is chosen: those behind calls of its own where there are such."""
    return of_engine(times, engine) | of_engine(settled, engine)


def part(arithmetic: str, times: Times, steps: dict[str, dict[str, float]],
         names: list[str]) -> list[str]:  # fmt: skip
    """Lines of the table: a Measured::Part."""
    rows = sorted({m for m, _, _ in times})
    text = [f"        {{Arithmetic::{arithmetic},", f"         {braces(rows)},", "         {"]
    for n, k in sorted({mnk[1:] for mnk in times}):
        best = [fastest(times.get((m, n, k)), steps.get(f"{m},{n},{k}"), names) for m in rows]
        text.append(f"             {{{n}, {k}, {braces(best)}}},")
    return [*text, "         }},"] if times else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--like", type=Path, nargs="+", default=(), help="another GPU's sweeps, which left nothing out")
    args = parser.parse_args()
    sources = args.sources
    records = [json.loads(source.read_text()) for source in sources]
    rates = {name: us for record in records for name, us in record.get("us for 1e9 products", {}).items()}
    steps = {key: row for record in records for key, row in record.get("us a block", {}).items()}
    times = times_of(records)
    settled = times_of(records, "us, settled")
    fill(times, times_of([json.loads(source.read_text()) for source in args.like]))
    models = fit(times, rates)
    names = list(models)
    timed, settled = ({mnk: {name: t for name, t in row.items() if name in models} for mnk, row in found.items()}
                      for found in (times, settled))  # fmt: skip
    for arithmetic, engine in ARITHMETICS.items():
        own = of_engine(times, engine)
        if not own:
            continue
        report(f"{arithmetic}: models alone", held_in(own, models))
        report(f"{arithmetic}: models of all other N x K", [r for shape in sorted({mnk[1:] for mnk in own})
                                                            for r in held_out(own, shape, rates)])  # fmt: skip
    names_of = ", ".join(
        f"{source.name} (cpp {record['cpp'][:12]})" for source, record in zip(sources, records, strict=True)
    )
    text = [HEADER.format(sources=names_of, device=records[0]["device"]), "{", "    {"]
    text += [f'        {{"{name}", {braces(f"{v:.4g}" for v in models[name])}}},' for name in names]
    text += ["    },", "    {"]
    for arithmetic, engine in ARITHMETICS.items():
        # Steps were measured of int8.
        text += part(arithmetic, chosen_by(timed, settled, engine), {} if engine else steps, names)
    text += ["    },", "}", ""]
    target = CPP / f"measured_{sources[0].resolve().parent.name}.inc"
    target.write_text("\n".join(text))
    print("wrote", target)


if __name__ == "__main__":
    main()
