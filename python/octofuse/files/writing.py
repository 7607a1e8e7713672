"""A quantised model as a checkpoint of compressed-tensors, for transformers and others."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from octofuse.files.compressed_tensors import PACKED, UNPACKED
from octofuse.files.headers import INDEX
from octofuse.files.words import pack_words
from octofuse.models.checkpoint import new_folder, save, unique_tensors
from octofuse.nn import QUANTISED, Int8Linear
from octofuse.nn.linear import is_conv1d
from octofuse.quant import AnyScheme, Scheme
from octofuse.quant.packing import unpack

FORMATS_WRITTEN = ("compressed-tensors", "octofuse")
_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    format: str = "compressed-tensors",
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a quantised transformers model (and its tokenizer) to a new folder, whole or not at all.

    Args:
        model: one that `quantize_` has changed, or that `octofuse.from_pretrained` has read.
        folder: new, or empty.
        format: "compressed-tensors": int8 layers, dynamic or static, and weights of 2 to 8 bits, with zero points or
            without ("w4a16-g128", "w4a16-g128-zp", "w8a16"), of nn.Linear, not GPT-2's Conv1D; transformers and
            `octofuse.from_pretrained` read it. "octofuse": every scheme, for `octofuse.from_pretrained` alone.
        max_shard_size: bytes of a file, or "5GB"; of compressed-tensors.

    Raises:
        FileExistsError: if the folder exists and is not empty.
        ValueError: for a model without quantised layers, or a layer that the format has no words for, by its name.
    """
    if format not in FORMATS_WRITTEN:
        raise ValueError(f"format: expected one of {', '.join(FORMATS_WRITTEN)}, got {format!r}")
    if format == "octofuse":
        save(model, folder, tokenizer)
        return
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, QUANTISED)}
    if not layers:
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    _refuse_conv1d(model, layers)
    written = {name: _tensors_of(name, layer) for name, layer in layers.items()}
    quantization = _config_of(model, layers)
    with new_folder(folder) as partial:
        _write_config(model, partial, quantization)
        _write_tensors(_all_tensors(model, written), partial, max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def check_scheme(name: str, scheme: AnyScheme) -> None:
    """ValueError for one that compressed-tensors has no words for; name: what has it."""
    if isinstance(scheme, Scheme):
        return
    is_grid = scheme.code == "grid" and scheme.bits > 1
    if not is_grid or scheme.half_zero:
        hint = "; its zero lies between two codes" if is_grid else ""
        raise ValueError(f"{name}: expected a scheme that compressed-tensors knows, got {scheme.name}{hint}")


def _refuse_conv1d(model: Any, layers: Mapping[str, nn.Module]) -> None:
    """What a plain model of this class has there decides how a file is read."""
    with torch.device("meta"):
        plain = type(model)(model.config)
    if found := [name for name in layers if is_conv1d(plain.get_submodule(name))]:
        raise ValueError(
            f"{found[0]}: expected nn.Linear in {type(model).__name__}, got Conv1D; format='octofuse' takes it"
        )


def _tensors_of(name: str, layer: Any) -> dict[str, Tensor]:
    """What compressed-tensors stores of a layer, bias apart."""
    if isinstance(layer, Int8Linear):
        if layer.activation is not None:
            raise ValueError(f"{name}: expected a layer without an activation of its own, got {layer.activation!r}")
        by_channel = layer.weight_scale.numel() > 1 or layer.out_features == 1
        scale = layer.weight_scale.view(-1, 1) if by_channel else layer.weight_scale
        found = {"weight": layer.weight, "weight_scale": scale}
        return found if layer.input_scale is None else found | {"input_scale": layer.input_scale.view(1)}
    scheme = layer.scheme
    check_scheme(name, scheme)
    if layer.order is not None:
        raise ValueError(f"{name}: expected columns in their own order, got activation order")
    n, k = layer.out_features, layer.in_features
    if scheme.group is not None and k % scheme.group != 0:
        raise ValueError(f"{name}: expected groups of {scheme.group} that divide K, got K = {k}")
    found = {
        "weight_packed": pack_words(unpack(layer.packed, scheme.bits, n, k), scheme.bits),
        "weight_scale": layer.scale.t(),
        "weight_shape": torch.tensor([n, k]),
    }
    return found if layer.zero is None else found | {"weight_zero_point": pack_words(layer.zero, scheme.bits).t()}


def _group_of(layer: Any) -> dict[str, Any]:
    """The settings of a layer, targets apart."""
    if isinstance(layer, Int8Linear):
        static = layer.input_scale is not None
        strategy = "channel" if layer.scheme.weights == "channel" else "tensor"
        activations = _INT8 | {"strategy": "tensor" if static else "token", "dynamic": not static}
        return {"weights": _INT8 | {"strategy": strategy, "dynamic": False}, "input_activations": activations,
                "output_activations": None, "format": UNPACKED[0]}  # fmt: skip
    scheme = layer.scheme
    weights = {"num_bits": scheme.bits, "type": "int", "symmetric": not scheme.zero_points, "dynamic": False,
               "strategy": "channel" if scheme.group is None else "group", "group_size": scheme.group}  # fmt: skip
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": PACKED}


def _config_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Any]:
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
        "kv_cache_scheme": None,
    }


def _write_config(model: Any, folder: Path, quantization: dict[str, Any]) -> None:
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)


def _all_tensors(model: nn.Module, written: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state dict with the layers' tensors as the format has them."""
    layers = {name: model.get_submodule(name) for name in written}
    own = {f"{name}.{key}" for name, layer in layers.items() for key, _ in layer.named_buffers() if key != "bias"}
    found = {name: tensor for name, tensor in unique_tensors(model).items() if name not in own}
    more = {f"{name}.{key}": tensor for name, tensors in written.items() for key, tensor in tensors.items()}
    return found | {name: tensor.detach().cpu().contiguous() for name, tensor in more.items()}


def _write_tensors(tensors: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        os.chmod(folder / file, (folder / "config.json").stat().st_mode)  # save_file lets nobody but its owner read it
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
