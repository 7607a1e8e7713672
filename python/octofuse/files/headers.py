"""What safetensors files say they hold, looked at before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """Of one tensor. dtype: None for one that torch has no name for."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    file: Path


def json_of(path: Path) -> dict[str, Any]:
    """ValueError that names the file where it is broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def local_folder(name: str) -> Path | None:
    """The folder of this name; None for what may be a hub name.

    Raises FileNotFoundError for what can only be a path and is not there, ValueError for a file.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model: expected a folder or a hub name, got the file {name}")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise FileNotFoundError(f"model: {name}: no such folder")
    return None


def method_of(folder: Path) -> str | None:
    """The quant_method that a folder's config.json names; None: it names none.

    Raises ValueError where that file is broken, or where the settings stand where transformers does not look: it would read
    integers as floating-point numbers.
    """
    path = folder / "config.json"
    config = json_of(path) if path.is_file() else {}
    found = config.get("quantization_config")
    if found is None and isinstance(text := config.get("text_config"), dict):
        found = text.get("quantization_config")
    if isinstance(found, dict) and "quant_method" in found:
        return str(found["quant_method"])
    for name, there in (
        ("compression_config", "compression_config" in config),
        ("quantize_config.json", (folder / "quantize_config.json").is_file()),
    ):
        if there:
            raise ValueError(
                f"{path}: expected quantization_config with quant_method; an older {name} is there: copy it in"
            )
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder.

    Raises FileNotFoundError or ValueError naming the file: none at all, one that the index names and that is missing, or a
    name that leads out of the folder.
    """
    index = folder / INDEX
    if (folder / WHOLE).is_file():  # which transformers takes, whatever an index beside it says
        read_headers([folder / WHOLE])
        return [folder / WHOLE]
    if not index.is_file():
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
        more = f"; {pickled[0].name} is a pickle, which could run code and is not read" if pickled else ""
        raise FileNotFoundError(f"{folder}: expected {WHOLE} or {INDEX}, found neither{more}")
    names = json_of(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index}: expected weight_map, an object of file names by tensor")
    files = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: expected names of safetensors files in this folder, got {name!r}")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not found; {INDEX} names it")
        files.append(folder / name)
    found = read_headers(files)
    for tensor, name in names.items():
        if tensor not in found or found[tensor].file.name != name:
            raise ValueError(f"{index}: {tensor}: not in {name}")
    return files


def read_headers(files: Iterable[Path]) -> dict[str, Header]:
    """Of every tensor. ValueError that names a file which is no whole safetensors file, or a tensor that is in two."""
    found: dict[str, Header] = {}
    for path in files:
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: expected a safetensors file; others may run code as they are read")
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    if name in found:
                        raise ValueError(f"{path}: {name}: also in {found[name].file.name}")
                    stored = file.get_slice(name)
                    found[name] = Header(_DTYPES.get(stored.get_dtype()), tuple(stored.get_shape()), path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    return found
