"""LLM.int8(): a linear in int8 but for the columns of x that hold an outlier, which are multiplied with more precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import OutlierCall, Scale, run
from octofuse.ops.activations import Activation
from octofuse.ops.gemm import i8f16_linear
from octofuse.ops.quantize import _per_token
from octofuse.ops.rows import activate

THRESHOLD = 6.0  # of the paper
SMALLEST = 2.0**-126  # normal number of fp32


def llm_int8_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    threshold: float = THRESHOLD,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
) -> Tensor:
    """act(x @ (w * w_scale)^T + bias) + residual, x quantised per token but for columns with an outlier.

    A column of x belongs to the outliers if |x| >= threshold anywhere in it, in any token of the call. These columns are
    multiplied as they are, by w * w_scale, with sums in fp32 (up to 48 tokens on a GPU of compute capability 9.0: as
    integers, off by at most 2^-22 of the token's largest magnitude, with exact sums); a token's scale is that of its
    values below the threshold, and the rest of x goes to int8. Without an outlier the bits are those of
    `quantize_per_token` and `i8f16_linear`. With outliers a token's bits depend on which columns the call's other tokens
    add, and on whether there are more than 48 of them. With this library's kernels (see below) nothing waits for the
    host, whatever the number of columns, so calls can be captured in a graph; more than 80 columns take longer.

    Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022.

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K.
        w: int8 `[N, K]`, contiguous.
        w_scale: fp32 `[N]` or one element, or a float.
        bias: `[N]`. residual: `[..., N]`. Both fp16, bf16 or fp32.
        threshold: above 0.
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".
        constant_weight: as in `i8f16_linear`.

    Returns:
        `[..., N]` in x's dtype. fp16 and bf16 on a GPU run kernels of this library; all else is composed of torch's.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Examples:
        >>> x = torch.tensor([[1.0, 2.0, 60.0]])  # 60 is multiplied in fp32, and 2 makes the scale
        >>> octofuse.llm_int8_linear(x, torch.ones(1, 3, dtype=torch.int8), 1.0)
        tensor([[63.]])
    """
    if not isinstance(threshold, int | float) or isinstance(threshold, bool):
        raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
    if 0 < threshold < SMALLEST:
        raise ValueError(f"threshold: expected at least 2^-126, fp32's smallest, got {threshold}")
    call = OutlierCall(x, w, w_scale, bias, float(threshold), activation, residual, constant_weight)
    result: Tensor = run("outlier_linear", "llm_int8_linear", call, _outlier_linear)
    return result


def _outlier_linear(call: OutlierCall) -> Tensor:
    y: Tensor | None = _C.outlier_linear(call)
    return _in_steps(call) if y is None else y


def _in_steps(call: OutlierCall) -> Tensor:
    """The same where no int8 kernel adds the outliers' product."""
    x, w, w_scale = call.x, call.w, call.w_scale
    found = _C.outlier_product(x, w, w_scale, call.threshold)
    q, scales, product = _composed(x, w, w_scale, call.threshold) if found is None else found
    wide = call.activation is not None or call.residual is not None
    y = i8f16_linear(
        q, w, scales, w_scale, call.bias, residual=product, out_dtype=torch.float32 if wide else x.dtype,
        constant_weight=call.constant_weight,
    )  # fmt: skip
    if call.activation is not None:
        y = activate(y, cast(Activation, call.activation))
    if call.residual is not None:
        y = y + call.residual
    return y.to(x.dtype)


def _composed(x: Tensor, w: Tensor, w_scale: Scale, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """x without its outliers in int8 `[..., K]`, its scales fp32 `[M, 1]`, and the outliers' part `[..., N]`."""
    outliers = x.abs() >= threshold
    q, scales = _per_token(x.masked_fill(outliers, 0.0))
    columns = outliers.reshape(-1, x.shape[-1]).any(0).nonzero().reshape(-1)
    q[..., columns] = 0
    with torch.autocast(x.device.type, enabled=False):  # sums stay in fp32
        product = x[..., columns].float() @ w[:, columns].float().t()
    scale = w_scale.reshape(-1) if isinstance(w_scale, Tensor) else w_scale
    return q, scales, (product * scale).to(x.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"outlier_linear": _outlier_linear}
