"""Checkpoints of other libraries with something wrong: each is one error that names the file, the tensor or the setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import octofuse
from checkpoints import Gptq, compressed, write_folder
from test_files import COMPRESSED, model_of, needs_theirs

LAYER = "model.layers.1.mlp.up_proj"


def edited(tensors: dict[str, Tensor], own: str, change: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    """With one tensor changed, or taken out."""
    name = f"{LAYER}.{own}"
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    return others if change is None else others | {name: change(tensors[name])}


def put(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


GPTQ_MISTAKES: list[tuple[str, Callable[[Tensor], Tensor] | None, str]] = [
    ("qweight", lambda t: t[:-1], r"qweight: expected shape \[8, 128\], got \[7, 128\]"),
    ("qweight", lambda t: t.float(), r"qweight: expected torch\.int32, got torch\.float32"),
    ("qzeros", None, r"qzeros: missing"),
    ("scales", lambda t: put(t, float("nan")), r"scales: expected finite scales of at least 0"),
    ("scales", lambda t: put(t, float("inf")), r"scales: expected finite scales of at least 0"),
    ("scales", lambda t: put(t, -1.0), r"scales: expected finite scales of at least 0"),
    ("g_idx", lambda t: put(t, 1), r"g_idx: expected 32 columns of each of 2 groups, got another division"),
    ("g_idx", lambda t: put(t, 7), r"g_idx: expected 32 columns of each of 2 groups, got another division"),
]


@pytest.mark.parametrize(("own", "change", "message"), GPTQ_MISTAKES)
def test_wrong_tensors_are_named(own: str, change: Any, message: str, tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    folder = write_folder(source, tmp_path / "model", edited(written.tensors, own, change), written.config)
    with pytest.raises(ValueError, match=rf"model\.safetensors: {LAYER}\.{message}"):
        octofuse.from_pretrained(folder)


def test_tensors_beside_the_layers_are_named(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    more = written.tensors | {f"{LAYER}.extra": torch.zeros(2)}
    with pytest.raises(ValueError, match=rf"{LAYER}\.extra: not a tensor of this kind of layer"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "a", more, written.config))
    folder = write_folder(source, tmp_path / "b", written.tensors, written.config)
    path = folder / "model.safetensors"
    whole = load_file(path)
    for change, message in (
        ({"strange.weight": torch.zeros(2)}, "strange.weight: unexpected"),
        ({"model.norm.weight": None}, "model.norm.weight: missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight: expected shape \[64\], got \[3\]"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, r"model\.norm\.weight: expected torch\.float32"),
    ):
        changed = {name: tensor for name, tensor in (whole | change).items() if tensor is not None}
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "quantization_config \\(gptq\\): bits: expected one of 2, 3, 4, 8, got 5"),
        ({"group_size": 48}, r"down_proj\.qzeros: expected shape \[3, 8\], got \[4, 8\]"),
        ({"group_size": 16}, r"qzeros: expected shape \[4, 8\], got \[2, 8\]"),
        ({"group_size": "many"}, r"group_size: expected -1 or at least 1, got 'many'"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format: expected one of gptq, gptq_v2, got 'marlin'"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, r"qweight: expected shape \[16, 64\], got \[8, 64\]"),
    ],
)
def test_settings_that_are_not_served(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    with pytest.raises(ValueError, match=message):
        octofuse.from_pretrained(write_folder(source, tmp_path / "a", written.tensors, written.config | change))


@needs_theirs
def test_compressed_settings_and_values_that_are_not_served(tmp_path: Path) -> None:
    source = model_of("llama")
    tensors, config, _ = compressed(source, **COMPRESSED["w4a16"])
    for i, (change, message) in enumerate(
        (
            ({"transform_config": {"config_groups": {}, "x": 1}}, "transform_config: expected none"),
            ({"config_groups": {}}, "config_groups: expected at least one group"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(write_folder(source, tmp_path / f"a{i}", tensors, config | change))
    group = config["config_groups"]["group_0"]
    for i, (change, message) in enumerate(
        (
            ({"type": "float"}, r"config_groups\.group_0\.format: expected 'float-quantized' or 'naive-quantized'"),
            ({"type": "fp"}, r"config_groups\.group_0\.weights\.type: expected 'int' or 'float', got 'fp'"),
            ({"num_bits": 16}, r"weights\.num_bits: expected 2 or .*, got 16"),
            ({"strategy": "block"}, r"weights\.strategy: expected 'group' or 'channel', got 'block'"),
        )
    ):
        changed = {"group_0": group | {"weights": group["weights"] | change}}
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(
                write_folder(source, tmp_path / f"b{i}", tensors, config | {"config_groups": changed})
            )
    lies = edited(tensors, "weight_shape", lambda t: t.flip(0))
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight_shape: expected \[128, 64\], got \[64, 128\]"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "c", lies, config))
    some = config | {"ignore": ["lm_head", "re:.*up_proj"]}
    kept = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    model = octofuse.from_pretrained(write_folder(source, tmp_path / "d", kept, some))
    assert type(model.get_submodule(LAYER)) is nn.Linear
    with pytest.raises(ValueError, match=r"up_proj\.weight_scale: missing"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "e", kept, config))


def test_names_that_are_no_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model: .*/none: no such folder"):
        octofuse.from_pretrained(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="model: expected a folder or a hub name, got the file"):
        octofuse.from_pretrained(tmp_path / "file")
    with pytest.raises(ValueError, match="device_map: expected device in its place, got 'auto'"):
        octofuse.from_pretrained(tmp_path, device_map="auto")


def test_broken_files(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for broken in (data[:-7], data[:1000], b"", data[:8] + b"x" + data[9:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
            octofuse.from_pretrained(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(
        FileNotFoundError, match=r"pytorch_model\.bin is a pickle, which could run code and is not read"
    ):
        octofuse.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        octofuse.from_pretrained(folder)
