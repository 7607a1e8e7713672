"""Delayed scaling: FP8 layers whose activation scale comes from the largest values of earlier calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octofuse.nn.linear import Float8Linear
from octofuse.nn.norm import Norm, in_floating_point
from octofuse.nn.parted import Parted
from octofuse.ops import quantized_linear
from octofuse.ops.activations import Activation
from octofuse.quant.affine import Scheme

_LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)


class DelayedFloat8Linear(Float8Linear):
    """e4m3 operands; x is quantised by the largest magnitude of the last `window` calls, times 2^margin.

    The first call takes its own. What is larger than any call before saturates, once: then it is in the history. Values
    that are no numbers do not enter it. So the bits of a call depend on the calls before. Nothing waits for the host, and
    in a captured graph the history goes on.

    A buffer besides: amax_history fp32 `[window]`, the newest first, 0 where there was no call yet.
    """

    amax_history: Tensor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        history = torch.zeros(self.scheme.window, dtype=torch.float32, device=options.get("device"))
        self.register_buffer("amax_history", history)

    @classmethod
    def default_scheme(cls) -> Scheme:
        """fp8-delayed."""
        return Scheme(activations="history", values="float8")

    def next_scale(self, x: Tensor) -> Tensor:
        """fp32 `[]`, for x, whose largest magnitude then enters the history."""
        now = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        now = torch.where(torch.isfinite(now), now, torch.zeros_like(now))
        past = self.amax_history.amax()
        reach = torch.where(past > 0, past, now) * 2.0**self.scheme.margin
        self.amax_history.copy_(torch.cat([now.reshape(1), self.amax_history[:-1]]))
        return torch.where(reach > 0, reach / _LARGEST, torch.ones_like(reach))

    def product(self, x: Tensor) -> Tensor:
        if self.engine != "auto":
            raise ValueError(f"engine: expected 'auto' for delayed scaling, got {self.engine!r}")
        return self.fused(x.contiguous(), activation=self.activation)

    def fused(
        self,
        x: Tensor | Parted,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """As `Float8Linear.fused`; norm and gate are ops of their own."""
        x = in_floating_point(x, norm, gate)
        out_dtype = x.dtype if out_scale is None else self.values
        return quantized_linear(
            x, self.weight, self.weight_scale, self.bias, x_scale=self.next_scale(x), activation=activation,
            residual=residual, out_dtype=out_dtype, out_scale=out_scale, constant_weight=True,
            fast_accumulate=self.fast_accumulate,
        )  # fmt: skip

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.amax_history.dtype != torch.float32:
            self.amax_history = before.to(self.amax_history.device)
        return self
