"""SmoothQuant (Xiao et al., 2022): outlier channels move from activations, which share one scale, into weights."""

from __future__ import annotations

import torch
from torch import Tensor

ALPHAS = tuple(i / 20 for i in range(6, 19))  # 0.30 to 0.90, what a search tries


def smoothing_scales(act_amax: Tensor, w_amax: Tensor, alpha: float = 0.5) -> Tensor:
    """s = act_amax^alpha / w_amax^(1 - alpha), one for each input channel; 1 where either amax is 0.

    Dividing the layer's input by s and multiplying the weight's columns by it leaves the product unchanged.

    Args:
        act_amax: fp32 `[K]`, max |x| of each input channel over calibration.
        w_amax: fp32 `[K]`, max |w| of each input channel over the output channels.
        alpha: 0 leaves the activations' range as it is, 1 flattens it wholly.

    Raises:
        ValueError: alpha outside [0, 1], shapes that differ, negative, NaN or infinite maxima.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha: expected a number in [0, 1], got {alpha}")
    if act_amax.dim() != 1 or act_amax.shape != w_amax.shape:
        raise ValueError(f"w_amax: expected shape {list(act_amax.shape)} like act_amax, got {list(w_amax.shape)}")
    for name, amax in (("act_amax", act_amax), ("w_amax", w_amax)):
        if not (torch.isfinite(amax).all() and (amax >= 0).all()):
            raise ValueError(f"{name}: expected finite maxima of at least 0")
    act, w = act_amax.float(), w_amax.float()
    usable = (act > 0) & (w > 0)
    scales = act.clamp(min=1e-20) ** alpha / w.clamp(min=1e-20) ** (1 - alpha)
    return torch.where(usable, scales.clamp(min=1e-5, max=1e5), torch.ones_like(scales))


def quantisation_error(x: Tensor, w: Tensor, act_amax: Tensor, scales: Tensor) -> float:
    """Mean squared error of x [M, K] @ w^T [K, N] when x / scales gets one int8 scale and w * scales one for each row."""
    x_step = ((act_amax / scales).amax() / 127).clamp(min=1e-20)
    smooth_w = w.float() * scales
    w_step = (smooth_w.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-20)
    x_rounded = (x.float() / scales / x_step).round().clamp(-127, 127) * x_step
    w_rounded = (smooth_w / w_step).round().clamp(-127, 127) * w_step
    return float((x_rounded @ w_rounded.t() - x.float() @ w.float().t()).square().mean())


def search_alpha(x: Tensor, w: Tensor, act_amax: Tensor) -> float:
    """The alpha of ALPHAS whose static quantisation loses least on x [M, K], inputs of a layer with weight w [N, K]."""
    w_amax = w.float().abs().amax(dim=0)
    errors = {a: quantisation_error(x, w, act_amax, smoothing_scales(act_amax, w_amax, a)) for a in ALPHAS}
    return min(errors, key=errors.__getitem__)
