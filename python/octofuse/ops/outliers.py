"""LLM.int8(): a linear in int8 but for the columns of x that hold an outlier, which are multiplied in floating point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import Scale
from octofuse.ops._guard import as_tensor, goes_direct, refuse_gradients
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
    multiplied as they are, by w * w_scale, with sums in fp32; a token's scale is that of its values below the threshold,
    and the rest of x goes to int8. Without an outlier the bits are those of `quantize_per_token` and `i8f16_linear`.
    Unlike theirs, with outliers a token's bits depend on which columns the call's other tokens add. With this
    library's kernels (see below) nothing waits for the host, whatever the number of columns, so calls can be captured in a
    graph; many columns take longer.

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
    _check_residual(residual, x, w)
    refuse_gradients("llm_int8_linear", x=x, w=w, w_scale=w_scale)
    if goes_direct(x, w, w_scale, bias, residual):
        q, scales, product = _outlier_product(x, w, w_scale, threshold)
    else:
        scale = as_tensor("w_scale", w_scale, x)
        q, scales, product = torch.ops.octofuse.outlier_product(x, w, scale, float(threshold))
    y = i8f16_linear(
        q, w, scales, w_scale, bias, residual=product, out_dtype=x.dtype, constant_weight=constant_weight
    )  # fmt: skip
    if activation is not None:
        y = activate(y, activation)
    return y if residual is None else (y + residual).to(y.dtype)


def _check_residual(residual: Tensor | None, x: Tensor, w: Tensor) -> None:
    if residual is None or not isinstance(x, Tensor) or not isinstance(w, Tensor):
        return
    if not isinstance(residual, Tensor) or residual.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        got = residual.dtype if isinstance(residual, Tensor) else type(residual).__name__
        raise TypeError(f"residual: expected a tensor of float16, bfloat16 or float32, got {got}")
    want = [*x.shape[:-1], w.shape[0]] if w.dim() > 0 else []
    if list(residual.shape) != want:
        raise ValueError(f"residual: expected shape {want}, got {list(residual.shape)}")


def _outlier_product(x: Tensor, w: Tensor, w_scale: Scale, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """x without its outliers in int8 `[..., K]`, its scales fp32 `[M, 1]`, and the outliers' part `[..., N]`."""
    found = _C.outlier_product(x, w, w_scale, threshold)
    return _composed(x, w, w_scale, threshold) if found is None else found


def _composed(x: Tensor, w: Tensor, w_scale: Scale, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    outliers = x.abs() >= threshold
    q, scales = _per_token(x.masked_fill(outliers, 0.0))
    columns = outliers.reshape(-1, x.shape[-1]).any(0).nonzero().reshape(-1)
    q[..., columns] = 0
    with torch.autocast(x.device.type, enabled=False):  # sums stay in fp32
        product = x[..., columns].float() @ w[:, columns].float().t()
    scale = w_scale.reshape(-1) if isinstance(w_scale, Tensor) else w_scale
    return q, scales, (product * scale).to(x.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"outlier_product": _outlier_product}
