"""Kernels of other engines, where this machine has their libraries; nothing of theirs is part of this project.

OCTOFUSE_VLLM_LIBRARY: the path of `vllm/_C_stable_libtorch.abi3.so`, out of vLLM's wheel (0.33.0, for CUDA 13), which
loads without vLLM itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

# x [M, K], w [N, K], scales of tokens [M, 1] and of channels [N], bias [N], the output's dtype -> [M, N]
ScaledMm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


@functools.cache
def vllm_scaled_mm() -> ScaledMm | None:
    """vLLM's cutlass_scaled_mm, int8 and float8; None where its library was not given."""
    library = os.environ.get("OCTOFUSE_VLLM_LIBRARY")
    if not library:
        return None
    torch.ops.load_library(library)
    op = torch.ops._C.cutlass_scaled_mm

    def call(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)
        op(out, x, w.t(), x_scale, w_scale.view(-1, 1), bias)
        return out

    return call


def expect_alike(name: str, got: Tensor, want: Tensor) -> None:
    """A column that computes something else is not timed."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        raise ValueError(f"{name}: expected this library's result within 1 %, got an error of {error:.2%}")
