"""Linears whose weights have 1 to 8 bits and whose activations are in floating point, or int8 with a scale each.

fp16 and bf16 run kernels that read the packed weight. Up to 4 tokens, compute capability 8.0 and later (engines
"gemv_int8" and, for one token against codes of up to 3 bits or planes, "gemv_binary"): a token's 128 values of a k-block
share a power of two and become 16-bit integers, whose products with the codes are exact; sums of groups are in fp32. That
changes a value by at most 2^-14 of the largest of its 128, where fp16 itself rounds that one by up to 2^-12. x is copied
where K or the distance of its rows is odd, or where it does not start at a multiple of two elements. Uniform codes with N
a multiple of 16 and groups of at least 128 columns (4 and 8 bits: any): "gemv_int8" takes up to 8 tokens, of which x is
copied where K or the distance of its rows is no multiple of 8, and "auto" does where that is faster. Beside a codebook's
it may take 2 to 4 tokens in the same way.

More tokens, compute capability 9.0 (engines "gemm", "gemm_split" and "gemm_many"): weights are rounded once to x's dtype
and multiplied on its tensor cores. "gemm" cuts K; the others make a weight for up to 256 tokens at a time, "gemm_split" by
blocks that divide K in two, for narrow layers. Where their tiles do not fill whole rounds, blocks share the rest, a sum
begun by one and ended by another, through up to 17 MB of scratch memory; no bit depends on it. "auto" goes from one to the
next at 64 to 1,024 tokens and beyond, numbers that N, K and the kind of weight decide (`octofuse.explain` tells). They
need N to be a multiple of 8, with zero points of 16; N is free where a row is one group (of one plane). x is copied where
its rows do not start at multiples of 16 bytes.

int8 activations: by "gemv_int8" as they are, exactly; by others as numbers of the scale's dtype, which hold them (a copy).
Beside a weight that is its rows' scales times integers of 8 bits (uniform codes of 2 and more bits, one scale for each row,
the zero 2^(bits - 1); `two_level_linear`) they are multiplied as int8: sums are exact, and every engine gives the bits of
`i8f16_linear` with these integers as its weight.

On CPUs (engine "cpu", groups of whole multiples of 32 columns) codes become fp32 in registers, for one token, or in the
first-level cache; sums are in fp32, in an order of K alone. Beside int8 x integers become int8, 64 rows at a time.

All other calls (engine "dequantized": more than 768 tokens, mostly 1,024, where N is about 1,024 to 1,920 and K > 1,920,
more than 1,024 against 4 or more planes; with K from 10,240 on 8,192 tokens and more beside 5 to 8 bits; fp32 activations
on a GPU, other chips, groups other than 32, 64 and 128 times a power of two) multiply a weight that is dequantised for the
call. `octofuse.explain` says which engine takes a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import rows
from octofuse.ops._calls import LowbitCall, Scale, run
from octofuse.ops.activations import Activation, activation_named
from octofuse.ops.dequantized import dequantized_linear, split_zero
from octofuse.quant import codebook


def woq_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | int | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_scale: Scale | None = None,
    engine: str = "auto",
    gated: bool = False,
) -> Tensor:
    """act(norm(x) @ w^T + bias) + residual with w = scale * (code - zero); for int8 x, x_scale * (x @ w^T) in its place.

    Args:
        x: fp16, bf16, fp32 or int8 `[..., K]`, dense in K.
        packed: int32, `quant.packing.pack` of codes `[N, K]` of `bits` bits; it knows K up to a multiple of 128 only.
        scale: fp16, bf16 or fp32 `[G, N]`, for each group of `group` columns; None: a row is one group.
        zero: uint8 `[G, N]`; an int, 0 to 2^bits - 1: the same for all; None: the grid's middle (`quant.grid`).
        bias: `[N]`. activation: None, "relu", "gelu", "gelu_tanh" or "silu". residual: `[..., N]`.
        constant_weight: nothing in flight writes packed, scale, zero, or the norm's weight and bias; as in `i8f16_linear`.
        x_scale: of an int8 x and only of one: fp32 `[M]` or `[M, 1]` for its M rows (`quantize_per_token` gives both), one
            element, or a float.
        norm, norm_weight, norm_bias, eps: as in `quantized_linear`, with the bits of the norm as an op of its own; up to 4
            tokens the kernel normalises itself.
        out_scale: fp32, one element, or a float: int8 output. Kernels round the fp32 result once; engine "dequantized"
            rounds it to x's dtype first, and gated is as `gated_activation_quantize`.
        engine: "auto", or "gemv_binary", "gemv_int8", "gemm", "gemm_split", "gemm_many" or "dequantized".
        gated: act(first half of the outputs) * the other half in place of act(outputs), with the bits of `gated_activation`
            as an op of its own; N is even, and there is no residual. In one kernel up to 4 tokens where N is a multiple of
            32, for codes of 1 to 4 and of 8 bits, up to 4 planes, and pairs (`sparse12_linear`), in groups of at least 128
            columns; in smaller ones for 4 bits, and for one token of 1 to 3 bits or planes.

    Returns:
        `[..., N]`, gated `[..., N / 2]`, in x's dtype, for int8 in the scale's; int8 with out_scale. By the kernels a
        token's bits are the same whatever else is in x: those of the gemv engines, of "gemm", of "gemm_split", or of
        "gemm_many"; of integers (above) the same by all.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Examples:
        >>> from octofuse.quant.packing import pack
        >>> packed = pack(torch.tensor([[0, 1, 2, 15]]), 4)
        >>> zero = torch.ones(1, 1, dtype=torch.uint8)
        >>> octofuse.woq_linear(torch.ones(1, 4), packed, torch.full((1, 1), 0.5), zero, bits=4)
        tensor([[7.]])
    """
    zeros, zero_point = split_zero(zero)
    return _call(
        LowbitCall(
            x, x_scale, packed, scale, zeros, None, "uniform", bits, group, norm, norm_weight,
            norm_bias, eps, bias, activation, residual, out_scale, engine, constant_weight, gated,
            zero_point,
        )
    )  # fmt: skip


def bcq_linear(
    x: Tensor,
    packed: Tensor,
    alpha: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group: int | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_scale: Scale | None = None,
    engine: str = "auto",
    gated: bool = False,
) -> Tensor:
    """`woq_linear` with w = offset + sum of alpha[i] * (+1 where bit i of the code is set, else -1).

    Binary-coding quantisation: Xu et al., "Alternating multi-bit quantization", 2018; Jeon et al., "BiQGEMM", 2020.

    Args:
        x, bias, activation, residual, constant_weight, x_scale, norm, norm_weight, norm_bias, eps, out_scale, engine,
            gated: as `woq_linear` takes them.
        packed: int32, `quant.packing.pack(codes, q, planes=True)` of codes `[N, K]` of q bits.
        alpha: fp16, bf16 or fp32 `[G, q, N]`, for each group of `group` columns; None: a row is one group.
        offset: `[G, N]`, or None; no kernel takes one.

    Returns:
        `[..., N]` as `woq_linear` does.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> from octofuse.quant.packing import pack
        >>> packed = pack(torch.tensor([[1, 0, 1, 1]]), 1, planes=True)  # + - + +
        >>> octofuse.bcq_linear(torch.ones(1, 4), packed, torch.full((1, 1, 1), 0.5))
        tensor([[1.]])
    """
    return _call(
        LowbitCall(
            x, x_scale, packed, alpha, None, offset, "planes", planes_of(alpha), group, norm, norm_weight, norm_bias, eps,
            bias, activation, residual, out_scale, engine, constant_weight, gated,
        )
    )  # fmt: skip


def sparse12_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    group: int | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_scale: Scale | None = None,
    engine: str = "auto",
    gated: bool = False,
) -> Tensor:
    """`woq_linear` with one of every two columns of w, in 7 bits (`quant.sparse`).

    Args:
        x, bias, activation, residual, constant_weight, x_scale, norm, norm_weight, norm_bias, eps, out_scale, engine,
            gated: as `woq_linear` takes them.
        packed: int32, `quant.packing.pack_pairs` of codes `[N, ceil(K / 2)]`.
        scale: fp16, bf16 or fp32 `[G, N]`, for each group of `group` columns; None: a row is one group.

    Returns:
        `[..., N]` as `woq_linear` does.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> from octofuse.quant.packing import pack_pairs
        >>> packed = pack_pairs(torch.tensor([[3, 128 + 5]]))  # 3 in column 0, 5 in column 3
        >>> octofuse.sparse12_linear(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), packed, torch.ones(1, 1))
        tensor([[5003.]])
    """
    return _call(
        LowbitCall(
            x, x_scale, packed, scale, None, None, "sparse12", 8, group, norm, norm_weight, norm_bias, eps, bias,
            activation, residual, out_scale, engine, constant_weight, gated,
        )
    )  # fmt: skip


def codebook_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    levels: str | Sequence[float] = "nf4",
    bias: Tensor | None = None,
    *,
    group: int | None = codebook.GROUP,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    out_scale: Scale | None = None,
    engine: str = "auto",
    gated: bool = False,
) -> Tensor:
    """`woq_linear` with w = scale * levels[code], codes of 4 bits, or of 8 for "e4m3".

    Codes of 4 bits: up to 4 tokens kernels multiply levels as integers of 16 bits, by the integers of tokens, and leave the
    product of both low bytes out: a column may lose 2^-15 of the largest level times the largest of its 128 values. int8
    tokens lose nothing. e4m3: up to 4 tokens become fp16 times a power of two for each 128 values, and tensor cores add
    their products with codes in fp32; of bf16 tokens values below 2^-29 of the largest of 128 lose bits. More tokens, and
    the engine "dequantized": levels in the scale's dtype, their products with scales rounded to it.

    Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023; Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022.

    Args:
        x, bias, activation, residual, constant_weight, x_scale, norm, norm_weight, norm_bias, eps, out_scale, engine,
            gated: as `woq_linear` takes them.
        packed: int32, `quant.codebook.packed(codes, levels)` of codes `[N, K]`; of e4m3 these are its bytes.
        scale: fp16, bf16 or fp32 `[G, N]`, for each group of `group` columns; None: a row is one group. Beside e4m3 they
            are below 256, or results are not finite.
        levels: "nf4", "fp4", "e4m3", or 16 numbers from -65504 to 65504. No code of e4m3 is NaN (0x7F, 0xFF):
            kernels make different things of them.

    Returns:
        `[..., N]` as `woq_linear` does.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> from octofuse.quant.codebook import packed
        >>> codes = packed(torch.tensor([[15, 7, 0, 15]]), "nf4")  # 1, 0, -1, 1
        >>> octofuse.codebook_linear(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), codes, torch.full((1, 1), 0.5))
        tensor([[1.]])
    """
    kind, bits, of_codes = codebook.stored_as(levels)
    return _call(
        LowbitCall(
            x, x_scale, packed, scale, None, None, kind, bits, group, norm, norm_weight, norm_bias, eps,
            bias, activation, residual, out_scale, engine, constant_weight, gated, None, of_codes,
        )
    )  # fmt: skip


def planes_of(alpha: Tensor) -> int:
    """q of alpha `[G, q, N]`."""
    if not isinstance(alpha, Tensor) or alpha.dim() != 3:
        got = f"shape {list(alpha.shape)}" if isinstance(alpha, Tensor) else type(alpha).__name__
        raise ValueError(f"alpha: expected [G, q, N], got {got}")
    return alpha.shape[1]


def _call(call: LowbitCall) -> Tensor:
    check_call(call)
    result: Tensor = run("lowbit_linear", "lowbit_linear", call, lowbit_linear)
    return result


def check_call(call: LowbitCall) -> None:
    """What `_C` cannot say as clearly."""
    for name, value in (("bits", call.bits), ("group", call.group)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name}: expected int{' or None' * (name == 'group')}, got {type(value).__name__}")
    if type(call.gated) is not bool:
        raise TypeError(f"gated: expected bool, got {type(call.gated).__name__}")
    activation_named(call.activation)
    if (call.x_scale is not None) != (call.x.dtype == torch.int8):
        got = "None" if call.x_scale is None else "one"
        raise ValueError(f"x_scale: expected one for int8 x and None for others, got {got} for {call.x.dtype}")
    rows.check_norm(call.norm, call.norm_weight, call.norm_bias)
    offset, alpha = call.offset, call.scale
    if offset is not None and offset.shape != (alpha.shape[0], alpha.shape[2]):
        raise ValueError(f"offset: expected shape {[alpha.shape[0], alpha.shape[2]]}, got {list(offset.shape)}")


def lowbit_linear(call: LowbitCall) -> Tensor:
    """By a kernel, or by the engine "dequantized"."""
    y = _C.lowbit_linear(call)
    if y is not None:
        return y
    if not call.gated:
        return dequantized_linear(call)
    y = lowbit_linear(call._replace(gated=False, activation=None, out_scale=None))
    constants = call.constant_weight and call.out_scale is None  # which nothing is promised about
    return rows.gated(y, call.activation, call.out_scale, constants=constants)


IMPLEMENTATIONS: dict[str, Callable[[Any], Tensor]] = {"lowbit_linear": lowbit_linear}
