"""The tables of docs/parallel.md; `tables.py` writes them from results/h200/parallel.json and
results/h100/parallel.json."""

from __future__ import annotations

from typing import Any

from table_text import lines, us

Row = dict[str, Any]
WAYS = ((2, "exact"), (2, "fast"), (4, "exact"), (4, "fast"))  # number of GPUs, and how sums are made
HEADS = ("2 GPUs", "2, fast sums", "4 GPUs", "4, fast sums")


def by_model(found: Row) -> dict[tuple[str, str], dict[tuple[int, str], Row]]:
    """By model and scheme, then by ways; one GPU's is (1, "whole")."""
    models: dict[tuple[str, str], dict[tuple[int, str], Row]] = {}
    for row in found["decode"]:
        models.setdefault((row["model"], row["scheme"]), {})[row["ranks"], row["sums"]] = row
    return models


def shared(found: Row) -> dict[tuple[str, str], dict[tuple[int, str], Row]]:
    """What ran on all GPUs."""
    most = found["ranks"]
    every = sorted(by_model(found).items(), key=lambda item: item[0][1] != "w8a8-dynamic")
    return {names: ways for names, ways in every if (most, "exact") in ways}


def one_sequence(found: Row) -> str:
    rows = []
    for names, ways in shared(found).items():
        one = ways[1, "whole"]
        cells = [f"{ways[way]['ms a token']:.2f}" if way in ways else "" for way in WAYS]
        gains = [f"{one['ms a token'] / ways[n, 'exact']['ms a token']:.2f}" if (n, "exact") in ways else ""
                 for n in (2, 4)]  # fmt: skip
        floor = f"{ways[2, 'exact']['of the floor']:.2f}"
        predicted = [f"{one[f'predicted ms, {n}']:.2f}" for n in (2, 4, 8)]
        rows.append((*names, f"{one['ms a token']:.2f}", *cells, *gains, floor, *predicted))
    heads = ("one GPU, ms a token", *HEADS, "2: times as fast", "4", "2: of the floor", "predicted, 2", "4", "8")
    return lines(("model", "scheme", *heads), rows)


def loads(found: Row) -> str:
    """Energy, many sequences, and a prompt."""
    units = {"J a token": "J a token", "tokens/s, 32 sequences": "tokens/s, 32 sequences",
             "prompt ms": "prompt of 2,048 tokens, ms"}  # fmt: skip
    rows = []
    for names, ways in shared(found).items():
        for name, unit in units.items():
            digits = ",.0f" if name.startswith("tokens") else ".1f" if name == "prompt ms" else ".2f"
            cells = [format(ways[way][name], digits) if way in ways else "" for way in ((1, "whole"), *WAYS)]
            rows.append((*names, unit, *cells))
    return lines(("model", "scheme", "", "one GPU", *HEADS), rows)


def one_against_two(found: Row) -> str:
    """OPT-30B in fp16 on one and two GPUs, and quantised on one: the comparison of nuQmm (Park et al., 2022)."""
    rows = []
    for (model, scheme), ways in by_model(found).items():
        for (ranks, sums), row in ways.items():
            if model == "OPT-30B" and (ranks == 1 or scheme == "fp16"):
                name = f"{scheme}, fast sums" if sums == "fast" else scheme
                rows.append((name, ranks, f"{1e3 / row['ms a token']:.0f}", f"{row['J a token']:.2f}"))
    return lines(("OPT-30B", "GPUs", "tokens/s, one sequence", "J a token"), rows)


def exchanges(found: Row) -> str:
    curve = found["exchanges"]
    sizes = sorted({row["bytes"] for row in curve})
    rows = []
    for ranks in sorted({row["ranks"] for row in curve}):
        of = {row["bytes"]: row for row in curve if row["ranks"] == ranks}
        for name in ("gather us", "gather by NCCL us", "sum us", "sum by NCCL us"):
            rows.append((f"{name.removesuffix(' us')}, {ranks} GPUs", *(us(of[size][name]) for size in sizes)))
    return lines(("us", *(f"{size // 1024:,} KB" for size in sizes)), rows)
