"""octofuse.linear on float8 beside torch's _scaled_mm, vLLM's (`peers`) and int8: device time, weights from memory.

Scales per token and channel with bias and bf16 output; `_scaled_mm` per row likewise, and per tensor without them. "fast":
the tensor cores add up all of K, as the peers' use_fast_accum=True; "exact sums": every 128 columns in fp32, as their
False; "blocks": scales of 1 x 128 and 128 x 128. Every kernel waits for the one before it; in rows whose
product should take more than 50 us each has the clock that the card's power limit leaves it (`settle` of device_times).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import octofuse
from bench_gemm import L2_BYTES
from octofuse.ops.measure import Captured, device_times, overlap, settling
from peers import vllm

E4M3 = torch.float8_e4m3fn
BYTES, OPERATIONS = 4e12, 1.5e15  # a second, about
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672),
           (21504, 7168), (28672, 7168), (7168, 28672))  # fmt: skip
ROWS = (1, 2, 7, 16, 33, 64, 128, 256, 512, 1000, 2048, 4096)
Operands = dict[str, torch.Tensor]


def operands(m: int, n: int, k: int) -> list[Operands]:
    sets = []
    for _ in range(max(2, min(32, L2_BYTES // (n * k + m * k)))):
        x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16() / 32
        q, w8 = octofuse.quantize_per_token(x), octofuse.quantize_per_token(w)
        f, wf = octofuse.quantize_per_token(x, E4M3), octofuse.quantize_per_token(w, E4M3)
        b = octofuse.quantize_per_block(x)
        blocks = torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 1e-3
        bias = torch.randn(n, device="cuda").bfloat16()
        sets.append({"q": q[0], "qs": q[1], "w8": w8[0], "w8s": w8[1].view(-1), "f": f[0], "fs": f[1], "wf": wf[0],
                     "wfs": wf[1].view(-1), "b": b[0], "bs": b[1], "blocks": blocks, "bias": bias})  # fmt: skip
    return sets


def linear(x: str, w: str, x_scale: str, w_scale: str, **more: Any) -> Callable[[Operands], torch.Tensor]:
    def call(s: Operands) -> torch.Tensor:
        return octofuse.linear(s[x], s[w], s[x_scale], s[w_scale], s["bias"], out_dtype=torch.bfloat16, **more)

    return call


def scaled_mm(row: bool, fast: bool) -> Callable[[Operands], torch.Tensor]:
    one = torch.ones((), device="cuda")

    def call(s: Operands) -> torch.Tensor:
        scales = (s["fs"], s["wfs"].view(1, -1)) if row else (one, one)
        bias = s["bias"] if row else None
        return torch._scaled_mm(s["f"], s["wf"].t(), *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return call


def vllm_linear(s: Operands) -> torch.Tensor:
    return vllm.scaled_mm(s["f"], s["wf"], s["fs"], s["wfs"], s["bias"], torch.bfloat16)


def columns() -> dict[str, Callable[[Operands], torch.Tensor]]:
    peers = {"vLLM": vllm_linear} if vllm.is_here() else {}
    return {
        "fast": linear("f", "wf", "fs", "wfs", fast_accumulate=True),
        "exact sums": linear("f", "wf", "fs", "wfs"),
        "blocks": linear("b", "wf", "bs", "blocks"),
        "int8": linear("q", "w8", "qs", "w8s"),
        "torch row, fast": scaled_mm(row=True, fast=True),
        "torch tensor, fast": scaled_mm(row=False, fast=True),
        "torch row": scaled_mm(row=True, fast=False),
        "torch tensor": scaled_mm(row=False, fast=False),
        **peers,
    }


def serves(call: Callable[[Operands], torch.Tensor], s: Operands) -> bool:
    """cuBLASLt, behind torch, has no kernel for some shapes."""
    try:
        call(s)
    except RuntimeError as error:
        if "NOT_SUPPORTED" not in str(error):
            raise
        return False
    return True


def measured(m: int, n: int, k: int, repeats: int) -> dict[str, Any]:
    sets = operands(m, n, k)
    if vllm.is_here():
        vllm.expect_alike("vLLM", vllm_linear(sets[0]), columns()["fast"](sets[0]))
    with overlap(False):
        graphs = {
            name: Captured([lambda s=s, f=f: f(s) for s in sets]) for name, f in columns().items() if serves(f, sets[0])
        }
    settle = settling(max(n * k / BYTES, 2.0 * m * n * k / OPERATIONS))
    repeats = 1 if settle else repeats
    times = {name: round(us, 2) for name, us in device_times(graphs, repeats=repeats, settle=settle).items()}
    fastest = min(us for name, us in times.items() if name.startswith(("torch", "vLLM")))
    return {"M": m, "N": n, "K": k, **times, "peers / fast": round(fastest / times["fast"], 3)}


def mean(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3)


def run(smoke: bool) -> dict[str, Any]:
    weights, rows = (WEIGHTS[:1], (1, 256)) if smoke else (WEIGHTS, ROWS)
    found = [measured(m, n, k, 3 if smoke else 5) for n, k in weights for m in rows]
    large = [row for row in found if row["M"] >= 1000] or found
    few = [row for row in found if row["M"] <= 64]
    return {
        "rows": found,
        "the peers' fastest over fast, geometric mean": mean([row["peers / fast"] for row in found]),
        "the same, worst": min(row["peers / fast"] for row in found),
        "fast over int8 up to 64 tokens, geometric mean": mean([row["fast"] / row["int8"] for row in few]),
        "rate of blocks over exact sums from 1000 tokens": mean([row["exact sums"] / row["blocks"] for row in large]),
        "rate of blocks over fast from 1000 tokens": mean([row["fast"] / row["blocks"] for row in large]),
    }
