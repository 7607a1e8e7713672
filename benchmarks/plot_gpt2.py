"""Draw gpt2.json: `python benchmarks/plot_gpt2.py benchmarks/results/h200` (needs matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ENGINES = ("fp16", "int8 dynamic", "int8 static")


def draw_study(axes: Any, rows: list[dict[str, Any]], column: str, label: str) -> None:
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    width = 0.8 / len(models)
    for i, model in enumerate(models):
        values = {row["engine"]: row[column] for row in rows if row["model"] == model and row[column] is not None}
        heights = [engines.index(engine) + (i - (len(models) - 1) / 2) * width for engine in values]
        bars = axes.barh(heights, list(values.values()), height=width, label=f"GPT-2 {model}")
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(engines)), engines, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=label, xscale="log")
    axes.margins(x=0.2)


def draw_sweep(axes: Any, rows: list[dict[str, Any]], x: str, y: str, label: str) -> None:
    for model, line in zip(dict.fromkeys(row["model"] for row in rows), ("-", "--"), strict=False):
        mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row[x])
        for engine, colour in zip(ENGINES, ("tab:gray", "tab:orange", "tab:blue"), strict=True):
            axes.plot([row[x] for row in mine], [row[f"{engine} {y}"] for row in mine], line, marker="o", markersize=3,
                      color=colour, label=f"{model} {engine}")  # fmt: skip
    axes.set(xlabel=x, ylabel=label, xscale="log", yscale="log")
    ticks = sorted({row[x] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    folder = Path(sys.argv[1])
    record = json.loads((folder / "gpt2.json").read_text())
    figure, ((speed, joules), (batch, context)) = plt.subplots(2, 2, figsize=(13, 8))
    draw_study(speed, record["study"], "tokens/s", "tokens/s, batch 1, 8 + 30 tokens")
    speed.legend(fontsize=8)
    draw_study(joules, record["study"], "mJ/token", "mJ a token, the whole card")
    draw_sweep(
        batch,
        [row for row in record["steps"] if row["context"] == 128],
        "batch",
        "tokens/s",
        "tokens/s at 128 positions",
    )
    draw_sweep(context, [row for row in record["steps"] if row["batch"] == 1], "context", "us", "us a step, batch 1")
    context.legend(fontsize=7)
    figure.suptitle(f"GPT-2 on {record['device']}, random weights (cpp {record['cpp'][:8]})")
    figure.tight_layout()
    figure.savefig(folder / "gpt2.png", dpi=110)


if __name__ == "__main__":
    main()
