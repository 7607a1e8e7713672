"""Which kernel serves a call, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import cpu, tuning
from octofuse.ops._guard import DTYPE_NAMES


@dataclass(frozen=True)
class Explanation:
    """The chosen kernel's name, why it was chosen, and (name, reason) for every other one that was looked at."""

    chosen: str
    why: str
    declined: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.why}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.declined])


def engines(device: torch.device | str = "cuda") -> tuple[str, ...]:
    """Names that `engine=` accepts for this kind of device, whether or not this machine can run them."""
    return cpu.ENGINES if torch.device(device).type == "cpu" else tuple(_C.candidates())


def explain(
    x: Tensor,
    w: Tensor,
    *,
    out_dtype: torch.dtype = torch.float16,
    activation: str | None = None,
    engine: str = "auto",
) -> Explanation:
    """What `i8f16_linear` (out_dtype fp16, bf16, fp32), `i8i8_linear` (int8) or `i8i32_matmul` (int32) would run.

    Args: x int8 `[..., K]`, w int8 `[N, K]`; nothing is launched. Assumes a contiguous output.
    Raises ValueError if no engine, or not the one asked for, can serve the call.
    """
    m, n, k = x.numel() // max(1, x.shape[-1]), w.shape[0], w.shape[1]
    double = out_dtype == torch.float32 and activation not in (None, "relu")
    if x.is_cuda:
        device = _C.device_info(x.get_device())
        chosen = _C.select(
            m,
            n,
            k,
            out_dtype=DTYPE_NAMES[out_dtype],
            raw=out_dtype == torch.int32,
            double_activation=double,
            engine=engine,
            compute_capability=device["compute_capability"],
            sm_count=device["sm_count"],
            cublaslt=device["cublaslt"],
            tuned=tuning.entries(x.get_device()),
        )
        return Explanation(chosen["chosen"], chosen["why"], tuple(map(tuple, chosen["declined"])))
    name = cpu.select_raw(engine) if out_dtype == torch.int32 else cpu.select(engine)
    declined: tuple[tuple[str, str], ...] = ()
    if name == "reference":
        reason = cpu.why_not_onednn() or ("it has no int32 output" if out_dtype == torch.int32 else "not asked for")
        declined = (("onednn", reason),)
    return Explanation(name, "asked for by name" if engine != "auto" else "first that can serve", declined)


def tune_cublaslt(x: Tensor, w: Tensor, *, out_dtype: torch.dtype = torch.int32) -> dict[int, float]:
    """Measure every algorithm of cuBLASLt's heuristic for x @ w^T and use the fastest from now on.

    Args: x int8 `[..., K]` and w int8 `[N, K]` on CUDA; out_dtype torch.int32 (`i8i32_matmul`, and `i8f16_linear` with
    engine="cublaslt") or torch.int8 (`i8i8_matmul`). Synchronises the stream; refused during graph capture.

    Returns: algorithm index in the heuristic's order -> median microseconds.
    """
    if out_dtype not in (torch.int32, torch.int8):
        raise ValueError(f"out_dtype: expected torch.int32 or torch.int8, got {out_dtype}")
    if not _C.build_info()["cuda"]:
        raise RuntimeError(
            "tune_cublaslt: this octofuse was built for the CPU only; reinstall it with OCTOFUSE_CUDA=ON"
        )
    return dict(_C.tune_cublaslt(x, w, out_dtype == torch.int8))
