"""A quantised model as files, which transformers writes: what it is to write, in which format."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octofuse.files import compressed_tensors_writing, own, tensor_parallel
from octofuse.nn import PARALLEL, QUANTISED

AUTO = "auto"
_WRITTEN: dict[str, Any] = {"compressed-tensors": compressed_tensors_writing, "octofuse": own}
FORMATS_WRITTEN = (AUTO, *_WRITTEN)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    format: str = AUTO,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a quantised transformers model (and its tokenizer) to a new folder, whole or not at all.

    transformers' own `model.save_pretrained` and `push_to_hub` write the same files, with `format="auto"`.

    Args:
        model: one that `quantize_` has changed, or that was read quantised, or quantised on load. One that
            `octofuse.parallel.shard_` has split is written by its first rank, which needs room for the whole in the host's
            memory; all ranks call this, and the others wait for it as long as their process group's timeout lets them.
        folder: new, or empty.
        format: "compressed-tensors": int8 and FP8 layers, dynamic or static, and weights of 2 to 8 bits, with zero
            points or without ("w4a16-g128", "w4a16-g128-zp", "w8a16"), or in FP8 ("w8a16-fp8"), of nn.Linear, not
            GPT-2's Conv1D; transformers and `octofuse.from_pretrained` read it. "octofuse": every scheme, for octofuse
            alone. "auto": the first where it can say all layers, else the other.
        max_shard_size: bytes of a file, or "5GB".

    Raises:
        FileExistsError: if the folder exists and is not empty.
        TypeError: for what is no transformers model.
        ValueError: for a model without quantised layers, or a layer that the format has no words for, by its name.
        RuntimeError: on the other ranks of a model that its first one could not write.
    """
    if format not in FORMATS_WRITTEN:
        raise ValueError(f"format: expected one of {', '.join(FORMATS_WRITTEN)}, got {format!r}")
    if not is_of_transformers(model):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("model: expected one without adapters, which model.save_pretrained writes alone")
    if any(isinstance(module, PARALLEL) for module in model.modules()):
        assert tensor_parallel.saved is not None
        tensor_parallel.saved(model, lambda: _write(model, folder, tokenizer, format, max_shard_size))
    else:
        _write(model, folder, tokenizer, format, max_shard_size)


def _write(model: nn.Module, folder: str | Path, tokenizer: Any, format: str, max_shard_size: int | str) -> None:
    format_of(quantised_layers(model), format)
    attach(model)
    from octofuse.files.quantizer import written_as

    with written_as(model, format), _on_this_rank(model), new_folder(folder) as partial:
        model.save_pretrained(partial, max_shard_size=max_shard_size)  # type: ignore[operator]
        if not any(partial.glob("*.safetensors")):
            raise RuntimeError(f"folder: expected transformers to write {folder}, which it did not")
        for path in partial.glob("*.safetensors"):  # which nobody but their owner could read
            shutil.copymode(partial / "config.json", path)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


@contextlib.contextmanager
def _on_this_rank(model: Any) -> Iterator[None]:
    """transformers writes on the first of all processes alone, nothing elsewhere; who writes here was decided before."""
    model.should_save_on_this_rank = lambda *_: True
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def is_of_transformers(model: nn.Module) -> bool:
    """Without importing it."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def attach(model: nn.Module) -> None:
    """Let the own `save_pretrained` and `push_to_hub` of every transformers model in it write quantised layers."""
    from octofuse.files import quantizer

    quantizer.attach(model)


def quantised_layers(model: nn.Module) -> dict[str, Any]:
    """ValueError if there are none, or parts of them alone."""
    if any(isinstance(module, PARALLEL) for module in model.modules()):
        raise ValueError(tensor_parallel.A_PART)
    found = {name: module for name, module in model.named_modules() if isinstance(module, QUANTISED)}
    if not found:
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    return found


def format_of(layers: dict[str, Any], wanted: str) -> str:
    """The name of a format that can say all layers. ValueError, by the layer's name, if the one wanted cannot."""
    forms = [wanted] if wanted != AUTO else list(_WRITTEN)
    for form in forms:
        try:
            for name, layer in layers.items():
                _WRITTEN[form].check(name, layer)
        except ValueError:
            if form == forms[-1]:
                raise
        else:
            break
    return form


def config_of(model: nn.Module, wanted: str = AUTO) -> dict[str, Any]:
    """The quantization_config of its file."""
    layers = quantised_layers(model)
    found: dict[str, Any] = _WRITTEN[format_of(layers, wanted)].config_of(model, layers)
    return found


def tensors_of(model: nn.Module, wanted: str = AUTO) -> dict[str, Tensor]:
    """The state dict as its file has it, on the CPU."""
    layers = quantised_layers(model)
    written = _WRITTEN[format_of(layers, wanted)]
    if away := next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None):
        raise ValueError(f"{away}: expected a tensor in memory, got one that is offloaded")
    inside = {f"{name}.{key}" for name, layer in layers.items() for key in layer.state_dict() if key != "bias"}
    found = _unique_tensors({name: tensor for name, tensor in model.state_dict().items() if name not in inside})
    for name, layer in layers.items():
        own_tensors = written.tensors_of(layer).items()
        found |= {f"{name}.{key}": tensor.detach().cpu().contiguous() for key, tensor in own_tensors}
    return found


def keep_own_names(model: Any) -> None:
    """transformers would merge the weights of some families' linears again, as their files have them, and leave the
    scales: quantised ones are written as the model has them, which it reads as well."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    tensors = [f"{name}.{own}" for name in quantised_layers(model) for own in ("weight", "bias")]
    known = getattr(model, "_weight_conversions", None)
    if known is None:
        known = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    merging = [
        entry
        for entry in known
        if isinstance(entry, WeightConverter)
        and any(tensor.endswith(end.lstrip("^.").rstrip("$")) for end in entry.target_patterns for tensor in tensors)
    ]
    if merging:
        model._weight_conversions = [entry for entry in known if entry not in merging]


def _unique_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied ones once, under their first name."""
    seen: set[int] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen and tensor.numel() > 0:
            continue
        seen.add(tensor.data_ptr())
        unique[name] = tensor.detach().cpu().contiguous()
    return unique


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
