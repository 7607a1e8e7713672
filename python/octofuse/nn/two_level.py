"""A linear whose weight has 4 bits in two levels, and whose activations become int8 token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octofuse.nn.weight_only import PackedLinear
from octofuse.ops.dequantized import dequantize_lowbit
from octofuse.ops.two_level import two_level_linear
from octofuse.quant.packing import pack, row_parts
from octofuse.quant.two_level import two_level


class TwoLevelLinear(PackedLinear):
    """y = x @ w^T + bias with w = scale * group's scale * (code - group's zero).

    Buffers besides: scale `[1, N]` in the weight's dtype; group_scale int16 `[G, N]` (`ops.two_level_linear`).
    """

    scale: Tensor
    group_scale: Tensor

    def _register(self, dtype: torch.dtype, device: torch.device | str | None) -> None:
        self.register_buffer("scale", torch.ones((1, self.out_features), dtype=dtype, device=device))
        shape = (self.groups, self.out_features)
        self.register_buffer("group_scale", torch.ones(shape, dtype=torch.int16, device=device))

    def _encode(self, w: Tensor, moments: Tensor | None) -> None:
        search = self.scheme.method == "mse"
        done = [two_level(part, self.scheme.group, search=search) for part in row_parts(w)]
        self.packed = torch.cat([pack(part.codes, self.scheme.bits) for part in done])
        self.scale = torch.cat([part.scale for part in done]).t().contiguous()
        self.group_scale = torch.cat([part.group_scale for part in done]).t().contiguous()

    def dequantized(self, scales: Tensor | None = None) -> Tensor:
        scale, scheme = self.scale if scales is None else scales, self.scheme
        stored = (self.packed, scale, None, None, "two_level", scheme.bits, scheme.group)
        w = dequantize_lowbit(*stored, self.in_features, None, self.group_scale)
        return w if self.order is None else w[:, self.order.argsort()]

    def _multiply(self, x: Tensor, *, scale: Tensor | None = None, **options: Any) -> Tensor:
        of_groups = (self.scale if scale is None else scale, self.group_scale, self.bias)
        return two_level_linear(x, self.packed, *of_groups, group=self.scheme.group, **options)
