"""What compressed-tensors says of a quantised model: settings and tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.files import cache_scales
from octofuse.files.compressed_tensors import FLOAT8, PACKED, UNPACKED
from octofuse.files.words import pack_words
from octofuse.nn import EightBitLinear
from octofuse.quant import AnyScheme, Scheme
from octofuse.quant.affine import BLOCK
from octofuse.quant.codebook import E4M3
from octofuse.quant.packing import unpack

_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def check_scheme(name: str, scheme: AnyScheme) -> None:
    """ValueError for one that the format has no words for; name: what has it."""
    if isinstance(scheme, Scheme):
        if scheme.outliers is not None or scheme.activations == "history":
            raise ValueError(f"{name}: expected a scheme that compressed-tensors knows, got {scheme.name}")
        return
    is_grid = scheme.code == "grid" and scheme.bits > 1
    if (not is_grid or scheme.half_zero) and scheme.code != E4M3:
        hint = "; its zero lies between two codes" if is_grid else ""
        raise ValueError(f"{name}: expected a scheme that compressed-tensors knows, got {scheme.name}{hint}")


def check(name: str, layer: Any) -> None:
    """ValueError for a layer that it has no words for."""
    if layer.is_conv1d:
        raise ValueError(f"{name}: expected nn.Linear, got Conv1D; format='octofuse' takes it")
    check_scheme(name, layer.scheme)
    if isinstance(layer, EightBitLinear):
        if layer.activation is not None:
            raise ValueError(f"{name}: expected a layer without an activation of its own, got {layer.activation!r}")
        return
    if layer.order is not None:
        raise ValueError(f"{name}: expected columns in their own order, got activation order")
    if layer.scheme.zero_points and int(layer.zero.max()) >= 1 << layer.scheme.bits:
        raise ValueError(f"{name}: expected zero points of {layer.scheme.bits} bits, got {int(layer.zero.max())}")
    group = layer.scheme.group
    if group is not None and layer.in_features % group != 0:
        raise ValueError(f"{name}: expected groups of {group} that divide K, got K = {layer.in_features}")


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Bias apart."""
    if isinstance(layer, EightBitLinear):
        scale = layer.weight_scale.view(-1, 1) if layer.scheme.weights == "channel" else layer.weight_scale
        found = {"weight": layer.weight.detach(), "weight_scale": scale}
        return found if layer.input_scale is None else found | {"input_scale": layer.input_scale.view(1)}
    n, k, bits = layer.out_features, layer.in_features, layer.scheme.bits
    codes = unpack(layer.packed.detach(), bits, n, k)
    if layer.scheme.code == E4M3:
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": layer.scale.t()}
    found = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": layer.scale.t(),
        "weight_shape": torch.tensor([n, k]),
    }
    return found if layer.zero is None else found | {"weight_zero_point": pack_words(layer.zero, bits).t()}


def _group_of(layer: Any) -> dict[str, Any]:
    """The settings of a layer, targets apart."""
    if isinstance(layer, EightBitLinear):
        own: Scheme = layer.scheme
        is_float8 = own.values == "float8"
        kind = _INT8 | {"type": "float"} if is_float8 else _INT8
        weights: dict[str, Any] = {"strategy": own.weights}
        activations: dict[str, Any] = {"strategy": own.activations}
        if own.weights == "block":
            weights |= {"block_structure": [BLOCK, BLOCK]}
            activations = {"strategy": "group", "group_size": BLOCK}
        return {"weights": kind | weights | {"dynamic": False},
                "input_activations": kind | activations | {"dynamic": not own.is_static},
                "output_activations": None, "format": FLOAT8[0] if is_float8 else UNPACKED[0]}  # fmt: skip
    scheme = layer.scheme
    is_float8 = scheme.code == E4M3
    form, code = (FLOAT8[0], "float") if is_float8 else (PACKED, "int")
    weights = {"num_bits": scheme.bits, "type": code, "symmetric": not scheme.zero_points, "dynamic": False,
               "strategy": "channel" if scheme.group is None else "group", "group_size": scheme.group}  # fmt: skip
    tokens = _INT8 | {"strategy": "token", "dynamic": True} if scheme.has_int8_tokens else None
    return {"weights": weights, "input_activations": tokens, "output_activations": None, "format": form}


def config_of(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Most layers' settings are those of every linear; others are named."""
    settings = {name: json.dumps(_group_of(layer), sort_keys=True) for name, layer in layers.items()}
    by_count = [text for text, _ in Counter(settings.values()).most_common()]
    groups = {}
    for i, text in enumerate(by_count):
        names = sorted(name for name in layers if settings[name] == text)
        groups[f"group_{i}"] = {"targets": ["Linear"] if i == 0 else names, **json.loads(text)}
    forms = {group["format"] for group in groups.values()}
    floats = sorted(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": floats,
        "kv_cache_scheme": cache_scales.scheme_of(model),
    }
