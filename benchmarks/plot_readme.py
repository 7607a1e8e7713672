"""docs/images/tokens.png: tokens per second of one sequence, from benchmarks/results/h200/decode.json, those of
transformers for the GPT-2 from gpt2.json."""

from __future__ import annotations

import matplotlib

from tables import ROOT, gpt2_of, result, thousands

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TRANSFORMERS = {"transformers eager": "transformers", "transformers compiled": "transformers, compiled"}
OCTOFUSE = {
    "octofuse fp16": "octofuse, fp16",
    "octofuse w8a8-static": "octofuse, int8",
    "octofuse w8a8-dynamic": "octofuse, int8",
    "octofuse w4a16-g128": "octofuse, 4-bit weights",
}
GREY, TEAL = "#8a949c", "#00796b"


def rates_of(model: str) -> dict[str, float]:
    measured = {row["engine"]: row["tokens/s"] for row in result("h200/decode")["one"] if row["model"] == model}
    if model == "GPT-2 124M":
        measured |= {engine: gpt2_of("124M", engine)["tokens/s"] for engine in TRANSFORMERS}
    return {label: measured[engine] for engine, label in (TRANSFORMERS | OCTOFUSE).items() if engine in measured}


def main() -> None:
    figure, both = plt.subplots(1, 2, figsize=(9, 2.2))
    for axes, model in zip(both, ("GPT-2 124M", "Llama-3.1-8B"), strict=True):
        rates = rates_of(model)
        colours = [TEAL if label.startswith("octofuse") else GREY for label in rates]
        bars = axes.barh(list(rates), list(rates.values()), color=colours)
        axes.bar_label(bars, [thousands(rate) for rate in rates.values()], padding=3, fontsize=8)
        axes.set_title(f"{model}: tokens/s, one sequence, one H200", fontsize=9)
        axes.set_xlim(0, max(rates.values()) * 1.15)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "tokens.png", dpi=120)


if __name__ == "__main__":
    main()
