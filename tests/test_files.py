"""Checkpoints of other libraries: weights bit-equal to what theirs makes of them, through both doors, and bad files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import octofuse
from checkpoints import INPUT_SCALE, Awq, Gptq, bits_to_words, compressed, write_folder
from helpers import PROMPTS, by_transformers
from octofuse.files.words import unpack_words
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.nn import Int8Linear, PackedLinear, WeightOnlyLinear, linear_layers
from octofuse.nn.linear import is_conv1d
from test_models_families import small

needs_theirs = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = TOKEN | {"strategy": "tensor", "dynamic": False}
COMPRESSED: dict[str, dict[str, Any]] = {
    "w8a8 dynamic": {"activations": TOKEN},
    "w8a8 static": {"activations": STATIC},
    "w8a8 tensor": {"activations": STATIC, "strategy": "tensor"},
    "w8a16": {"packed": True},
    "w8a16 unpacked": {},
    "w4a16": {"bits": 4, "strategy": "group", "group": 32, "packed": True},
    "w4a16 channels": {"bits": 4, "packed": True},
    "w4a16 asymmetric": {"bits": 4, "strategy": "group", "group": 32, "packed": True, "symmetric": False},
    "w3a16": {"bits": 3, "strategy": "group", "group": 64, "packed": True},
    "w5a16 asymmetric": {"bits": 5, "strategy": "group", "group": 32, "packed": True, "symmetric": False},
    "w2a16": {"bits": 2, "strategy": "group", "group": 32, "packed": True},
    "w4a8": {"bits": 4, "strategy": "group", "group": 32, "activations": TOKEN},
    "w4a8 channels": {"bits": 4, "packed": True, "activations": TOKEN},
    "w6a8 channels": {"bits": 6, "activations": TOKEN},
}
KINDS = ("llama", "qwen3", "opt", "mistral")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 64, "n_embd": 64}


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    model = small(kind, **(SIZES | more))
    angles = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, buffer in angles.items():  # which a model that is loaded keeps in fp32
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, buffer)
    return model


def with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    """The float model with these in place of its linears' weights."""
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(weight.t().clone() if is_conv1d(layer) else weight.clone(), requires_grad=False)
    return model


def stands_for(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight that a layer stands for, rounded once."""
    if isinstance(layer, Int8Linear):
        return (layer.weight.float() * layer.weight_scale.view(-1, 1)).to(dtype)
    assert isinstance(layer, PackedLinear)
    return layer.dequantized()


def fake_quantised(activations: dict[str, Any] | None) -> Callable[..., Any]:
    """A hook in front of a linear: its input as int8 has it."""

    def hook(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        x = given[0].float()
        if activations is None:
            return given[0]
        scale = x.abs().amax(-1, keepdim=True) / 127 if activations["dynamic"] else torch.tensor(INPUT_SCALE)
        return ((x / scale).round().clamp(-127, 127) * scale).to(given[0].dtype)

    return hook


def check(folder: Path, float_model: Any, weights: dict[str, Tensor], activations: dict[str, Any] | None = None) -> Any:
    """The weights' bits, and logits of a float model with them and with such activations."""
    model = octofuse.from_pretrained(folder)
    assert model.dtype == float_model.dtype
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, weight in weights.items():
        assert torch.equal(stands_for(model.get_submodule(name), weight.dtype), weight), name
        float_model.get_submodule(name).register_forward_pre_hook(fake_quantised(activations))
    tokens = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    want = with_weights(float_model, weights)(tokens).logits.float()
    error = (model(tokens).logits.float() - want).norm() / want.norm()
    # Rounding to bf16 in between moves values across steps of int8.
    assert float(error) < (2e-3 if float_model.dtype == torch.float32 else 0.02 if activations is None else 0.06)
    return model


@needs_theirs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", COMPRESSED)
def test_compressed_tensors(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for kind in KINDS if variant in ("w8a8 dynamic", "w4a16") else KINDS[:1]:
        source = model_of(kind, dtype)
        tensors, config, weights = compressed(source, **COMPRESSED[variant])
        folder = write_folder(source, tmp_path / kind, tensors, config)
        quantises = variant.startswith("w8a8") or variant.endswith("a8 channels")
        activations = COMPRESSED[variant].get("activations") if quantises else None
        model = check(folder, source, weights, activations)
        kinds = {type(module) for module in model.modules()} & {Int8Linear, WeightOnlyLinear}
        assert kinds == {Int8Linear if variant.startswith("w8a8") else WeightOnlyLinear}
        if not variant.endswith("asymmetric"):
            assert all(getattr(module, "zero", None) is None for module in model.modules())


@needs_theirs
@pytest.mark.parametrize("variant", ["w8a8 dynamic", "w8a16", "w4a16", "w3a16"])
def test_stock_transformers_reads_the_same_weights(variant: str, tmp_path: Path) -> None:
    """What the tests write is what compressed-tensors itself reads."""
    from transformers import AutoModelForCausalLM

    source = model_of("llama", torch.bfloat16)
    tensors, config, weights = compressed(source, **COMPRESSED[variant])
    folder = write_folder(source, tmp_path / "model", tensors, config)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stock(torch.tensor([[1, 2, 3]]))  # decompresses
    for name, weight in weights.items():
        assert torch.equal(stock.get_submodule(name).weight, weight), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [{}, {"order": True}, {"symmetric": True}, {"version": 2}], ids=str)
def test_gptq(bits: int, more: dict[str, Any], tmp_path: Path) -> None:
    cases = (("llama", torch.float32, 32), ("opt", torch.float16, 64), ("qwen3", torch.float32, -1))
    for kind, dtype, group in (*cases, ("gpt2", torch.float32, 32)):
        if group == -1 and more.get("order"):
            continue
        source = model_of(kind, dtype)
        written = Gptq(source, bits, group, **more)
        model = check(write_folder(source, tmp_path / kind, written.tensors, written.config), source, written.weights)
        for module in model.modules():
            if isinstance(module, WeightOnlyLinear):
                assert (module.zero is None) == bool(more.get("symmetric"))
                assert (module.order is not None) == (bool(more.get("order")) and module.in_features > group)


def test_awq(tmp_path: Path) -> None:
    for kind, dtype, group in (("llama", torch.float32, 32), ("mistral", torch.bfloat16, 64)):
        source = model_of(kind, dtype)
        written = Awq(source, group)
        check(write_folder(source, tmp_path / kind, written.tensors, written.config), source, written.weights)


@pytest.mark.parametrize("order", [False, True])
def test_the_generator_decodes_them(order: bool, tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32, order=order)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    plain = with_weights(source, written.weights)
    assert Generator(octofuse.from_pretrained(folder))(PROMPTS, 12) == [by_transformers(plain, p, 12) for p in PROMPTS]


def test_tied_heads_and_shards(tmp_path: Path) -> None:
    source = model_of("qwen3", tie_word_embeddings=True)
    written = Gptq(source, 4, 32)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: whole[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in files.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = check(folder, source, written.weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: expected names of .* in this folder, got '\.\./elsewhere"):
        octofuse.from_pretrained(folder)


def test_enable_gives_transformers_the_layers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = model_of("llama")
    written = Gptq(source, 4, 32)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    octofuse.enable()
    try:
        octofuse.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        unserved = write_folder(
            source, tmp_path / "unserved", written.tensors, written.config | {"dynamic": {"x": {"bits": 5}}}
        )
        with (
            pytest.warns(UserWarning, match="octofuse leaves this checkpoint to transformers"),
            pytest.raises(ImportError),
        ):
            AutoModelForCausalLM.from_pretrained(unserved)
    finally:
        octofuse.disable()
    with pytest.raises(ImportError):  # transformers' own quantizer, which wants optimum
        AutoModelForCausalLM.from_pretrained(folder)
    assert len([m for m in model.modules() if isinstance(m, WeightOnlyLinear)]) == len(linear_layers(source))
    model.save_pretrained(tmp_path / "again")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(octofuse.from_pretrained(tmp_path / "again")(tokens).logits, model(tokens).logits)


def test_other_folders(tmp_path: Path) -> None:
    """Floating-point models, and those of this library."""
    source = model_of("llama")
    source.save_pretrained(tmp_path / "float")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(octofuse.from_pretrained(tmp_path / "float")(tokens).logits, source(tokens).logits)
    octofuse.save_pretrained(octofuse.models.quantize_(source, progress=False), tmp_path / "own")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "own")(tokens).logits, source(tokens).logits)


def test_settings_where_transformers_does_not_look(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    config = json.loads((folder / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected quantization_config .*; an older compression_config is there"):
        octofuse.from_pretrained(folder)


def test_other_spellings(tmp_path: Path) -> None:
    """Version 2 by its newer name, layers left out, an index of groups that is all 0, a last group that is short."""
    source = model_of("llama")
    written = Gptq(source, 4, 32, version=2)
    config = {key: value for key, value in written.config.items() if key != "checkpoint_format"}
    config |= {"format": "gptq_v2", "dynamic": {"-:.*lm_head.*": {}}}
    tensors = {name: t * 0 if name.endswith("g_idx") else t for name, t in written.tensors.items()}
    check(write_folder(source, tmp_path / "a", tensors, config), source, written.weights)
    source = small("llama", **SIZES | {"intermediate_size": 144})
    short = Gptq(source, 4, 32)
    check(write_folder(source, tmp_path / "b", short.tensors, short.config), source, short.weights)


def test_what_no_linear_takes_is_named(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    expert = {
        f"model.layers.0.mlp.experts.0.up_proj.{own}": torch.zeros(2, 2, dtype=torch.int32) for own in ("qweight",)
    }
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj\.qweight: expected to belong to a linear"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "a", written.tensors | expert, written.config))
    source = model_of("opt")
    written = Gptq(source, 4, 32)
    gone = {name: t for name, t in written.tensors.items() if name != "model.decoder.layers.0.fc1.bias"}
    with pytest.raises(ValueError, match=r"fc1\.bias: missing"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "b", gone, written.config))


def test_scales_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    source = model_of("llama", torch.bfloat16)
    written = Gptq(source, 4, 32)
    large = {name: t * 1e8 if name.endswith("scales") else t for name, t in written.tensors.items()}
    folder = write_folder(source, tmp_path / "model", large, written.config)
    octofuse.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"scales: expected values that torch\.float16 holds"):
        octofuse.from_pretrained(folder, dtype=torch.float16)


def test_packing_in_parts_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model_of("llama")
    written = Gptq(source, 3, 32, order=True)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    whole = octofuse.from_pretrained(folder).state_dict()
    monkeypatch.setattr("octofuse.quant.packing.AT_ONCE", 2048)
    parts = octofuse.from_pretrained(folder).state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a8-static-tensor", "w4a16-g32", "w3a16-g32-zp", "w4a16-g32-mse"])
def test_quantising_in_parts_gives_the_same_bits(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(1, 97, (2, 11))
    whole = quantize_(model_of("llama"), scheme, [tokens], progress=False).state_dict()
    monkeypatch.setattr("octofuse.quant.packing.AT_ONCE", 2048)
    parts = quantize_(model_of("llama"), scheme, [tokens], progress=False).state_dict()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_what_other_caches_need_is_left_out(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32)
    more = {f"model.layers.0.self_attn.{own}": torch.ones(1) for own in ("q_scale", "k_zero_point", "v_zero_point")}
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    whole = load_file(folder / "model.safetensors")
    save_file(whole | more, folder / "model.safetensors", metadata={"format": "pt"})
    check(folder, source, written.weights)


def test_activation_order_is_kept_by_save(tmp_path: Path) -> None:
    source = model_of("llama")
    written = Gptq(source, 4, 32, order=True)
    model = octofuse.from_pretrained(write_folder(source, tmp_path / "model", written.tensors, written.config))
    octofuse.save_pretrained(model, tmp_path / "own")
    tokens = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"model: expected columns in their own order, got .* in model\.layers\.0"):
        octofuse.models.distill_(model, source, [tokens], steps=1, progress=False)
    assert torch.equal(octofuse.from_pretrained(tmp_path / "own")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_words(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(bits))
    codes[0] = (1 << bits) - 1
    assert torch.equal(unpack_words(bits_to_words(codes, bits), bits, count), codes.to(torch.uint8))
