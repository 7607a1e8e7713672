"""GPTQ: codes of 2, 3, 4 or 8 bits packed along K, a zero point for each group, and with activation order (desc_act) the
group of each column.

Version 1 ("gptq") stores zero points minus one, version 2 ("gptq_v2") as they are. Columns of a group that lie apart are
sorted here, and the layer gathers its input in that order.
"""

from __future__ import annotations

import re
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
    order_of,
    weight_only_layer,
)
from octofuse.files.patterns import compiled
from octofuse.files.words import unpack_words, words_of

BITS = (2, 3, 4, 8)
_ALL = ", ".join(map(str, BITS))


@dataclass(frozen=True)
class _Gptq(Stored):
    bits: int
    group: int | None
    first_version: bool

    def wants(self, n: int, k: int) -> dict[str, Want]:
        groups = 1 if self.group is None else -(-k // self.group)
        return {
            "qweight": Want((torch.int32,), ((words_of(k, self.bits), n),)),
            "qzeros": Want((torch.int32,), ((groups, words_of(n, self.bits)),)),
            "scales": Want(FLOATS, ((groups, n),)),
            "g_idx": Want((torch.int32, torch.int64), ((k,),), optional=True),
        }

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        codes = unpack_words(tensors["qweight"].t().contiguous(), self.bits, k)
        zeros = self._zeros_of(tensors["qzeros"], n).t().to(torch.int16)
        scales = checked_scales("scales", tensors["scales"]).t()
        order = None
        if (groups := tensors.get("g_idx")) is not None:
            order = order_of(groups, k if self.group is None else self.group)
            codes = codes if order is None else codes[:, order]
        return weight_only_layer(codes, scales, zeros, self.bits, self.group, dtype, order)

    def _zeros_of(self, words: Tensor, n: int) -> Tensor:
        """Codes `[G, N]`. Version 1 is what is left when 1 is taken from every code of a word at once: a 0 borrows."""
        if not self.first_version:
            return unpack_words(words, self.bits, n)
        if self.bits == 3:  # codes cross words: each was stored by itself, and 0 as 7
            return unpack_words(words, self.bits, n) + 1 & 7
        return unpack_words(words + sum(1 << shift for shift in range(0, 32, self.bits)), self.bits, n)


class Gptq(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        for name, got, allowed in (
            ("checkpoint_format", form, ("gptq", "gptq_v2")),
            ("bits", config.get("bits"), BITS),
        ):
            if not is_one_of(got, allowed):
                raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {got!r}")
        self.settings = (config["bits"], group_size(config.get("group_size", 128)), form == "gptq")
        self.kind = _Gptq(*self.settings)
        self.others = self._others(config.get("dynamic") or {})

    def _others(self, dynamic: Any) -> list[tuple[re.Pattern[str], Stored | None]]:
        """By expressions for the beginning of a layer's name, of which the first counts; behind "-:" none."""
        if not isinstance(dynamic, Mapping):
            raise ValueError(f"dynamic: expected an object, got {dynamic!r}")
        found: list[tuple[re.Pattern[str], Stored | None]] = []
        for key, own in dynamic.items():
            pattern = compiled("dynamic", key.removeprefix("-:").removeprefix("+:"))
            if key.startswith("-:"):
                found.append((pattern, None))
                continue
            if not isinstance(own, Mapping):
                raise ValueError(f"dynamic: {key}: expected an object, got {own!r}")
            bits, group, first = self.settings
            if not is_one_of(own.get("bits", bits), BITS):
                raise ValueError(f"dynamic: {key}: bits: expected one of {_ALL}, got {own['bits']!r}")
            group = group_size(own["group_size"]) if "group_size" in own else group
            found.append((pattern, _Gptq(own.get("bits", bits), group, first)))
        return found

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        if "qweight" not in tensors:
            return None
        for pattern, kind in self.others:
            if any(pattern.match(name) for name in names):
                return kind
        return self.kind
