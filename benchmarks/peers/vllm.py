"""vLLM's kernels (0.33.0): CUTLASS scaled_mm of int8 and float8, Marlin, Machete, CUTLASS W4A8; out of its library alone.

OCTOFUSE_VLLM_LIBRARY: the path of `vllm/_C_stable_libtorch.abi3.so`, out of the wheel for CUDA 13.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse.files.words import pack_words
from peers.layer import E4M3, GROUP, Kernel, Layer, relative_error


@functools.cache
def load() -> Any:
    """The library's operators. ImportError where it was not given."""
    if not is_here():
        raise ImportError("OCTOFUSE_VLLM_LIBRARY is not set")
    torch.ops.load_library(os.environ["OCTOFUSE_VLLM_LIBRARY"])
    return torch.ops._C


def is_here() -> bool:
    return bool(os.environ.get("OCTOFUSE_VLLM_LIBRARY"))


def scaled_mm(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """cutlass_scaled_mm, int8 and float8: x [M, K], w [N, K], scales of tokens [M, 1] and channels [N] -> [M, N]."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)
    load().cutlass_scaled_mm(out, x, w.t(), x_scale, w_scale.view(-1, 1), bias)
    return out


def expect_alike(name: str, got: Tensor, want: Tensor) -> None:
    """A column that computes something else is not timed."""
    error = relative_error(got, want)
    if not error < 1e-2:
        raise ValueError(f"{name}: expected this library's result within 1 %, got an error of {error:.2%}")


def kernels(family: str) -> list[Kernel]:
    if family == "w8a8":
        return [
            Kernel("vLLM scaled_mm", "int8", int8_weight, scaled_linear, adds_bias=True),
            Kernel("vLLM scaled_mm quantised", "fp16", int8_weight, quantised_linear, 2e-2, adds_bias=True),
            Kernel("vLLM fp8 scaled_mm", "e4m3", float8_weight, scaled_linear, 4e-2, adds_bias=True, compared=False),
        ]
    if family in ("w4a16", "w8a16"):
        kind = INT4 if family == "w4a16" else INT8
        return [
            Kernel("vLLM Marlin", "fp16", lambda layer: marlin_weight(layer, False), marlin(kind)),
            Kernel("vLLM Machete", "fp16", lambda layer: machete_weight(layer, kind), machete(kind)),
        ]
    if family == "w4a8-g128":
        return [
            Kernel("vLLM Marlin int8", "int8", lambda layer: marlin_weight(layer, True), marlin(INT4), adapt=scaled_by),
            Kernel("vLLM CUTLASS W4A8 fp8", "e4m3", cutlass_w4a8_weight, cutlass_w4a8, tolerance=8e-2),
        ]
    return []


def int8_weight(layer: Layer) -> tuple[Any, ...]:
    return layer.codes, layer.scale.float(), layer.bias


def float8_weight(layer: Layer) -> tuple[Any, ...]:
    return *layer.float8(), layer.bias


def scaled_linear(x: tuple[Tensor, Tensor], w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return scaled_mm(x[0], w, x[1], scale, bias, torch.float16)


def quantised_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    codes = torch.empty_like(x, dtype=torch.int8)
    x_scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    load().dynamic_scaled_int8_quant(codes, x, x_scale, None)
    return scaled_linear((codes, x_scale), w, scale, bias)


def scalar_type(bits: int, bias: int) -> int:
    """The number by which vLLM names unsigned integers of `bits` bits from which `bias` is subtracted."""
    # exponent's bits, mantissa's, signed, bias (32 bits), finite only, kind of NaN
    fields = ((0, 8), (bits, 8), (0, 1), (bias, 32), (0, 1), (1, 8))
    value = offset = 0
    for field, width in fields:
        value |= field << offset
        offset += width
    return value


INT4, INT8 = scalar_type(4, 8), scalar_type(8, 128)


def words(layer: Layer) -> Tensor:
    """Codes as GPTQ's files have them: int32 [K * bits / 32, N], the first of a word's rows in its low bits."""
    return pack_words(layer.codes, layer.bits).t().contiguous()


def marlin_scales(scale: Tensor, plain: bool) -> Tensor:
    """[G, N] in Marlin's order: 64 (of int8 activations 32) channels at a time."""
    if plain:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return scale.reshape(-1, len(order))[:, order].reshape(scale.shape).contiguous()


def marlin_weight(layer: Layer, int8: bool) -> tuple[Any, ...]:
    codes = load().gptq_marlin_repack(words(layer), layer.k, layer.n, layer.bits, int8)
    scale = marlin_scales(layer.scale.t().contiguous(), plain=not int8)
    factor = None
    if int8:  # scales become integers of up to 4096
        factor = scale.max().float() / 4096
        scale = (scale.float() / factor).round().short().view(scale.dtype)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    none = torch.empty(0, dtype=torch.int32, device=codes.device)
    locks = torch.zeros(4 * processors, dtype=torch.int32, device=codes.device)
    return codes, scale, factor, none, locks, layer.n, layer.k


def scaled_by(x: Any, codes: Tensor, scale: Tensor, factor: Tensor | None, *more: Any) -> Any:
    """The tokens, their scales times the factor that Marlin's integer scales leave over."""
    return x if factor is None else (x[0], (x[1] * factor).contiguous())


def marlin(kind: int) -> Callable[..., Tensor]:
    def call(x: Any, codes: Tensor, scale: Tensor, _: Any, none: Tensor, locks: Tensor, n: int, k: int) -> Tensor:
        x, x_scale = (x, None) if isinstance(x, Tensor) else x
        more = (None, none, locks, kind, x.shape[0], n, k, False, True, False)
        return load().marlin_gemm(x, None, codes, None, scale, x_scale, *more)

    return call


def machete_weight(layer: Layer, kind: int) -> tuple[Any, ...]:
    by_column = words(layer).t().contiguous().t()
    codes = load().machete_prepack_B(by_column, torch.float16, kind, torch.float16)
    return codes, layer.scale.t().contiguous()


def machete(kind: int) -> Callable[..., Tensor]:
    def call(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return load().machete_mm(x, codes, kind, None, scale, None, GROUP, None, None, None)

    return call


def cutlass_w4a8_weight(layer: Layer) -> tuple[Any, ...]:
    """Scales of groups in float8 times one of a channel, as vLLM rounds them; codes are signed."""
    signed = words(layer) ^ -0x77777778  # the high bit of each four
    codes = load().cutlass_encode_and_reorder_int4b(signed.t().contiguous().t())
    channel = layer.scale.float().amax(1, keepdim=True) / 448
    groups = ((layer.scale.float() / channel).to(E4M3).float() / 8).to(E4M3)
    return codes, load().cutlass_pack_scale_fp8(groups.t().contiguous()), (8 * channel).contiguous()


def cutlass_w4a8(x: tuple[Tensor, Tensor], codes: Tensor, groups: Tensor, channel: Tensor) -> Tensor:
    return load().cutlass_w4a8_mm(x[0], codes, groups, GROUP, channel, x[1], torch.bfloat16, None)
