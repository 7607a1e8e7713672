"""The commands' files, looked at before anything is loaded: each mistake is one line that names the file."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from octofuse.assets import EMBEDDED
from octofuse.files.headers import local_folder

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.h5", "*.msgpack")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "spiece*", "*.tiktoken")


def folder_of(model: str) -> str:
    """The embedded model's folder for its name; others are folders, or hub names, already."""
    return str(EMBEDDED) if model == "embedded" else model


def expect_model(model: str) -> str:
    """The folder or hub name behind what the user wrote, with every file of a folder looked into.

    Raises FileNotFoundError for what can only be a path and is not there, ValueError for a file that is broken.
    """
    name = folder_of(model)
    if (folder := local_folder(name)) is not None:
        expect_whole(folder)
        return str(folder)
    print(f"{name}: no such folder; asking the hub for a model of this name", file=sys.stderr)
    return name


def expect_whole(folder: Path) -> None:
    """ValueError or FileNotFoundError that names the first file of a model's folder which cannot be read or is missing."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'}: not found; expected a folder with a transformers model")
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from error
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise FileNotFoundError(f"{folder}: no weights (*.safetensors) beside its config.json")


def expect_tokenizer(name: str, otherwise: str = "") -> None:
    """FileNotFoundError for a folder without a tokenizer: transformers would make one up, of a single token. otherwise:
    what else the user can do."""
    folder = Path(name)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise FileNotFoundError(f"{folder}: no tokenizer files; copy the model's here{otherwise}")


def read_text(argument: str, path: Path) -> str:
    """The text of a file. Raises ValueError or OSError naming both."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument}: {path}: expected UTF-8 text: {error}") from error
    except OSError as error:
        raise type(error)(f"{argument}: {path}: {error.strerror}") from error


def expect_text(argument: str, path: Path | None) -> None:
    if path is not None:
        read_text(argument, path)


def expect_new_folder(output: Path) -> None:
    """FileExistsError or NotADirectoryError where `save` could not write."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"output: expected a new or empty folder, got {output}")
    above = next(parent for parent in output.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"output: {above} is a file, so {output} cannot be made")


def expect_picture(plot: Path | None) -> None:
    """ValueError for another kind of file, ImportError without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: expected a name that ends in .png or .svg, got {plot.name!r}")
    if plot.is_dir():
        raise IsADirectoryError(f"plot: expected a file, got the folder {plot}")
    if find_spec("matplotlib") is None:
        raise ImportError("drawing needs matplotlib: pip install 'octofuse[plots]'")
