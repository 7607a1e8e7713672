"""nf4 in groups of 64 beside a grid of 4 bits with as many scales, FP8 weights beside a grid of 8 bits (a scale a row),
fp16, and bitsandbytes where it is installed: device time, weights from memory.
"""

from __future__ import annotations

from typing import Any

import torch

from bench_lowbit import CHAINED, Call, copies, float_calls, lowbit_calls, times_of

SHAPES = ((4096, 4096), (12288, 12288), (28672, 4096), (4096, 14336), (6144, 4096))
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROUP = 64


def bitsandbytes_calls(m: int, n: int, k: int) -> list[Call] | None:
    """Its own choice of kernel for so many tokens."""
    try:
        import bitsandbytes
        from bitsandbytes.functional import quantize_4bit
    except ImportError:
        return None
    calls: list[Call] = []
    for _ in range(copies(n * k // 2)):
        x, w = torch.randn(m, k, device="cuda").half(), torch.randn(n, k, device="cuda").half()
        codes, state = quantize_4bit(w, blocksize=GROUP, quant_type="nf4")
        calls.append(lambda x=x, c=codes, s=state: bitsandbytes.matmul_4bit(x, c.t(), s))
    return calls


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for n, k in SHAPES[:1] if smoke else SHAPES:
        for m in TOKENS:
            columns: dict[str, list[Call] | None] = {
                "fp16 F.linear": float_calls(m, n, k),
                "w4a16-g64": lowbit_calls("uniform", 4, m, n, k, GROUP)[0],
                "nf4": lowbit_calls("codebook", 4, m, n, k, GROUP)[0],
                "w8a16": lowbit_calls("uniform", 8, m, n, k, None)[0],
                "w8a16-fp8": lowbit_calls("float8", 8, m, n, k, None)[0],
            }
            chained = {name + CHAINED: calls for name, calls in list(columns.items())[1:]} if m <= 4 else {}
            columns["bitsandbytes"] = bitsandbytes_calls(m, n, k)
            rows.append({"M": m, "N": n, "K": k, **times_of(columns | chained, 9)})
            del columns, chained
            torch.cuda.empty_cache()
    return {"unit": "us", "rows": rows}
