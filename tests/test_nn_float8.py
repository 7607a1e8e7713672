"""Layers and models in float8: their schemes, casts, joins, gradients and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octofuse
from checkpoints import write_folder
from helpers import DEVICES
from octofuse import reference
from octofuse.models import quantize_
from octofuse.nn import EightBitLinear, Float8Linear, Int8Linear, joined, linear_layers, quantised_layer
from octofuse.quant import Scheme, scheme_named
from octofuse.quant.affine import quantize_weight

SCHEMES = ("fp8-dynamic", "fp8-static", "fp8-block128", "fp8-dynamic-tensor", "fp8-static-tensor")
E4M3 = torch.float8_e4m3fn


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 320}
    config = LlamaConfig(**(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | more))
    return LlamaForCausalLM(config).eval()


def ids() -> Tensor:
    return torch.randint(0, 320, (2, 13), generator=torch.Generator().manual_seed(1))


def layer_of(scheme: str, n: int = 200, k: int = 300) -> Any:
    torch.manual_seed(n + k)
    made: Any = quantised_layer(nn.Linear(k, n), scheme_named(scheme), amax=torch.tensor(4.0))
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_close_to_floats(scheme: str, device: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(300, 200)
    layer: Any = quantised_layer(plain, scheme_named(scheme), amax=torch.tensor(4.0))
    assert isinstance(layer, Float8Linear)
    assert layer.weight.dtype == E4M3
    x = torch.randn(7, 300)
    y = layer.to(device)(x.to(device)).cpu()
    assert (y - plain(x)).norm() < 0.05 * plain(x).norm()
    assert layer.weight.dtype == E4M3
    half = layer.half()(x.half().to(device))
    assert half.dtype == torch.float16
    assert layer.weight.dtype == E4M3
    assert layer.weight_scale.dtype == torch.float32
    assert layer.bias.dtype == torch.float16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_engines_and_sums_by_request(scheme: str) -> None:
    layer, x = layer_of(scheme), torch.randn(3, 300)
    fused = layer(x)
    layer.engine = "cpu"
    assert torch.equal(layer(x), fused)
    assert layer.fast_accumulate == (scheme != "fp8-block128")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_of_the_input(scheme: str) -> None:
    layer = layer_of(scheme)
    x = torch.randn(4, 300, requires_grad=True)
    layer(x).sum().backward()
    scale = layer.weight_scale
    spread = reference.expanded(scale, 200, 300, 128) if scale.dim() == 2 else scale.view(-1, 1)
    torch.testing.assert_close(x.grad, (layer.weight.float() * spread).sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_layers_give_the_same(scheme: str) -> None:
    layers = [layer_of(scheme, 256), layer_of(scheme, 130)]
    x = torch.randn(5, 300)
    before = [layer(x) for layer in layers]
    one = joined(layers)
    assert isinstance(one, Float8Linear)
    assert torch.equal(one(x), torch.cat(before, -1))
    assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
    if scheme == "fp8-block128":
        assert joined([layer_of(scheme, 130), layer_of(scheme, 256)]) is None


def test_blocks_of_wide_weights() -> None:
    """Weights are quantised in parts: blocks must not begin anew in each."""
    w = torch.randn(1024, 14336, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_weight(w, scheme_named("fp8-block128"))
    assert torch.equal(scales, reference.block_scales(w, 128))
    spread = reference.expanded(scales, 1024, 14336, 128)
    assert torch.equal(codes.view(torch.int8), reference.quantize(w, spread, E4M3).view(torch.int8))


def test_joining_keeps_how_sums_are_made() -> None:
    layers = [layer_of("fp8-dynamic", 128), layer_of("fp8-dynamic", 64)]
    layers[0].fast_accumulate = False
    assert joined(layers) is None
    assert joined([layer_of("fp8-block128", 128, 128), layer_of("fp8-block128", 64, 128)]) is None


def test_a_cast_that_fails_leaves_the_layer_whole() -> None:
    layer = layer_of("fp8-dynamic")
    with pytest.raises(RuntimeError, match="no room"):
        layer._apply(no_room)
    assert layer.weight.dtype == E4M3


def no_room(_: Tensor) -> Tensor:
    raise RuntimeError("no room")


def test_schemes_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="weights: expected one of channel, tensor"):
        Scheme("block", "block")
    with pytest.raises(ValueError, match="activations: expected one of block beside blocks"):
        Scheme("block", "token", values="float8")
    with pytest.raises(ValueError, match="clipping: expected one of max beside float8"):
        Scheme("channel", "tensor", clipping="mse", values="float8")
    with pytest.raises(ValueError, match=r"scheme: expected one of torch\.int8, got fp8-dynamic"):
        Int8Linear(8, 8, scheme=scheme_named("fp8-dynamic"))  # type: ignore[arg-type]
    for name in SCHEMES:
        assert scheme_named(name).name == name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_generate(scheme: str, device: str) -> None:
    model = quantize_(llama(), scheme, calibration=[ids()], progress=False)
    dtype = torch.float16 if device == "cuda" else torch.float32
    model = model.to(device=device, dtype=dtype)
    prompt = ids()[:1].tolist()
    once = octofuse.generate(model, prompt, 8)
    twice = octofuse.generate(model, [*prompt, *ids()[1:].tolist()], 8)
    assert once[0] == twice[0]


@pytest.mark.parametrize("scheme", ["fp8-static", "w8a8-static"])
@pytest.mark.parametrize("other", ["fp8-static", "w8a8-static", "fp8-block128"])
def test_layers_of_other_types_beside_each_other(scheme: str, other: str) -> None:
    """What one layer hands to the next in 8 bits has to be in its type."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=320, n_positions=64)).eval()
    for name in ("mlp.c_proj", "mlp.c_fc", "attn.c_proj"):
        model = quantize_(copy.deepcopy(plain), scheme, [ids()], exceptions={name: other}, progress=False)
        prompt = ids()[:1]
        by_transformers = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert octofuse.generate(model, prompt.tolist(), 6)[0] == by_transformers


@pytest.mark.parametrize("form", ["octofuse", "compressed-tensors"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_give_the_layers_back(scheme: str, form: str, tmp_path: Path) -> None:
    model = quantize_(llama(), scheme, calibration=[ids()], progress=False)
    octofuse.save_pretrained(model, tmp_path, format=form)
    again = octofuse.from_pretrained(tmp_path)
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    for name, layer in linear_layers(model).items():
        read = again.get_submodule(name)
        assert read.scheme == layer.scheme
        assert torch.equal(read.weight.view(torch.int8), layer.weight.view(torch.int8))


def blocks_of(model: Any, name_of_scale: str) -> tuple[dict[str, Tensor], Any]:
    """A checkpoint's tensors, and the same model quantised here."""
    ours = quantize_(copy.deepcopy(model), "fp8-block128", progress=False)
    tensors = {}
    for name, layer in ours.named_modules():
        if isinstance(layer, EightBitLinear):
            tensors |= {f"{name}.weight": layer.weight.detach(), f"{name}.{name_of_scale}": layer.weight_scale}
    return tensors, ours


def test_transformers_own_fp8_blocks(tmp_path: Path) -> None:
    """As DeepSeek's and Qwen's own files are."""
    model = llama()
    tensors, ours = blocks_of(model, "weight_scale_inv")
    config: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    folder = write_folder(model, tmp_path / "a", tensors, config)
    read = octofuse.from_pretrained(folder)
    assert torch.equal(read(ids()).logits, ours(ids()).logits)
    for changed, message in (
        ({"weight_block_size": [64, 64]}, "weight_block_size: expected"),
        ({"activation_scheme": "static"}, "activation_scheme: expected 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt: expected 'e4m3'"),
    ):
        folder = write_folder(model, tmp_path / "b", tensors, config | changed)
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(folder)
    name = next(name for name in tensors if name.endswith("_inv"))
    lacking = {other: tensor for other, tensor in tensors.items() if other != name}
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn without a scale"):
        octofuse.from_pretrained(write_folder(model, tmp_path / "d", lacking, config))
    folder = write_folder(model, tmp_path / "c", tensors | {name: tensors[name][:1]}, config)
    with pytest.raises(ValueError, match=f"{name}: expected shape"):
        octofuse.from_pretrained(folder)


@pytest.mark.parametrize("dynamic", [False, True])
def test_modelopt(dynamic: bool, tmp_path: Path) -> None:
    model = llama()
    scheme = "fp8-dynamic-tensor" if dynamic else "fp8-static-tensor"
    ours: Any = quantize_(copy.deepcopy(model), scheme, calibration=[ids()], progress=False)
    tensors: dict[str, Tensor] = {}
    for name, layer in ours.named_modules():
        if isinstance(layer, EightBitLinear):
            tensors |= {f"{name}.weight": layer.weight.detach(), f"{name}.weight_scale": layer.weight_scale.view(())}
            if not dynamic:
                tensors[f"{name}.input_scale"] = layer.input_scale
            if name.endswith(("k_proj", "v_proj")):
                tensors[f"{name}.{name[-6]}_scale"] = torch.tensor(0.5)
    config = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    read = octofuse.from_pretrained(write_folder(model, tmp_path / "a", tensors, config))
    assert torch.equal(read(ids()).logits, ours(ids()).logits)
    folder = write_folder(model, tmp_path / "b", tensors, config | {"quant_algo": "NVFP4"})
    with pytest.raises(ValueError, match="quant_algo: expected 'FP8', got 'NVFP4'"):
        octofuse.from_pretrained(folder)


def test_half_precision_models_keep_their_weights(tmp_path: Path) -> None:
    """A cast of what is in floating point reaches neither the weights nor their scales, before or after writing."""
    model = quantize_(llama(), "fp8-dynamic", progress=False).to(torch.bfloat16)
    octofuse.save_pretrained(model, tmp_path, format="compressed-tensors")
    again = octofuse.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    read, own = (one.model.layers[0].mlp.up_proj for one in (again.half(), model))
    assert torch.equal(read.weight.view(torch.int8), own.weight.view(torch.int8))
    assert torch.equal(read.weight_scale, own.weight_scale)
