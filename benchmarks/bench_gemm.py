"""i8f16_linear beside what else this machine offers: device time, rates, host time, and time against M.

Fused bias, per-token x per-channel scales, fp16 output, over rotating operands larger than L2. "alone": every kernel waits
for the one before it, as the peers' do; "chained": as in a captured model, where a kernel may start before its predecessor
ends (programmatic dependent launch) and the weight is promised to be constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

import octofuse
from octofuse.ops.measure import Captured, device_time, device_times, overlap
from octofuse.testing.timing import host_time
from peers import vllm

LARGE = (
    (1024, 2304, 768), (1024, 768, 768), (1024, 3072, 768), (1024, 768, 3072), (8192, 3072, 768), (2048, 1920, 1920),
    (512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 4096), (2048, 14336, 4096), (2048, 4096, 14336),
    (8192, 8192, 8192), (8192, 14336, 4096),
)  # fmt: skip
SMALL = tuple((m, n, k) for n, k in ((768, 768), (2304, 768), (768, 3072), (4096, 4096), (8192, 8192), (12288, 12288))
              for m in (1, 4, 16, 64, 128))  # fmt: skip
COMPILED = (*LARGE[:4], (4096, 4096, 4096))  # a compilation takes seconds a shape
CURVES = ((4096, 4096), (2304, 768), (768, 3072))
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


def int_mm(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
    x, w, x_scale, w_scale, bias = s
    return (torch._int_mm(x, w.t()).float() * w_scale * x_scale + bias).half()


def peers(sets: list[tuple[torch.Tensor, ...]], m: int) -> dict[str, Captured]:
    halves = [(x.half(), w.half(), bias) for x, w, _, _, bias in sets[: max(2, len(sets) // 2)]]
    found = {"fp16 F.linear": Captured([lambda s=s: linear(*s) for s in halves])}
    one = torch.ones((), device="cuda")
    eights = [(x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()) for x, w, _ in halves]
    found["fp8 _scaled_mm"] = Captured(
        [lambda s=s: torch._scaled_mm(s[0], s[1], one, one, out_dtype=torch.float16) for s in eights]
    )
    if m > 16:  # torch refuses fewer rows
        found["torch._int_mm"] = Captured([lambda s=s: torch._int_mm(s[0], s[1].t()) for s in sets])
        found["_int_mm + eager dequantise"] = Captured([lambda s=s: int_mm(s) for s in sets])
    octofuse.tune_cublaslt(sets[0][0], sets[0][1])  # the best of its algorithms, not its first guess
    if vllm.is_here():
        vllm.expect_alike("vLLM", vllm.scaled_mm(*sets[0], torch.float16), octofuse.i8f16_linear(*sets[0]))
        found["vLLM"] = Captured([lambda s=s: vllm.scaled_mm(*s, torch.float16) for s in sets])
    found["cublaslt int32 (raw)"] = Captured(
        [lambda s=s: octofuse.i8i32_matmul(s[0], s[1], engine="cublaslt") for s in sets]
    )
    return found


def own(sets: list[tuple[torch.Tensor, ...]]) -> dict[str, Captured]:
    """This library's columns; "quantise + linear" takes fp16 and quantises it per token."""

    def linear_of(s: tuple[torch.Tensor, ...], **more: Any) -> torch.Tensor:
        return octofuse.i8f16_linear(*s, **more)

    def quantised(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, scale = octofuse.quantize_per_token(s[0])
        return octofuse.i8f16_linear(q, s[1], scale, s[3], s[4], constant_weight=True)

    halves = [(s[0].half(), *s[1:]) for s in sets]
    with overlap(False):
        found = {
            "octofuse alone": Captured([lambda s=s: linear_of(s) for s in sets]),
            "int8 out, gelu_tanh": Captured(
                [lambda s=s: octofuse.i8i8_linear(*s, out_scale=0.05, activation="gelu_tanh") for s in sets]
            ),
            "quantise + linear alone": Captured([lambda s=s: quantised(s) for s in halves]),
        }
    found["octofuse chained"] = Captured([lambda s=s: linear_of(s, constant_weight=True) for s in sets])
    found["quantise + linear chained"] = Captured([lambda s=s: quantised(s) for s in halves])
    return found


def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for m, n, k in (*LARGE[:1], *SMALL[:1]) if smoke else (*LARGE, *SMALL):
        sets = operand_sets(m, n, k)
        graphs = {**peers(sets, m), **own(sets)}
        if (m, n, k) in COMPILED:
            compiled = torch.compile(int_mm, dynamic=False)
            graphs["_int_mm + dequantise, torch.compile"] = Captured([lambda s=s, f=compiled: f(s) for s in sets])
        row: dict[str, Any] = {"M": m, "N": n, "K": k, **device_times(graphs, repeats=25 if m * n * k < 1e11 else 9)}
        row["kernel"] = octofuse.explain(sets[0][0], sets[0][1]).chosen
        row["TOPS"] = 2 * m * n * k / row["octofuse alone"] / 1e6
        row["GB/s"] = (n * k + m * k + 2 * m * n) / row["octofuse alone"] / 1e3
        row["over fp16"] = row["fp16 F.linear"] / row["octofuse alone"]
        rows.append(row)
    return {"unit": "us", "rows": rows, "host_us_per_call": host_times(), "curves": {} if smoke else curves()}


def curves() -> dict[str, dict[str, list[float]]]:
    """Time of every M from 1 to 512: no step may cost more than its bytes."""
    found = {}
    for n, k in CURVES:
        sets = operand_sets(512, n, k)
        times = []
        for m in range(1, 513):
            calls = [lambda s=s, m=m: octofuse.i8f16_linear(s[0][:m], s[1], s[2][:m], *s[3:]) for s in sets]
            with overlap(False):
                times.append(round(device_time(calls, repeats=7), 3))
        found[f"{n}x{k}"] = {"us": times}
    return found


def host_times() -> dict[str, float]:
    x, w, x_scale, w_scale, bias = operand_sets(16, 768, 768)[0]
    x_half, w_half = x.half(), w.half()
    with torch.no_grad():
        return {
            "i8f16_linear": host_time(lambda: octofuse.i8f16_linear(x, w, x_scale, w_scale, bias)),
            "F.linear fp16": host_time(lambda: linear(x_half, w_half, bias)),
            "quantize_per_token": host_time(lambda: octofuse.quantize_per_token(x_half)),
        }
