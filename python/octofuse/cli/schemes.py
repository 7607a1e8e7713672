"""`octofuse schemes`: what one can take, and what it was measured to cost and to gain."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from rich.console import Console
from rich.table import Table

from octofuse.quant import scheme_named

WHAT = {
    "w8a8-dynamic": "int8; a scale for each token",
    "w8a8-static": "int8; one scale, calibrated",
    "w8a8-static-mse-smooth": "and SmoothQuant, clipped range",
    "w8a16": "int8 weights alone",
    "w4a16-g128": "4-bit weights, nearest",
    "w4a16-g128-mse": "4-bit, range of least error",
    "w4a16-g128-zp-gptq": "4-bit with zero points, GPTQ",
    "w4a16-g128-awq": "4-bit, AWQ",
    "w3a16-g128-gptq": "3-bit, GPTQ",
    "w2a16-g128-half-gptq": "2-bit, GPTQ",
    "bcq-q4-g128": "sums of 4 scaled signs",
    "bcq-q3-g128": "sums of 3 scaled signs",
    "bcq-q2-g128": "sums of 2 scaled signs",
    "sparse12-w7-g128": "half of the columns, 7 bits",
}


def measured() -> dict[str, Any]:
    """What benchmarks/bench_schemes.py found."""
    found: dict[str, Any] = json.loads(files("octofuse.assets").joinpath("schemes.json").read_text())
    return found


def print_schemes(console: Console) -> None:
    found = measured()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head, justify in (
        ("scheme", "left"),
        ("what", "left"),
        ("bits", "right"),
        ("loss", "right"),
        ("GPU", "right"),
        ("CPU", "right"),
        ("calib.", "left"),
    ):
        table.add_column(head, justify=justify, no_wrap=head == "scheme")  # type: ignore[arg-type]
    for name, what in WHAT.items():
        row = found["schemes"][name]
        gain = "" if row["gpu"] is None else f"{row['gpu']:.1f}x"
        table.add_row(
            name, what, f"{row['bits']:.1f}", _loss(row["cost"]), gain, f"{row['cpu']:.1f}x",
            "yes" if scheme_named(name).needs_calibration else "",
        )  # fmt: skip
    console.print(table)
    for line in (
        "bits: of a weight, scales included. loss: of perplexity, on the embedded GPT-2.",
        f"GPU: one token through a {found['gpu_shape']} layer, against fp16, on one {found['gpu']}.",
        f"CPU: tokens/s of the embedded GPT-2, against fp32, on {found['cpu']}.",
        "Variants: w<1 to 8>a16, bcq-q<1 to 8>; groups of 32, 64, 128, 256 columns (-g64) or a row; -zp, -mse, -gptq,",
        "-awq; int8 with -smooth, -smooth0.7, -smooth-search, -tensor, -static-percentile, -static-entropy;",
        "nf4, fp4 (groups of 64), nf4-g128; llm-int8; fp8-dynamic, fp8-static, fp8-delayed, fp8-block128;",
        "w8a16-fp8 (FP8 weights alone), w8a16-fp8-g128; w4a8, w4a8-g128 (4-bit weights beside int8 activations).",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _loss(cost: float) -> str:
    return f"{cost:+.1%}" if cost < 1 else f"{1 + cost:.1f}x"
