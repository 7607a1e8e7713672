"""i8f16_linear in every engine beside fp16 F.linear and cuBLASLt's raw int32: device time, rate, host time.

Each engine runs fused bias, per-token x per-channel scales, fp16 output, over rotating operands larger than L2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

import octofuse
from octofuse.testing.timing import device_time, host_time

# The shapes of GPT-2, of a 2K-wide study, and of 4096-wide models from one row to thousands.
SHAPES = (
    (1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (1024, 2304, 768), (1024, 768, 768), (1024, 3072, 768),
    (1024, 768, 3072), (2048, 1920, 1920), (512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 4096),
)  # fmt: skip
L2_BYTES = 128 << 20  # twice the largest L2 that we know


def operand_sets(m: int, n: int, k: int) -> list[tuple[torch.Tensor, ...]]:
    count = max(2, min(64, L2_BYTES // (n * k + m * k)))
    sets = []
    for _ in range(count):
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
        w = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
        x_scale, w_scale = torch.rand(m, 1, device="cuda"), torch.rand(n, device="cuda") * 1e-3
        sets.append((x, w, x_scale, w_scale, torch.randn(n, device="cuda").half()))
    return sets


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for m, n, k in SHAPES[:2] if smoke else SHAPES:
        sets = operand_sets(m, n, k)
        row: dict[str, Any] = {"M": m, "N": n, "K": k}
        halves = [(x.half(), w.half(), bias) for x, w, _, _, bias in sets]
        row["fp16 F.linear"] = device_time([lambda s=s: linear(*s) for s in halves])
        row["cublaslt int32 (raw)"] = device_time(
            [lambda s=s: octofuse.i8i32_matmul(s[0], s[1], engine="cublaslt") for s in sets]
        )
        for engine in octofuse.engines("cuda"):
            used = sets[:2] if engine == "naive" else sets
            row[engine] = device_time([lambda s=s, e=engine: octofuse.i8f16_linear(*s, engine=e) for s in used])
        row["auto"] = octofuse.explain(sets[0][0], sets[0][1]).chosen
        best = row[row["auto"]]
        row["auto TOPS"] = 2 * m * n * k / best / 1e6
        row["auto GB/s"] = (n * k + m * k + 2 * m * n) / best / 1e3
        row["speed-up over fp16"] = row["fp16 F.linear"] / best
        rows.append(row)
    return {"unit": "us", "rows": rows, "host_us_per_call": host_times()}


def host_times() -> dict[str, float]:
    x, w, x_scale, w_scale, bias = operand_sets(16, 768, 768)[0]
    x_half, w_half = x.half(), w.half()
    return {
        "i8f16_linear": host_time(lambda: octofuse.i8f16_linear(x, w, x_scale, w_scale, bias)),
        "F.linear fp16": host_time(lambda: linear(x_half, w_half, bias)),
        "quantize_per_token": host_time(lambda: octofuse.quantize_per_token(x_half)),
    }
