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


def make_room(model: nn.Module, headers: Mapping[str, Header], prefix: str) -> None:
    """Gives modules of which the file has both scales, one number each, buffers for them, which transformers then loads.

    prefix: of names, which a file may lack. Other scales, of each head for example, are left out.
    """
    modules = dict(model.named_modules())
    found: dict[str, set[str]] = {}
    for name, header in headers.items():
        match = _TENSOR.fullmatch(name)
        if match is not None and header.dtype in FLOATS and header.shape in ((), (1,)):
            found.setdefault(match[1], set()).add(match[2])
    for owner, names in found.items():
        spelled = next((one for one in (owner, prefix + owner, owner.removeprefix(prefix)) if one in modules), None)
        if spelled is not None and names == set(NAMES):
            for name in NAMES:
                shape = headers[f"{owner}.{name}"].shape
                modules[spelled].register_buffer(name, torch.ones(shape, dtype=torch.float32, device="meta"))


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
    """compressed-tensors' kv_cache_scheme, where every module of a kind that has scales has them."""
    having = [module for module in model.modules() if all(hasattr(module, name) for name in NAMES)]
    kinds = tuple({type(module) for module in having})
    alike = [module for module in model.modules() if isinstance(module, kinds)]
    return dict(_SCHEME) if having and len(alike) == len(having) else None
