"""nf4 in groups of 64 beside a grid of 4 bits with as many scales, and fp16: device time, weights from memory."""

from __future__ import annotations

from typing import Any

import torch

from bench_lowbit import CHAINED, Call, float_calls, lowbit_calls, times_of

SHAPES = ((4096, 4096), (12288, 12288), (28672, 4096), (4096, 14336), (6144, 4096))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROUP = 64


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for n, k in SHAPES[:1] if smoke else SHAPES:
        for m in TOKENS:
            columns: dict[str, list[Call] | None] = {
                "fp16 F.linear": float_calls(m, n, k),
                "w4a16-g64": lowbit_calls("uniform", 4, m, n, k, GROUP)[0],
                "nf4": lowbit_calls("codebook", 4, m, n, k, GROUP)[0],
            }
            chained = {name + CHAINED: calls for name, calls in list(columns.items())[1:]} if m <= 4 else {}
            rows.append({"M": m, "N": n, "K": k, **times_of(columns | chained, 9)})
            del columns, chained
            torch.cuda.empty_cache()
    return {"unit": "us", "rows": rows}
