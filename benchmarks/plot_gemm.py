"""Draw gemm.json's time against M: `python benchmarks/plot_gemm.py benchmarks/results/h200` (needs matplotlib)."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def main() -> None:
    folder = Path(sys.argv[1])
    record = json.loads((folder / "gemm.json").read_text())
    figure, axes = plt.subplots(figsize=(9, 4.5))
    for name, curve in record["curves"].items():
        times = curve["us"]
        axes.plot(range(1, len(times) + 1), times, label=f"N x K = {name}", linewidth=1)
        steps = [later / earlier for earlier, later in itertools.pairwise(times)]
        worst = max(range(len(steps)), key=steps.__getitem__)
        print(f"{name}: largest step t(M+1)/t(M) = {steps[worst]:.3f} at M = {worst + 1}")
    axes.set(xlabel="tokens M", ylabel="device time, us", ylim=(0, None), title=f"i8f16_linear, {record['device']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "gemm_time_against_m.png", dpi=110)


if __name__ == "__main__":
    main()
