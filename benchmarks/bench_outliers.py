"""LLM.int8() beside plain dynamic int8 and fp16: a floating-point input, device time, weights from memory.

One column in 200 of the input holds an outlier. bitsandbytes, where it is installed, waits for the host in every call, so
it is timed from outside, call behind call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench_lowbit import CHAINED, Call, copies, times_of
from octofuse.ops import llm_int8_linear, quantized_linear

SHAPES = ((4096, 4096), (12288, 12288), (28672, 4096), (4096, 14336))
TOKENS = (1, 16, 512, 4096)
SHARE = 200  # columns of one with an outlier


def inputs(m: int, k: int) -> Tensor:
    x = torch.randn(m, k, device="cuda").clamp(-5, 5)
    x[:, torch.randperm(k, device="cuda")[: k // SHARE]] *= 60
    return x.half()


def calls_of(m: int, n: int, k: int) -> dict[str, list[Call]]:
    plain: list[Call] = []
    outliers: list[Call] = []
    for _ in range(copies(n * k)):
        x, w = inputs(m, k), torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        scale = torch.rand(n, device="cuda") / 1000
        plain.append(lambda x=x, w=w, s=scale: quantized_linear(x, w, s, constant_weight=True))
        outliers.append(lambda x=x, w=w, s=scale: llm_int8_linear(x, w, s, constant_weight=True))
    return {"w8a8-dynamic": plain, "llm-int8": outliers}


def bitsandbytes_us(m: int, n: int, k: int, repeats: int = 20) -> float | None:
    """LLM.int8() with a threshold of 6."""
    try:
        import bitsandbytes
    except ImportError:
        return None
    layers = []
    for _ in range(copies(n * k)):
        layer = bitsandbytes.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = bitsandbytes.nn.Int8Params(torch.randn(n, k).half(), has_fp16_weights=False, requires_grad=False)
        layers.append((layer.cuda(), inputs(m, k)))
    with torch.inference_mode():
        for layer, x in layers:
            layer(x)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(repeats):
            layer, x = layers[i % len(layers)]
            layer(x)
        end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) * 1e3 / repeats, 2)


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for n, k in SHAPES[:1] if smoke else SHAPES:
        for m in TOKENS:
            halves = [(inputs(m, k), torch.randn(n, k, device="cuda").half()) for _ in range(copies(2 * n * k))]
            columns: dict[str, Any] = {"fp16 F.linear": [lambda x=x, w=w: linear(x, w) for x, w in halves]}
            own = calls_of(m, n, k)
            columns |= own | {name + CHAINED: calls for name, calls in own.items()}
            peer = bitsandbytes_us(m, n, k)
            own_times = times_of(columns, 9)
            more = {} if peer is None else {"bitsandbytes": peer}
            rows.append({"M": m, "N": n, "K": k, **own_times, **more})
            del columns, own, halves
            torch.cuda.empty_cache()
    return {"unit": "us", "outliers": f"one column in {SHARE}", "rows": rows}
