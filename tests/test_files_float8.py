"""FP8 weights beside activations in floating point: compressed-tensors' files of every strategy, and bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import octofuse
from checkpoints import with_bias, write_folder
from octofuse.nn import CodebookLinear, linear_layers
from octofuse.quant.codebook import E4M3
from test_files import check, model_of, needs_theirs

STRATEGIES = ("tensor", "channel", "group", "block")
LAYER = "model.layers.0.mlp.up_proj"
WIDE = {"hidden_size": 192, "intermediate_size": 320}  # blocks that are not whole
GROUP = 64


def spread(scale: Tensor, strategy: str, n: int, k: int) -> Tensor:
    """The scale of every weight."""
    if strategy == "block":
        scale = scale.repeat_interleave(128, 0)[:n]
    columns = {"group": GROUP, "block": 128}.get(strategy, k)
    return scale.view(-1, scale.shape[-1]).repeat_interleave(columns, 1)[:, :k].expand(n, k)


def float8_weights(
    model: Any, strategy: str, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """Random codes, all but NaN among them, and scales; a quantization_config; the weights that they stand for."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(torch.float8_e4m3fn)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, layer in linear_layers(model).items():
        n, k = layer.weight.shape
        shape = {"tensor": (1,), "channel": (n, 1), "group": (n, k // GROUP), "block": (-(-n // 128), -(-k // 128))}
        w = codes.view(torch.int8)[torch.randint(0, 254, (n, k), generator=g)].view(torch.float8_e4m3fn)
        scale = (torch.rand(shape[strategy], generator=g) + 0.5).div(4096).to(model.dtype)
        tensors |= {f"{name}.weight": w, f"{name}.weight_scale": scale} | with_bias(name, layer)
        weights[name] = (w.float() * spread(scale.float(), strategy, n, k)).to(model.dtype)
    of_weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    of_weights |= {"group": {"group_size": GROUP}, "block": {"block_structure": [128, 128]}}.get(strategy, {})
    group = {"targets": ["Linear"], "weights": of_weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    return tensors, config, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_have_the_same_bits(strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = model_of("llama", dtype, **WIDE)
    tensors, config, weights = float8_weights(source, strategy)
    model = check(write_folder(source, tmp_path / "a", tensors, config), source, weights)
    layer = model.get_submodule(LAYER)
    assert isinstance(layer, CodebookLinear)
    assert layer.scheme.code == E4M3
    assert layer.scheme.group == {"group": GROUP, "block": 128}.get(strategy)
    octofuse.save_pretrained(model, tmp_path / "b")
    again = octofuse.from_pretrained(tmp_path / "b")
    tokens = torch.arange(1, 9).view(1, -1)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@needs_theirs
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_stock_transformers_reads_the_same_weights(strategy: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = model_of("llama", torch.bfloat16, **WIDE)
    tensors, config, weights = float8_weights(source, strategy)
    folder = write_folder(source, tmp_path / "model", tensors, config)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stock(torch.tensor([[1, 2, 3]]))  # decompresses
    for name, weight in weights.items():
        assert torch.equal(stock.get_submodule(name).weight, weight), name


def test_a_group_as_wide_as_the_row(tmp_path: Path) -> None:
    source = model_of("llama", hidden_size=64, intermediate_size=64)
    tensors, config, weights = float8_weights(source, "group")
    model = check(write_folder(source, tmp_path, tensors, config), source, weights)
    assert model.get_submodule(LAYER).scheme.group is None


def test_what_is_not_served(tmp_path: Path) -> None:
    source = model_of("llama", **WIDE)
    for i, (strategy, change, message) in enumerate(
        (
            ("group", {"group_size": 0}, r"config_groups\.group_0\.weights\.group_size: expected at least 1, got 0"),
            ("group", {"group_size": 100}, r"group_size: expected one that divides K = \d+, got 100"),
            (
                "block",
                {"block_structure": [64, 64]},
                r"weights\.block_structure: expected \[128, 128\], got \[64, 64\]",
            ),
            ("channel", {"strategy": "token"}, r"weights\.strategy: expected 'channel' or .*, got 'token'"),
            ("channel", {"num_bits": 4}, r"weights\.num_bits: expected 8, got 4"),
            ("channel", {"symmetric": False}, r"weights\.symmetric: expected True, got False"),
            ("group", {"actorder": "group"}, r"weights\.actorder: expected"),
        )
    ):
        tensors, config, _ = float8_weights(source, strategy)
        config["config_groups"]["group_0"]["weights"] |= change
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(write_folder(source, tmp_path / str(i), tensors, config))


def test_values_that_are_not_served(tmp_path: Path) -> None:
    source = model_of("llama", **WIDE)
    tensors, config, _ = float8_weights(source, "channel")

    def refuses(key: str, changed: Tensor, message: str) -> None:
        folder = write_folder(source, tmp_path / message[:9], tensors | {f"{LAYER}.{key}": changed}, config)
        with pytest.raises(ValueError, match=rf"up_proj\.{message}"):
            octofuse.from_pretrained(folder)

    weight = tensors[f"{LAYER}.weight"].view(torch.uint8).clone()
    weight[5, 7] = 0xFF
    refuses("weight", weight.view(torch.float8_e4m3fn), "weight: expected numbers, got NaN")
    refuses("weight", weight, r"weight: expected torch\.float8_e4m3fn, got torch\.uint8")
    scale = tensors[f"{LAYER}.weight_scale"]
    refuses("weight_scale", scale.float() * torch.inf, "weight_scale: expected finite scales")
    refuses("weight_scale", scale[1:], r"weight_scale: expected shape")
    refuses("weight_scale", torch.full_like(scale, 256), "scales: expected less than 256 beside e4m3, got 256")
