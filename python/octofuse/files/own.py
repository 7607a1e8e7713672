"""This library's own format: every scheme there is, and linears of every kind (GPT-2's Conv1D too).

A layer's tensors lie in model.safetensors as the layer has them, but for the weight, which lies flat: without octofuse,
transformers skips a method that it does not know, and would take integers of a float's shape for floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.files.formats import FLOATS, Format, Stored, Want, checked_scales
from octofuse.nn import empty_layer, linear_layers
from octofuse.nn.frozen import FrozenLinear
from octofuse.quant import AnyScheme, Scheme, codebook, scheme_named, two_level
from octofuse.quant.weight_only import GROUPS

METHOD = "octofuse"
VERSION = 5  # 1 to 4 had their weights in a file of another name


@dataclass(frozen=True)
class _Own(Stored):
    scheme: AnyScheme

    def wants(self, n: int, k: int) -> dict[str, Want]:
        layer = self._empty(n, k, torch.float32)
        found = {}
        for name, tensor in layer.state_dict().items():
            if name == layer.weight_name:
                found["weight"] = Want((tensor.dtype,), ((tensor.numel(),),))
            else:  # scales of int8 are fp32, others the model's
                floats = FLOATS if tensor.is_floating_point() and not isinstance(self.scheme, Scheme) else ()
                found[name] = Want(floats or (tensor.dtype,), (tuple(tensor.shape),))
        if not isinstance(self.scheme, Scheme):
            found["order"] = Want((torch.int32, torch.int64), ((k,),), optional=True)
        return found

    def layer(self, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> nn.Module:
        layer = self._empty(n, k, dtype)
        for name, tensor in tensors.items():
            if name == "weight":
                layer.__setattr__(layer.weight_name, tensor.view(getattr(layer, layer.weight_name).shape))
            elif name == "order":
                if not torch.equal(tensor.sort().values.cpu(), torch.arange(k)):
                    raise ValueError("order: expected every column once, got others")
                layer.order = tensor.int()
            elif tensor.is_floating_point():
                signed = name == "alpha" or getattr(self.scheme, "is_codebook", False)  # levels have signs
                values = tensor if isinstance(self.scheme, Scheme) else tensor.to(dtype)
                checked_scales(name, values.abs() if signed else values)
                if getattr(self.scheme, "code", None) == codebook.E4M3:
                    codebook.check_scales(name, values)
                setattr(layer, name, values)
            else:
                if name == "group_scale":
                    two_level.check_levels(tensor)
                setattr(layer, name, tensor)
        return layer

    def _empty(self, n: int, k: int, dtype: torch.dtype) -> FrozenLinear:
        with torch.device("meta"):
            layer = empty_layer(k, n, bias=False, scheme=self.scheme, dtype=dtype)
        assert isinstance(layer, FrozenLinear)
        return layer


class Own(Format):
    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("version") != VERSION:
            raise ValueError(f"version: expected {VERSION}, got {config.get('version')!r}; quantise the model again")
        others = config.get("layers", {})
        if not isinstance(others, Mapping):
            raise ValueError(f"layers: expected an object, got {others!r}")
        self.usual = _Own(_named(config.get("scheme")))
        self.others = {name: None if own is None else _Own(_named(own)) for name, own in others.items()}

    def stored(self, names: tuple[str, ...], module: nn.Module, tensors: frozenset[str]) -> Stored | None:
        return self.others.get(names[0], self.usual if tensors - {"weight", "bias"} else None)


def _named(name: Any) -> AnyScheme:
    if not isinstance(name, str):
        raise ValueError(f"scheme: expected a name, got {name!r}")
    return scheme_named(name)


# ---- what it writes ----


def check(name: str, layer: Any) -> None:
    """ValueError for a layer that it has no words for."""
    if getattr(layer, "activation", None) is not None:
        raise ValueError(f"{name}: expected a layer without an activation of its own, got {layer.activation!r}")
    group = getattr(layer.scheme, "group", None)
    if group not in (None, *GROUPS):
        raise ValueError(f"{name}: expected groups of {', '.join(map(str, GROUPS))} columns, or a row, got {group}")


def config_of(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, Any]:
    """The scheme of most layers, and by name the layers that have another one or none (floating point)."""
    found = {name: layer.scheme.name for name, layer in layers.items()}
    most = Counter(found.values()).most_common(1)[0][0]
    others = {name: found.get(name) for name in (*linear_layers(model), *found) if found.get(name) != most}
    return {
        "quant_method": METHOD,
        "scheme": most,
        **({"layers": others} if others else {}),
        "version": VERSION,
        "how_to_load": "octofuse.from_pretrained(folder)",
    }


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Bias apart."""
    found = {name: tensor for name, tensor in layer.state_dict().items() if name not in (layer.weight_name, "bias")}
    return {"weight": getattr(layer, layer.weight_name).detach().reshape(-1), **found}
