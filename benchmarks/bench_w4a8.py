"""Weights of 4 bits beside int8 activations, from one token to a long prompt: layers of models; device time.

w4a8: a scale for each channel. w4a8-g128: two levels, groups of 128 columns. Beside them fp16, int8 weights, and 4 bits
beside fp16 activations. Activations are normal numbers, quantised by the token before the clock runs; the last column has
that in front of every product, as a layer does. Every kernel behind the one before it (but for the column that says
chained), over rotating weights larger than L2.
"""

from __future__ import annotations

from typing import Any

import torch

import octofuse
from bench_lowbit import CHAINED, Call, copies, float_calls, lowbit_calls, times_of, warm_up
from bench_prompts import SHAPES
from octofuse.quant.packing import packed_rows, packed_words

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
GROUP = 128


def int8_calls(m: int, n: int, k: int) -> list[Call]:
    calls: list[Call] = []
    for _ in range(copies(n * k)):
        x, x_scale = octofuse.quantize_per_token(torch.randn(m, k, device="cuda").half())
        w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        scale = torch.rand(n, device="cuda")
        calls.append(lambda x=x, s=x_scale, w=w, ws=scale: octofuse.linear(x, w, s, ws, constant_weight=True))
    return calls


def int4_calls(m: int, n: int, k: int, group: int | None, quantises: bool = False) -> list[Call]:
    """Codes are random: they cost what others do. A group's scale is 10 and its zero 8."""
    shape = (packed_rows(n), packed_words(4, k))
    calls: list[Call] = []
    for _ in range(copies(n * k // 2)):
        floats = torch.randn(m, k, device="cuda").half()
        packed = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda")
        scale = torch.rand(1, n, device="cuda").half()
        groups = torch.full((-(-k // (group or k)), n), 10 + 256 * 8, dtype=torch.int16, device="cuda")
        tokens = octofuse.quantize_per_token(floats)

        def call(floats=floats, tokens=tokens, packed=packed, scale=scale, groups=groups) -> torch.Tensor:  # type: ignore[no-untyped-def]
            x, x_scale = octofuse.quantize_per_token(floats) if quantises else tokens
            if group is None:
                return octofuse.woq_linear(x, packed, scale, 8, bits=4, x_scale=x_scale, constant_weight=True)
            more = {"group": group, "x_scale": x_scale, "constant_weight": True}
            return octofuse.two_level_linear(x, packed, scale, groups, **more)

        calls.append(call)
    return calls


def run(smoke: bool) -> dict[str, Any]:
    warm_up(smoke)
    rows = []
    for n, k in SHAPES[:1] if smoke else SHAPES:
        for m in TOKENS:
            columns: dict[str, list[Call] | None] = {
                "fp16 F.linear": float_calls(m, n, k),
                "w8a8": int8_calls(m, n, k),
                "w4a16-g128": lowbit_calls("uniform", 4, m, n, k, GROUP)[0],
                "w4a8": int4_calls(m, n, k, None),
                "w4a8-g128": int4_calls(m, n, k, GROUP),
                "w4a8-g128, quantised": int4_calls(m, n, k, GROUP, quantises=True),
            }
            columns[f"w4a8-g128{CHAINED}"] = columns["w4a8-g128"]
            rows.append({"M": m, "N": n, "K": k, **times_of(columns, 7)})
            del columns
            torch.cuda.empty_cache()
    return {"unit": "us", "rows": rows}
