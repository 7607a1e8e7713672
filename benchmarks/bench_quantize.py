"""Quantisation passes beside a plain copy of the same bytes: device time and share of the copy's bandwidth."""

from __future__ import annotations

from typing import Any

import torch

import octofuse
from octofuse.ops.measure import device_time

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
        weight = torch.ones(k, device="cuda").half()
        fused = {
            "layer norm + quantise": lambda x, w=weight: octofuse.layer_norm_quantize(x, w, w),
            "rms norm + quantise": lambda x, w=weight: octofuse.rms_norm_quantize(x, w),
            "add + layer norm + quantise": lambda x, w=weight: octofuse.add_layer_norm_quantize(x, x, w, w),
            "gelu_tanh + quantise": lambda x: octofuse.activate_quantize(x, "gelu_tanh"),
            "torch layer norm": lambda x, w=weight, k=k: torch.nn.functional.layer_norm(x, (k,), w, w),
        }
        for name, call in fused.items():
            row[name] = device_time([lambda x=x, f=call: f(x) for x in inputs])
        rows.append(row)
    return {"unit": "us", "rows": rows}
