"""bitsandbytes' checkpoints: their weights, bit for bit in fp32, and what is wrong with them by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import octofuse
from checkpoints import BitsAndBytes, BitsAndBytes8, write_folder
from octofuse.nn import CodebookLinear, Int8Linear, LLMInt8Linear
from test_files import model_of

NAME = "model.layers.0.mlp.down_proj.weight"


def written(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[Path, BitsAndBytes]:
    source = model_of(kind, dtype)
    found = BitsAndBytes(source, **more)
    return write_folder(source, folder, found.tensors, found.config), found


@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
def test_weights(code: str, double: bool, tmp_path: Path) -> None:
    for kind, block in (("llama", 64), ("opt", 32)):
        folder, found = written(tmp_path / kind, kind, code=code, block=block, double=double)
        model = octofuse.from_pretrained(folder)
        for name, weight in found.weights.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, CodebookLinear)
            assert layer.scheme.group == block
            assert torch.equal(layer.dequantized(), weight), name
        half = octofuse.from_pretrained(folder, dtype=torch.float16)
        for name, weight in found.weights.items():
            torch.testing.assert_close(half.get_submodule(name).dequantized().float(), weight, rtol=2.0**-9, atol=1e-7)


def test_saved_again_and_through_transformers(tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "a")
    model = octofuse.from_pretrained(folder)
    ids = torch.tensor([[1, 5, 9]])
    octofuse.save_pretrained(model, tmp_path / "b")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "b")(ids).logits, model(ids).logits)
    from transformers import AutoModelForCausalLM

    octofuse.enable()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(folder)
    finally:
        octofuse.disable()
    assert torch.equal(theirs(ids).logits, model(ids).logits)


def test_a_scale_below_zero(tmp_path: Path) -> None:
    """Quantised once more, the largest magnitude of a block of zeros may come out below 0."""
    folder, _ = written(tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{NAME}.absmax"][0] = 0  # of the table's -1
    tensors[f"{NAME}.nested_absmax"][0] = 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = octofuse.from_pretrained(folder)
    layer = model.get_submodule(NAME.removesuffix(".weight"))
    assert float(layer.scale[0, 0]) < 0
    octofuse.save_pretrained(model, tmp_path / "b")
    again = octofuse.from_pretrained(tmp_path / "b").get_submodule(NAME.removesuffix(".weight"))
    assert torch.equal(again.dequantized(), layer.dequantized())


def test_storage_in_floating_point(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`: the same bytes under another dtype."""
    folder, found = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in found.weights:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(-1).view(torch.bfloat16).unsqueeze(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, weight in found.weights.items():
        assert torch.equal(octofuse.from_pretrained(folder).get_submodule(name).dequantized(), weight)


def with_state(**changes: Any) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        key = f"{NAME}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[key].tolist()).decode()) | changes
        tensors[key] = torch.tensor([*json.dumps(state).encode()]).to(torch.uint8)

    return change


def with_tensor(part: str, tensor: Tensor | None) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        if tensor is None:
            del tensors[f"{NAME}.{part}"]
        else:
            tensors[f"{NAME}.{part}"] = tensor

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_state(blocksize=48), "blocksize: expected one that divides"),
        (with_state(blocksize="64"), "blocksize: expected one that divides"),
        (with_state(shape=[1, 2]), r"shape: expected \[.*\], got \[1, 2\]"),
        (with_state(quant_type="fp4"), "quant_type: expected 'nf4', got 'fp4'"),
        (with_state(nested_blocksize=0), r"nested_absmax: expected one value for every 0"),
        (with_state(nested_offset=None), "nested_offset: expected a number, got None"),
        (with_tensor("quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8)), "quant_state: expected JSON"),
        (with_tensor("quant_map", torch.zeros(16)), "quant_map: expected the levels of nf4, got others"),
        (with_tensor("absmax", torch.zeros(3, dtype=torch.uint8)), "absmax: expected .* values, got 3"),
        (with_tensor("nested_absmax", None), "nested_absmax, weight.nested_quant_map: expected both"),
        (with_tensor("quant_map", None), "missing"),
        (with_tensor("strange", torch.zeros(1)), "strange"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: Any, message: str, tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        octofuse.from_pretrained(folder)


@pytest.mark.parametrize("threshold", [6.0, 5.5, 0.0])
def test_eight_bits(threshold: float, tmp_path: Path) -> None:
    source = model_of("llama")
    found = BitsAndBytes8(source, threshold)
    folder = write_folder(source, tmp_path / "a", found.tensors, found.config)
    model = octofuse.from_pretrained(folder)
    for name, weight in found.weights.items():
        layer = model.get_submodule(name)
        assert type(layer) is (LLMInt8Linear if threshold else Int8Linear)
        assert layer.scheme.outliers == (threshold or None)
        assert torch.equal(layer.weight * layer.weight_scale.unsqueeze(1), weight), name
    ids = torch.tensor([[1, 5, 9]])
    octofuse.save_pretrained(model, tmp_path / "b")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "b")(ids).logits, model(ids).logits)
    assert len(octofuse.generate(model, [[1, 5, 9]], 3)[0]) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"load_in_4bit": True}, "load_in_4bit, load_in_8bit: expected exactly one of the two, got"),
        ({"llm_int8_threshold": -1}, "llm_int8_threshold: expected a number of at least 0, got -1"),
        ({"llm_int8_threshold": "6"}, "llm_int8_threshold: expected a number of at least 0, got '6'"),
    ],
)
def test_settings_of_eight_bits(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = model_of("llama")
    found = BitsAndBytes8(source)
    folder = write_folder(source, tmp_path, found.tensors, found.config | config)
    with pytest.raises(ValueError, match=message):
        octofuse.from_pretrained(folder)


def test_another_order_of_eight_bits(tmp_path: Path) -> None:
    source = model_of("llama")
    found = BitsAndBytes8(source)
    found.tensors["model.layers.0.mlp.down_proj.weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="weight_format: expected 0, rows, got 1"):
        octofuse.from_pretrained(write_folder(source, tmp_path, found.tensors, found.config))


def test_bitsandbytes_own_file(tmp_path: Path) -> None:
    """Where it is installed: what it writes, against what it dequantises."""
    functional = pytest.importorskip("bitsandbytes.functional")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model_of("llama", torch.float16).save_pretrained(tmp_path / "source")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "written")
    ours = octofuse.from_pretrained(tmp_path / "written", dtype=torch.float32)
    for name, layer in ours.named_modules():
        if isinstance(layer, CodebookLinear):
            weight = theirs.get_submodule(name).weight
            want = functional.dequantize_4bit(weight.data, weight.quant_state)
            assert torch.equal(layer.dequantized().to(want.dtype), want), name


def test_bitsandbytes_own_eight_bits(tmp_path: Path) -> None:
    """Where it is installed: its own product of an input with outliers."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model_of("llama", torch.float16).save_pretrained(tmp_path / "source")
    config = BitsAndBytesConfig(load_in_8bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config, device_map="cpu")
    theirs.save_pretrained(tmp_path / "written")
    ours = octofuse.from_pretrained(tmp_path / "written")
    name = "model.layers.0.mlp.down_proj"
    x = torch.randn(7, ours.get_submodule(name).in_features).half()
    x[:, 5] *= 40
    with torch.no_grad():
        want = theirs.get_submodule(name)(x).float()
        got = ours.get_submodule(name)(x).float()
    assert (got - want).abs().max() <= 4e-3 * want.abs().max()
