"""This library's kernels beside the best public ones (peers/), on layers of models: device time of a linear.

Weights from memory, rotating; tokens are normal numbers, quantised in front of the clock but for the columns that say
"quantised". Before it is timed every kernel's result is compared with the product of what its operands stand for, in fp32
(but for torch's fp8 by tensor, which takes no scales); a wrong one is left out and said. Every kernel waits for the one
before it, but for the columns that say "chained".

    python benchmarks/bench_peers.py --out FOLDER
    python benchmarks/bench_peers.py --families w4a8 --tokens 1 16 --seconds 60 --out FOLDER   # some of it
    python benchmarks/bench_peers.py --more --out FOLDER   # the rows that FOLDER/peers.json lacks, of the same versions
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench_lowbit import warm_up
from bench_prompts import SHAPES
from octofuse.ops.measure import Captured, device_times, overlap, settling
from octofuse.testing.timing import environment
from peers import found, kernels_of, versions_of
from peers.layer import FAMILIES, Kernel, Layer, Tokens, compared_rows, random_layer, relative_error, tokens_of

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
GRAPH = 1.5e-3  # seconds that a graph should take, or 48 calls
BYTES, OPERATIONS = 4e12, 1e15  # a second, about
COMPILING = 40  # seconds that a row waits for its kernel

Row = tuple[str, int, int, int]  # family, M, N, K


class Bench:
    """The kernels of one layer, for one number of tokens after the other."""

    def __init__(self, family: str, n: int, k: int, modules: dict[str, ModuleType]) -> None:
        self.layer: Layer = random_layer(family, n, k)
        self.kernels: list[Kernel] = kernels_of(modules, family)
        self.weights: dict[Any, list[tuple[Any, ...]]] = {}  # by what prepared them

    def captured(self, kernel: Kernel, tokens: list[Tokens]) -> tuple[Captured, float]:
        """Its calls in a graph, and its relative error. ArithmeticError for a wrong result."""
        if kernel.prepare not in self.weights:
            self.weights[kernel.prepare] = kernel.weights(self.layer)
        calls = kernel.calls(self.weights[kernel.prepare], tokens)
        error = relative_error(compared_rows(calls[0]()), kernel.expected(self.layer, tokens[0]))
        if not error <= kernel.tolerance:
            raise ArithmeticError(f"wrong by {error:.3g}")
        with overlap(kernel.chained):
            return Captured(calls, least=max(2, min(48, round(GRAPH / self.seconds(tokens))))), error

    def seconds(self, tokens: list[Tokens]) -> float:
        """About what a call takes."""
        weights = self.layer.n * self.layer.k
        return max(weights * self.layer.bits / 8 / BYTES, 2.0 * weights * tokens[0].x.shape[0] / OPERATIONS)

    def row(self, m: int, why_not: dict[str, str]) -> dict[str, Any]:
        """Times by column; `why_not`: kernels that are left out."""
        tokens = tokens_of(self.layer, m)
        failed = dict(why_not)
        errors: dict[str, float] = {}
        graphs: dict[str, Captured] = {}
        for kernel in self.kernels:
            if kernel.name in failed:
                continue
            try:
                graphs[kernel.name], relative = self.captured(kernel, tokens)
                errors[kernel.name] = round(relative, 5)
            except Exception as error:  # a peer that cannot run this is no reason to stop
                if kernel.name.startswith(("octofuse", "fp16")):
                    raise
                failed[kernel.name] = f"{type(error).__name__}: {str(error)[:200]}"
        settle = settling(self.seconds(tokens))
        repeats = 2 if settle else 9
        us = {name: round(t, 2) for name, t in device_times(graphs, repeats=repeats, settle=settle).items()}
        compared = [kernel.name for kernel in self.kernels if kernel.compared and kernel.name in us]
        shape = {"family": self.layer.family, "M": m, "N": self.layer.n, "K": self.layer.k}
        return {**shape, "us": us, "relative error": errors, "failed": failed, "compared": compared}


def rows_of(wanted: list[Row], modules: dict[str, ModuleType]) -> Iterator[dict[str, Any]]:
    """Rows of one layer stand together in `wanted`."""
    ahead = modules["humming"].Ahead(wanted, max(1, (os.cpu_count() or 4) - 3)) if "humming" in modules else None
    try:
        for (family, n, k), rows in itertools.groupby(wanted, key=lambda row: (row[0], *row[2:])):
            torch.cuda.empty_cache()
            bench = Bench(family, n, k, modules)
            for row in rows:
                yield bench.row(row[1], {} if ahead is None else ahead.why_not(row, COMPILING))
    finally:
        if ahead is not None:
            ahead.stop()


def parsed_shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def command_of(args: argparse.Namespace) -> str:
    shapes = [f"{n}x{k}" for n, k in args.shapes]
    parts = {"families": args.families, "shapes": shapes, "tokens": map(str, args.tokens)}
    return " ".join(["python benchmarks/bench_peers.py", *(f"--{name} {' '.join(p)}" for name, p in parts.items())])


def place_of(row: dict[str, Any]) -> tuple[int, int, int, int, int]:
    n, k = row["N"], row["K"]
    return SHAPES.index((n, k)) if (n, k) in SHAPES else len(SHAPES), n, k, FAMILIES.index(row["family"]), row["M"]


def continued(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """`record` with the rows of the file at `path`, whose versions and machine are to be the same. Rows for which a peer
    was not compiled in time are taken again."""
    before = json.loads(path.read_text(encoding="utf-8"))
    for key, value in record.items():
        if key not in ("command", "rows") and before.get(key) != value:
            raise SystemExit(f"{path}: expected {key} {value}, got {before.get(key)}")
    rows = [row for row in before["rows"] if not any(why.startswith("TimeoutError") for why in row["failed"].values())]
    return {**record, "command": f"{before['command']}; {record['command']} --more", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--shapes", nargs="+", type=parsed_shape, default=SHAPES, metavar="NxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no row after so many")
    parser.add_argument(
        "--more", action="store_true", help="adds rows to the peers.json in --out, of the same versions"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of peers.json, rewritten after every row")
    args = parser.parse_args()
    path = args.out / "peers.json"
    if args.more and not path.is_file():
        parser.error(f"--more: expected a file to add rows to, got none at {path}")
    end = time.monotonic() + args.seconds
    modules, missing = found()
    print("missing:", missing or "nothing", flush=True)
    about = {**environment(command_of(args)), "unit": "us", "peers": versions_of(modules), "missing": missing}
    record: dict[str, Any] = {**about, "rows": []}
    if args.more:
        record = continued(path, record)
    warm_up(smoke=False)
    args.out.mkdir(parents=True, exist_ok=True)
    done = {(row["family"], row["M"], row["N"], row["K"]) for row in record["rows"]}
    wanted = [(family, m, n, k) for n, k in args.shapes for family in args.families for m in args.tokens]
    for row in rows_of([row for row in wanted if row not in done], modules):
        record["rows"] = sorted([*record["rows"], row], key=place_of)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(row["family"], row["M"], f"{row['N']}x{row['K']}", row["us"], row["failed"] or "", flush=True)
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main()
