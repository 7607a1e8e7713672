"""docs/images/gpt2_tokens.png: tokens per second of GPT-2, one sequence, from benchmarks/results/h200/gpt2.json."""

from __future__ import annotations

import matplotlib

from tables import ROOT, gpt2_of, thousands

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ENGINES = {
    "transformers eager": "transformers",
    "transformers compiled": "transformers, compiled",
    "octofuse fp16": "octofuse, fp16",
    "octofuse int8 static": "octofuse, int8",
}
COLOURS = ("#b0b7bd", "#8a949c", "#6fb7ae", "#00796b")


def main() -> None:
    figure, both = plt.subplots(1, 2, figsize=(9, 2.4))
    for axes, model in zip(both, ("124M", "XL"), strict=True):
        rates = [gpt2_of(model, engine)["tokens/s"] for engine in ENGINES]
        bars = axes.barh(list(ENGINES.values()), rates, color=COLOURS)
        axes.bar_label(bars, [thousands(rate) for rate in rates], padding=3, fontsize=8)
        axes.set_title(f"GPT-2 {model}: tokens/s, one sequence, one H200", fontsize=9)
        axes.set_xlim(0, max(rates) * 1.15)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    both[1].set_yticklabels([])
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "images" / "gpt2_tokens.png", dpi=120)


if __name__ == "__main__":
    main()
