"""AWQ, version "gemm": codes of 4 bits, eight output channels in a word in an order of their own, and a zero point for
each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.files.formats import (
    FLOATS,
    Format,
    Stored,
    Want,
    checked_scales,
    group_size,
    is_one_of,
    weight_only_layer,
)

_CHANNEL_AT = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles, the lowest first
_NIBBLE_OF = tuple(_CHANNEL_AT.index(channel) for channel in range(8))


def unpack_nibbles(words: Tensor) -> Tensor:
    """int32 `[R, N / 8]` -> codes, uint8 `[R, N]`."""
    shifts = torch.tensor([4 * nibble for nibble in _NIBBLE_OF], dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(1)


@dataclass(frozen=True)
class _Awq(Stored):
    group: int | None

    def wants(self, n: int, k: int) -> dict[str, Want]:
        if n % 8 != 0:
            raise ValueError(f"N: expected a multiple of 8, got {n}")
        if self.group is not None and k % self.group != 0:
            raise ValueError(f"group_size: expected one that divides K = {k}, got {self.group}")
        groups = 1 if self.group is None else k // self.group
        return {
            "qweight": Want((torch.int32,), ((k, n // 8),)),
            "qzeros": Want((torch.int32,), ((groups, n // 8),)),
            "scales": Want(FLOATS, ((groups, n),)),
        }

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        codes = unpack_nibbles(tensors["qweight"]).t().contiguous()
        zeros = unpack_nibbles(tensors["qzeros"]).t().to(torch.int16)
        return weight_only_layer(codes, checked_scales("scales", tensors["scales"]).t(), zeros, 4, self.group, dtype)


class Awq(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        bits = config.get("bits", config.get("w_bit", 4))
        if version != "gemm":
            raise ValueError(f"version: expected 'gemm', got {version!r}")
        if not is_one_of(bits, (4,)):
            raise ValueError(f"bits: expected 4, got {bits!r}")
        self.kind = _Awq(group_size(config.get("group_size", config.get("q_group_size", 128))))

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        return self.kind if "qweight" in tensors else None
