"""Quantising while transformers loads, and transformers' own save_pretrained of quantised models: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import octofuse
from helpers import DEVICES
from octofuse import OctofuseConfig
from octofuse.files.on_load import OnLoad
from octofuse.models import quantize_, weight_bytes
from octofuse.nn import QUANTISED, Int8Linear, WeightOnlyLinear, linear_layers
from test_files import SIZES
from test_models_families import small

TOKENS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))
KINDS = ("llama", "qwen3", "opt", "gpt2", "mistral")
WIDER = {"hidden_size": 128, "intermediate_size": 256}  # whole k-blocks
SCHEMES = ("w8a8-dynamic", "fp8-dynamic", "fp8-block128", "w8a16", "w4a16-g32", "w4a16-g32-zp", "bcq-q3-g32",
           "nf4", "w8a16-fp8")  # fmt: skip


def folder_of(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """Of a float model, as transformers writes it. Qwen's head is its embedding."""
    model = small(kind, **SIZES | {"tie_word_embeddings": kind in ("qwen3", "gpt2")} | more)
    model.to(dtype).save_pretrained(folder)
    return folder


def on_load(folder: Path, scheme: str, exceptions: dict[str, str | None] | None = None, **options: Any) -> Any:
    config = OctofuseConfig(scheme, exceptions)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **({"dtype": "auto"} | options))


@pytest.fixture
def enabled():
    octofuse.enable()
    yield
    octofuse.disable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_saved_and_loaded_again(kind: str, dtype: torch.dtype, tmp_path: Path, enabled: None) -> None:
    folder = folder_of(kind, tmp_path / "float", dtype)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for scheme in SCHEMES:
        exceptions = {"lm_head": "w8a8-dynamic"} if scheme == "w4a16-g32-zp" else None
        model = on_load(folder, scheme, exceptions)
        assert model.dtype == dtype
        after = quantize_(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), scheme, exceptions=exceptions,
                          progress=False)  # fmt: skip
        logits = model(TOKENS).logits
        assert torch.equal(logits, after(TOKENS).logits)
        assert not torch.equal(logits, plain(TOKENS).logits)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        model.save_pretrained(tmp_path / scheme)
        after.save_pretrained(tmp_path / f"{scheme} after")
        for again in (
            octofuse.from_pretrained(tmp_path / scheme),
            AutoModelForCausalLM.from_pretrained(tmp_path / scheme, dtype="auto"),
        ):
            assert torch.equal(again(TOKENS).logits, logits)
        again.save_pretrained(tmp_path / f"{scheme} again")
        files = [tmp_path / f"{scheme}{more}" / "model.safetensors" for more in ("", " after", " again")]
        assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generates(cache: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "float")
    model = on_load(folder, "w8a8-dynamic")
    after = quantize_(AutoModelForCausalLM.from_pretrained(folder), "w8a8-dynamic", progress=False)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(model.generate(TOKENS, **options), after.generate(TOKENS, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_one_linear_at_a_time(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("llama", tmp_path / "float", num_hidden_layers=4)
    quantise, floats = OnLoad.quantise, []

    def watched(self: OnLoad, model: Any, name: str, weight: torch.Tensor) -> None:
        floats.append([n for n, layer in linear_layers(model).items() if not layer.weight.is_meta])
        assert weight.device.type == device
        quantise(self, model, name, weight)

    monkeypatch.setattr(OnLoad, "quantise", watched)
    model = on_load(folder, "w8a8-dynamic", device_map=device)
    assert len(floats) == 4 * 7
    assert not any(floats)
    assert {parameter.device.type for parameter in model.parameters()} == {device}


def test_a_dtype_of_ones_own(tmp_path: Path) -> None:
    """Weights are rounded from what the loaded model would hold."""
    folder = folder_of("llama", tmp_path / "float", torch.float32)
    model = on_load(folder, "w8a8-dynamic", dtype=torch.bfloat16)
    after = quantize_(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), progress=False)
    assert torch.equal(model(TOKENS).logits, after(TOKENS).logits)
    assert {layer.weight_scale.dtype for layer in model.modules() if isinstance(layer, Int8Linear)} == {torch.float32}


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32"])
def test_initialising_what_is_missing_leaves_the_rest(scheme: str, tmp_path: Path) -> None:
    """transformers fills missing tensors, and GPT-2 its c_proj.weight by name where it does."""
    folder = folder_of("gpt2", tmp_path / "float")
    whole = on_load(folder, scheme)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = on_load(folder, scheme)
    for name, layer in whole.named_modules():
        if isinstance(layer, QUANTISED):
            other = model.get_submodule(name).state_dict()
            assert all(torch.equal(other[key], tensor) for key, tensor in layer.state_dict().items() if key != "bias")


def test_memory_that_transformers_reserves(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "float", torch.bfloat16, **WIDER)
    for scheme, at_most in (
        ("w8a8-dynamic", 1.0),
        ("w4a16-g32", 0.5625),
        ("w4a16-g32-zp", 0.6),
        ("bcq-q3-g32", 0.5625),
    ):
        model = on_load(folder, scheme)
        quantizer = model.hf_quantizer
        weights = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, QUANTISED)}
        assert len(weights) == 2 * 7
        for name, layer in weights.items():
            size = quantizer.param_element_size(model, name, layer.weight)
            assert size <= at_most
            inside = sum(t.nbytes for key, t in layer.state_dict().items() if key != "bias")
            assert inside <= layer.in_features * layer.out_features * size + 4 * layer.out_features
        embedding = model.model.embed_tokens.weight
        assert quantizer.param_element_size(model, "model.embed_tokens.weight", embedding) == 2


def test_parameters_are_counted(tmp_path: Path) -> None:
    folder = folder_of("opt", tmp_path / "float")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = on_load(folder, "w8a8-dynamic")
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(only_trainable=True) == 0
    assert weight_bytes(model) < weight_bytes(plain)


def test_casting_reaches_what_is_in_floating_point(tmp_path: Path, enabled: None) -> None:
    on_load(folder_of("llama", tmp_path / "float"), "w8a8-dynamic").save_pretrained(tmp_path / "q")
    for model in (on_load(tmp_path / "float", "w8a8-dynamic"), AutoModelForCausalLM.from_pretrained(tmp_path / "q")):
        assert model.half().model.norm.weight.dtype == torch.float16
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own code, as far as the network."""
    import transformers.utils.hub as hub

    sent: dict[str, Any] = {}

    def send(self: Any, working_dir: str, repo_id: str, *_: Any, **__: Any) -> None:
        sent["config"] = json.loads((Path(working_dir) / "config.json").read_text())
        sent["tensors"] = load_file(Path(working_dir) / "model.safetensors")

    class Repository:
        repo_id = "someone/model"

        def create_repo(self, *_: Any, **__: Any) -> Repository:
            return self

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("")

    monkeypatch.setattr(hub, "hf_api", Repository, raising=False)
    monkeypatch.setattr(hub, "create_repo", Repository().create_repo, raising=False)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: Card())
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", send)
    on_load(folder_of("llama", tmp_path / "float"), "w4a16-g32").push_to_hub("someone/model")
    assert sent["config"]["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "model.layers.0.mlp.up_proj.weight_packed" in sent["tensors"]


def test_what_is_refused(tmp_path: Path, enabled: None) -> None:
    with pytest.raises(
        ValueError, match="scheme: expected one that needs no calibration, got w8a8-static; load the model"
    ):
        OctofuseConfig("w8a8-static")
    with pytest.raises(ValueError, match="exceptions: mlp: expected one that needs no calibration, got w4a16-g32-gptq"):
        OctofuseConfig(exceptions={"mlp": "w4a16-g32-gptq"})
    with pytest.raises(ValueError, match="scheme: expected a name such as"):
        OctofuseConfig("int8")
    folder = folder_of("llama", tmp_path / "float")
    with pytest.raises(ValueError, match="exceptions: expected patterns that match a layer, got mpl"):
        on_load(folder, "w8a8-dynamic", {"mpl": None})
    with pytest.raises(ValueError, match="device_map: expected devices for quantised layers, got disk"):
        on_load(folder, "w8a8-dynamic", device_map={"model": "cpu", "lm_head": "disk"})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="CONVERSION"):  # transformers' own report, above it, says which and why
        on_load(folder, "w8a8-dynamic")
    on_load(folder_of("llama", tmp_path / "b"), "w8a8-dynamic").save_pretrained(tmp_path / "q")
    with pytest.raises(ValueError, match="The model is quantized with"):
        on_load(tmp_path / "q", "w8a8-dynamic")


def test_layers_that_stay(tmp_path: Path) -> None:
    model = on_load(folder_of("llama", tmp_path / "float"), "w4a16-g32", {"*.q_proj": None, "*.mlp.*": "w8a8-dynamic"})
    layer = model.model.layers[1]
    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert isinstance(layer.self_attn.k_proj, WeightOnlyLinear)
    assert isinstance(layer.mlp.up_proj, Int8Linear)
