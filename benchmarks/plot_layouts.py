"""Draw layouts.json's bars: `python benchmarks/plot_layouts.py benchmarks/results/h200` (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SHAPE = (2048, 1920, 1920)


def main() -> None:
    folder = Path(sys.argv[1])
    record = json.loads((folder / "layouts.json").read_text())
    rows = [row for row in record["rows"] if (row["M"], row["N"], row["K"]) == SHAPE]
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(rows) + 1.6))
    for place, row in enumerate(reversed(rows)):
        if isinstance(row["us"], str):
            axes.text(0.3, place, "not supported", va="center", fontsize=8, color="grey")
            continue
        whole = row.get("with conversion", row["us"])
        axes.barh(place, whole, color="tab:orange")
        axes.barh(place, row["us"], color="tab:blue")
        axes.text(whole + 0.3, place, f"{row['us']:.1f}" + (f" / {whole:.1f}" if whole > row["us"] else ""),
                  va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(
        range(len(rows)), [f"{r['output']}, {r['layout']}, {r['engine']}" for r in reversed(rows)], fontsize=8
    )
    axes.set(xlabel="device time, us (orange: with the conversion of activations and output)",
             title=f"M, N, K = {', '.join(map(str, SHAPE))} on {record['device']}")  # fmt: skip
    axes.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(folder / "layouts_2048x1920x1920.png", dpi=110)


if __name__ == "__main__":
    main()
