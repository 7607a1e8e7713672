"""Weights of few bits beside many tokens, as a prompt has them: layers of models, and fp16 beside them; device time.

Groups of 128 columns (nf4: 64), every kernel behind the one before it, over rotating weights larger than L2.
"""

from __future__ import annotations

from typing import Any

import torch

from bench_lowbit import Call, float_calls, lowbit_calls, times_of, warm_up

SHAPES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (12288, 12288))
TOKENS = (256, 512, 1024, 2048, 4096)
KINDS = (("w8a16", "uniform", 8), ("w4a16", "uniform", 4), ("w3a16", "uniform", 3), ("bcq-q3", "planes", 3))


def run(smoke: bool) -> dict[str, Any]:
    warm_up(smoke)
    rows = []
    for n, k in SHAPES[:1] if smoke else SHAPES:
        for m in TOKENS:
            columns: dict[str, list[Call] | None] = {"fp16 F.linear": float_calls(m, n, k)}
            for name, kind, bits in KINDS:
                columns[name] = lowbit_calls(kind, bits, m, n, k)[0]
            columns["nf4"] = lowbit_calls("codebook", 4, m, n, k, 64)[0]
            columns["w4a16, dequantised"] = lowbit_calls("uniform", 4, m, n, k, engine="dequantized")[0]
            rows.append({"M": m, "N": n, "K": k, **times_of(columns, 5)})
            del columns
            torch.cuda.empty_cache()
    return {"unit": "us", "rows": rows}
