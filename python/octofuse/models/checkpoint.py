"""Quantised checkpoints: a folder with config.json, octofuse.safetensors and the tokenizer's files.

config.json carries `quantization_config: {"quant_method": "octofuse", "scheme": ..., "version": ...}`. The weights do not
lie in model.safetensors: transformers skips quantisation methods that it does not know and would read int8 bytes as floats.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octofuse.nn import QUANTISED, PackedLinear, empty_layer, linear_layers, replace_module
from octofuse.nn.linear import weight_of
from octofuse.quant import scheme_named
from octofuse.quant.weight_only import GROUPS

METHOD = "octofuse"
VERSION = 4  # 1, 2: low-bit codes lay in other orders; 3: w4a16 and the like had their zero between two codes
WEIGHTS = "octofuse.safetensors"


# Beside the weights, and in config.json: transformers' own from_pretrained only says that model.safetensors is missing.
_HOW_TO_LOAD = "octofuse.models.load(folder, device); the weights are in octofuse.safetensors"
_README = """# Quantised by octofuse: {scheme}

```python
from octofuse.models import load

model = load(".")  # this folder; a device as second argument
```

`octofuse generate . "a prompt"` writes text with it. The weights lie in `{weights}`, not in `model.safetensors`:
transformers' `from_pretrained` cannot read them, and says that a file is missing.
"""


def save(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a quantised transformers model (and its tokenizer) to a new folder, whole or not at all.

    Raises ValueError if the model holds no quantised layer, FileExistsError if the folder exists and is not empty.
    """
    quantization = {"quant_method": METHOD, **_schemes_of(model), "version": VERSION, "how_to_load": _HOW_TO_LOAD}
    with new_folder(folder) as partial:
        config = model.config.to_dict()  # type: ignore[operator,union-attr]
        config |= {"architectures": [type(model).__name__], "quantization_config": quantization}
        (partial / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
        (partial / "README.md").write_text(_README.format(scheme=quantization["scheme"], weights=WEIGHTS))
        save_file(unique_tensors(model), partial / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(partial / "config.json", partial / WEIGHTS)  # save_file lets nobody but its owner read it
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder beside it to write to, which gets its name when all has been written, and is gone otherwise.

    Raises FileExistsError if the folder exists and is not empty.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder: expected a new or empty folder, got {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _schemes_of(model: nn.Module) -> dict[str, Any]:
    """The scheme of most layers, and by name the layers that have another one or none (floating point)."""
    found = {name: m.scheme.name for name, m in model.named_modules() if isinstance(m, QUANTISED)}
    if not found:
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    for name, module in model.named_modules():
        group = getattr(getattr(module, "scheme", None), "group", None)
        if name in found and group not in (None, *GROUPS):
            raise ValueError(f"{name}: expected groups of {', '.join(map(str, GROUPS))} columns, or a row, got {group}")
    most = Counter(found.values()).most_common(1)[0][0]
    usual = linear_layers(model)
    others = {name: found.get(name) for name in (*usual, *found) if found.get(name) != most or name not in usual}
    return {"scheme": most, **({"layers": others} if others else {})}


def is_checkpoint(folder: str | Path) -> bool:
    """True if the folder's config.json says that octofuse wrote it. ValueError where that file is broken."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    found = json_of(path).get("quantization_config") or {}
    return bool(found.get("quant_method") == METHOD)


def json_of(path: Path) -> dict[str, Any]:
    """ValueError that names the file where it is broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def load(folder: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """Read what `save` wrote, in eval mode.

    Raises FileNotFoundError or ValueError naming the file, or every tensor that is missing, unexpected or of another
    shape or dtype.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'}: not found; expected a folder written by octofuse quantize")
    if not is_checkpoint(folder):
        raise ValueError(f"{folder / 'config.json'}: expected quant_method {METHOD!r}; this is no octofuse checkpoint")
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder / WEIGHTS}: not found; the checkpoint is incomplete")
    config = json_of(folder / "config.json")
    quantization = config.pop("quantization_config")
    if quantization.get("version") != VERSION:
        raise ValueError(f"{folder}: expected checkpoint version {VERSION}, got {quantization.get('version')}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file: {error}") from error
    model = _empty_model(config, quantization["scheme"], quantization.get("layers", {}))
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, layer in packed.items():
        if f"{name}.order" in tensors:
            layer.order = torch.empty(layer.in_features, dtype=torch.int64)
    _check_tensors(folder, model, tensors)
    # assign: the tensors become the model's own, in the dtype that the file holds.
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    return model.eval().requires_grad_(False).to(device)


def _empty_model(config: dict[str, Any], scheme: str, others: dict[str, str | None]) -> nn.Module:
    dtype = getattr(torch, str(config.get("dtype") or "float32").removeprefix("torch."))
    model = _random_model(config, dtype)
    named = {name: model.get_submodule(name) for name in others}
    for name, layer in (linear_layers(model) | named).items():
        own = others.get(name, scheme)
        if own is None:
            continue
        n, k = weight_of(layer).shape
        has_bias = getattr(layer, "bias", None) is not None
        replace_module(model, name, empty_layer(k, n, bias=has_bias, scheme=scheme_named(own), dtype=dtype))
    return model


def _random_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Of the class that was saved, where transformers has it, else of what it takes for the config's causal model."""
    import transformers

    settings = transformers.AutoConfig.for_model(**config)
    saved = getattr(transformers, (config.get("architectures") or [""])[0], None)
    model: nn.Module
    if not (isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
        return model
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # buffers that a model keeps in fp32 stay so
    try:
        model = saved(settings)
    finally:
        torch.set_default_dtype(usual)
    return model


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with tied tensors once, under their first name."""
    seen: set[int] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel() > 0:
            continue
        seen.add(tensor.data_ptr())
        unique[name] = tensor.detach().cpu().contiguous()
    return unique


def _check_tensors(folder: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = unique_tensors(model)
    problems = [f"{name}: missing" for name in expected if name not in tensors]
    problems += [f"{name}: unexpected" for name in tensors if name not in expected]
    for name, want in expected.items():
        got = tensors.get(name)
        if got is None:
            continue
        if got.shape != want.shape:
            problems.append(f"{name}: expected shape {list(want.shape)}, got {list(got.shape)}")
        elif got.dtype != want.dtype:
            problems.append(f"{name}: expected {want.dtype}, got {got.dtype}")
    if problems:
        raise ValueError(f"{folder / WEIGHTS}: " + "; ".join(problems))
