"""`k_scale` and `v_scale`: one scale for all keys, and one for all values, of a block's cache in FP8.

They lie beside the block's attention, as compressed-tensors and vLLM write them; ModelOpt and older files have them beside
the linears that make keys and values. `octofuse.Generator(model, cache="fp8-static")` runs with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from octofuse.files.formats import FLOATS
from octofuse.files.headers import Header

NAMES = ("k_scale", "v_scale")
# Where else files have them: patterns in tensors' names, and what stands in their place here.
RENAMES = {
    rf"\.{linear}\.{stored}$": f".{letter}_scale"
    for letter in "kv"
    for linear, stored in ((f"{letter}_proj", f"{letter}_scale"), (f"{letter}_proj", "output_scale"),
                           ("qkv_proj", f"{letter}_scale"))
}  # fmt: skip
_TENSOR = re.compile(rf"(.+)\.({'|'.join(NAMES)})")
_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def make_room(model: nn.Module, headers: Mapping[str, Header]) -> None:
    """Gives modules that have such a scale in the file a buffer for it, which transformers then loads.

    Raises ValueError that names the file and the tensor: one of another kind or size, or without its other half.
    """
    modules = dict(model.named_modules())
    for name, header in headers.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in modules:
            continue
        if header.dtype not in FLOATS or header.shape not in ((), (1,)):
            raise ValueError(
                f"{header.file}: {name}: expected one number of {', '.join(map(str, FLOATS))}, got shape "
                f"{list(header.shape)} of {header.dtype}"
            )
        if missing := [own for own in NAMES if f"{match[1]}.{own}" not in headers]:
            raise ValueError(f"{header.file}: {match[1]}.{missing[0]}: missing beside {match[2]}")
        modules[match[1]].register_buffer(match[2], torch.ones(header.shape, dtype=torch.float32, device="meta"))


def keep(attention: nn.Module, key: float, value: float) -> None:
    """Beside a block's attention, so that they are written with the model."""
    device = next(iter(attention.parameters())).device
    for name, scale in zip(NAMES, (key, value), strict=True):
        attention.register_buffer(name, torch.tensor([scale], dtype=torch.float32, device=device))


def of(attention: nn.Module) -> tuple[float, float] | None:
    """The scales of keys and values, None without them; ValueError for ones that no cache can have."""
    found = [getattr(attention, name, None) for name in NAMES]
    if any(scale is None for scale in found):
        return None
    key, value = (float(scale) for scale in found)  # type: ignore[arg-type]
    for name, scale in zip(NAMES, (key, value), strict=True):
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name}: expected a finite number above 0, got {scale}")
    return key, value


def scheme_of(model: nn.Module) -> dict[str, Any] | None:
    """compressed-tensors' kv_cache_scheme."""
    return dict(_SCHEME) if any(of(module) is not None for module in model.modules()) else None
