"""All blocks of an int8 GPT-2 for one token of one sequence, in one kernel (cpp/src/kernels/decode_blocks.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octofuse import _C

if TYPE_CHECKING:
    from octofuse.models.decoder import Block, NormParts


@dataclass
class OneToken:
    """What the kernel reads of a model. Weights are the model's own; scales, biases and norms, which are small, are copied
    into one tensor each, layer behind layer.
    """

    linears: list[list[Any]]  # of each block, its four layers: they keep the weights alive
    weights: Tensor  # int64 [L, 4]: their addresses
    vectors: Tensor  # fp32 [L, ...]: of each linear its scales [N] and biases [N]
    scales: Tensor  # fp32 [L, 4]: static scales of inputs, or 0
    norms: Tensor  # [2 * L + 1, 2, width]
    eps: Tensor  # fp32 [2 * L + 1]
    activation: str
    final_norm: bool  # whether the result goes through the model's last norm

    @classmethod
    def of(
        cls, blocks: Sequence[Block], norm: NormParts, heads: int, dtype: torch.dtype, final_norm: bool
    ) -> OneToken | None:
        """None where the kernel does not serve such a model or device: then a step runs as kernels of its own."""
        device, width = norm[0].device, norm[0].shape[0]
        linears = [list(block.layers) for block in blocks]
        if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width % heads != 0:
            return None
        if any(layer.int8 is None or not layer.weight.is_contiguous() for four in linears for layer in four):
            return None
        inner = linears[0][2].weight.shape[0]
        norms = [*(norm for block in blocks for norm in block.norms), norm]
        if any(part.dtype != dtype for norm in norms for part in norm[:2]):
            return None
        index = torch.cuda.current_device() if device.index is None else device.index
        if not _C.takes_blocks(len(linears), width, inner, heads, index):
            return None
        return cls(
            linears=linears,
            weights=torch.tensor([[layer.weight.data_ptr() for layer in four] for four in linears], device=device),
            vectors=torch.stack([torch.cat([part for layer in four for part in _vectors(layer)]) for four in linears]),
            scales=torch.stack([torch.stack([_scale(layer, device) for layer in four]) for four in linears]),
            norms=torch.stack([torch.stack([weight, bias]) for weight, bias, _ in norms]),
            eps=torch.tensor([eps for _, _, eps in norms], device=device),
            activation=blocks[0].activation,
            final_norm=final_norm,
        )

    def scratch(self, heads: int, capacity: int) -> tuple[Tensor, Tensor]:
        """What blocks of threads tell each other in a step; of one cache."""
        layers, width, inner = len(self.linears), self.norms.shape[2], self.linears[0][2].weight.shape[0]
        count = _C.block_messages(layers, width, inner, heads, capacity)
        device = self.norms.device
        return torch.zeros(count, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int32, device=device)

    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        tokens: Tensor,
        positions: Tensor,
        pairs: Tensor,
        scratch: tuple[Tensor, Tensor],
    ) -> Tensor:
        """ids, places [1] -> [1, width]; its keys and values go into pairs `[L, 2, 1, H, C, D]`."""
        return _C.decode_blocks(
            ids, places, tokens, positions, self.weights, self.vectors, self.scales, self.norms, self.eps, pairs, *scratch,
            self.activation, self.final_norm,
        )  # fmt: skip


def _vectors(layer: Any) -> tuple[Tensor, Tensor]:
    count = layer.weight.shape[0]
    scale = layer.int8.weight_scale.float().reshape(-1).expand(count)
    bias = scale.new_full((count,), -0.0) if layer.bias is None else layer.bias.float()  # adding -0 changes nothing
    return scale, bias


def _scale(layer: Any, device: torch.device) -> Tensor:
    return torch.zeros((), device=device) if layer.scale is None else layer.scale.float().reshape(()).to(device)
