"""Draw lowbit.json: `python benchmarks/plot_lowbit.py benchmarks/results/h200` (needs matplotlib).

One token's time against a weight's bytes, times of several tokens, and time against the group size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    folder = Path(sys.argv[1])
    record = json.loads((folder / "lowbit.json").read_text())
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    for row in record["one token"]:
        megabytes = row["MB"]
        size = row["N = K"]
        for prefix, marker in (("w", "o-"), ("bcq", "s--")):
            names = [name for name in megabytes if name.startswith(prefix)]
            ratios = [megabytes["fp16"] / megabytes[name] for name in names]
            left.plot(
                ratios,
                [row[f"{name}, chained"] for name in names],
                marker,
                label=f"{prefix}, {size} squared",
                markersize=4,
            )
        tables = {q: row.get(f"look-up tables, q = {q}") for q in (4, 3, 2, 1)}
        if None not in tables.values():
            ratios = [megabytes["fp16"] / megabytes[f"bcq-q{q}"] for q in tables]
            left.plot(ratios, list(tables.values()), "x:", label=f"look-up tables, {size} squared", markersize=4)
        left.axhline(row["fp16 F.linear"], color="grey", linewidth=0.7)
    left.set(
        xlabel="compression against fp16",
        ylabel="us",
        xscale="log",
        yscale="log",
        title="one token, chained (grey: fp16)",
    )
    left.legend(fontsize=7)
    rows = [row for row in record["several tokens"] if row["N = K"] == 4096]
    for name in ("fp16 F.linear", "tinygemm", "w8a16", "w4a16", "bcq-q3"):
        middle.plot([row["M"] for row in rows], [row[name] for row in rows], "o-", label=name, markersize=4)
    middle.set(xlabel="tokens M", ylabel="us", xscale="log", yscale="log", title="4096 x 4096, groups of 128")
    middle.legend(fontsize=8)
    for name in ("w4a16", "bcq-q3", "bcq-q1"):
        groups = record["groups"]
        right.plot([str(row["group"]) for row in groups], [row[name] for row in groups], "o-", label=name, markersize=4)
    right.set(xlabel="group", ylabel="us", ylim=(0, None), title="8192 x 8192, one token")
    right.legend(fontsize=8)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.suptitle(record["device"])
    figure.tight_layout()
    figure.savefig(folder / "lowbit.png", dpi=100)


if __name__ == "__main__":
    main()
