"""The tables of docs/peers.md; `tables.py` writes them from the newest rows of results/h200."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import geometric_mean
from typing import Any

from table_text import lines, us

OWN, QUANTISED = "octofuse", "quantised"
BANDS = {
    "1 token": (1, 1),
    "4 to 16": (4, 16),
    "32 to 128": (32, 128),
    "256, 512": (256, 512),
    "2048, 8192": (2048, 8192),
}
BETWEEN = {f"{m} tokens": (m, m) for m in (8, 48, 96, 200, 384)}
Row = dict[str, Any]


def of_family(rows: list[Row], family: str) -> list[Row]:
    return [row for row in rows if row["family"] == family]


def fastest(row: Row, quantised: bool = False) -> tuple[str, float] | None:
    """The fastest other kernel that does the same work: its name and time."""
    others = {name: row["us"][name] for name in row["compared"] if not name.startswith(OWN)}
    others = {name: us for name, us in others.items() if name.endswith(QUANTISED) == quantised}
    return min(others.items(), key=lambda item: item[1]) if others else None


def ratio(row: Row, quantised: bool = False) -> float | None:
    found = fastest(row, quantised)
    return None if found is None else found[1] / row["us"][f"{OWN} {QUANTISED}" if quantised else OWN]


def float8_ratio(row: Row) -> float | None:
    """Not by tensor: that has neither scales nor a bias to apply."""
    others = [us for name, us in row["us"].items() if "fp8" in name and "tensor" not in name]
    return min(others) / row["us"][OWN] if others else None


def float16_ratio(row: Row) -> float | None:
    return float(row["us"]["fp16 F.linear"] / row["us"][OWN])


def summary(all_rows: list[Row], bands: Mapping[str, tuple[int, int]] = BANDS) -> list[tuple[str, ...]]:
    """By family the layers measured; by tokens the fastest other kernel's time over ours, geometric mean and worst."""
    kinds: dict[str, tuple[str, Callable[[Row], float | None]]] = {
        "int8": ("w8a8", ratio),
        "int8, with quantisation": ("w8a8", lambda row: ratio(row, quantised=True)),
        "int8, beside fp8 kernels": ("w8a8", float8_ratio),
    }
    names = {"w8a16": "8-bit weights", "w4a16": "4-bit weights", "w3a16": "3-bit weights", "w2a16": "2-bit weights",
             "w1a16": "1-bit weights", "w4a8": "4-bit weights, int8",
             "w4a8-g128": "4-bit weights, int8, groups of 128"}  # fmt: skip
    kinds |= {label: (family, ratio) for family, label in names.items()}
    kinds["fp16 `F.linear`, beside int8"] = ("w8a8", float16_ratio)
    for family in ("w8a16", "w4a16", "w3a16", "w2a16", "w1a16"):
        kinds[f"fp16 `F.linear`, beside {names[family]}"] = (family, float16_ratio)
    table = []
    for label, (family, of) in kinds.items():
        rows = of_family(all_rows, family)
        cells = [str(len({(row["N"], row["K"]) for row in rows}))]
        for low, high in bands.values():
            found = [of(row) for row in rows if low <= row["M"] <= high]
            ratios = [r for r in found if r is not None]
            cells.append(f"{geometric_mean(ratios):.2f} [{min(ratios):.2f}]" if ratios else "")
        if rows:
            table.append((label, *cells))
    return table


def times(rows: list[Row]) -> str:
    """By tokens and shape this library's time, alone and chained, and the fastest other kernel's."""
    shapes = list(dict.fromkeys((row["N"], row["K"]) for row in rows))
    cells: dict[int, dict[tuple[int, int], str]] = {}
    for row in rows:
        found = fastest(row)
        other = "" if found is None else f", {us(found[1])} {found[0]}"
        own = f"{us(row['us'][OWN])} / {us(row['us'][f'{OWN}, chained'])}"
        cells.setdefault(row["M"], {})[row["N"], row["K"]] = own + other
    body = [(str(m), *(by_shape.get(shape, "") for shape in shapes)) for m, by_shape in sorted(cells.items())]
    return lines(["tokens", *(f"{n} x {k}" for n, k in shapes)], body)


def all_times(rows: list[Row], families: Iterable[str]) -> str:
    measured = {family: of_family(rows, family) for family in families}
    return "\n\n".join(f"### {family}\n\n{times(own)}" for family, own in measured.items() if own)


def beside_vllm(rows: list[Row]) -> str:
    """By layer, at the tokens up to 512 that were measured (vLLM captures its graphs for so many): this library's time and
    that of the faster of vLLM's own kernels, of int8 each with its quantisation; and how these compare in the mean."""
    kinds = {"w8a8": ("W8A8", f" {QUANTISED}"), "w8a16": ("W8A16", ""), "w4a16": ("W4A16", "")}
    tokens = sorted({row["M"] for row in rows if row["M"] <= 512})
    body = []
    for family, (label, with_what) in kinds.items():
        own_rows = of_family(rows, family)
        for n, k in dict.fromkeys((row["N"], row["K"]) for row in own_rows):
            of = {row["M"]: row["us"] for row in own_rows if (row["N"], row["K"]) == (n, k)}
            theirs = {m: min(t for name, t in us_of.items() if name.startswith("vLLM") and "fp8" not in name
                             and name.endswith(QUANTISED) == bool(with_what)) for m, us_of in of.items()}  # fmt: skip
            ours = {m: us_of[OWN + with_what] for m, us_of in of.items()}
            shown = [m for m in tokens if m in of]
            cells = [f"{us(ours[m])}, {us(theirs[m])}" if m in of else "" for m in tokens]
            mean = geometric_mean([theirs[m] / ours[m] for m in shown])
            body.append((label, f"{n} x {k}", *cells, f"{mean:.2f}"))
    return lines(("", "layer", *(f"{m}" for m in tokens), "theirs over ours"), body)
