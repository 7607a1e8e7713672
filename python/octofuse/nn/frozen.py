"""What quantised layers have in common: tensors that never learn."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FrozenLinear(nn.Module):
    """A linear whose weight and bias are Parameters without a gradient, as what counts, shards or offloads a model's
    weights expects of them; scales and the like are buffers. A plain tensor may be assigned to either."""

    weight_name = "weight"  # the Parameter
    is_conv1d = False  # whether it stands for transformers' Conv1D

    def __setattr__(self, name: str, value: Any) -> None:
        is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and name in self.__dict__.get("_parameters", ()):
            value = nn.Parameter(value, requires_grad=False)
        super().__setattr__(name, value)

    def _register_frozen(self, name: str, tensor: Tensor | None) -> None:
        self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
