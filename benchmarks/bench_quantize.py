"""Quantisation passes beside a plain copy of the same bytes: device time and share of the copy's bandwidth."""

from __future__ import annotations

from typing import Any

import torch

import octofuse
from octofuse.testing.timing import device_time

SHAPES = ((1, 4096), (64, 4096), (1024, 768), (4096, 4096), (8192, 8192))


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for m, k in SHAPES[:2] if smoke else SHAPES:
        inputs = [torch.randn(m, k, device="cuda").half() for _ in range(max(2, min(32, (256 << 20) // (2 * m * k))))]
        scale = torch.tensor(0.03, device="cuda")
        q, scales = octofuse.quantize_per_token(inputs[0])
        moved = 3 * m * k  # fp16 in, int8 out
        copies = [torch.empty_like(x) for x in inputs]
        row: dict[str, Any] = {"M": m, "K": k}
        row["copy fp16"] = device_time([lambda a=a, b=b: b.copy_(a) for a, b in zip(inputs, copies, strict=True)])
        row["per token"] = device_time([lambda x=x: octofuse.quantize_per_token(x) for x in inputs])
        row["per tensor"] = device_time([lambda x=x, s=scale: octofuse.quantize_per_tensor(x, s) for x in inputs])
        row["dequantize"] = device_time([lambda q=q, s=scales: octofuse.dequantize(q, s)] * 4)
        copy_rate = 4 * m * k / row["copy fp16"]
        row["per token, share of copy bandwidth"] = moved / row["per token"] / copy_rate
        rows.append(row)
    return {"unit": "us", "rows": rows}
