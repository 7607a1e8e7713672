"""Models and folders out of the ordinary: parts of models, merged linears, odd groups, files beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import octofuse
from checkpoints import Gptq, write_folder
from octofuse import OctofuseConfig
from octofuse.models import quantize_
from octofuse.nn import QUANTISED, Int8Linear, WeightOnlyLinear
from octofuse.quant import WeightOnly
from test_files import check, model_of
from test_models_families import ids, small


def test_groups_that_no_format_says(tmp_path: Path) -> None:
    """They run; saving says what is wrong, by the layer's name, and writes nothing."""
    model = quantize_(model_of("llama"), WeightOnly(4, 24), progress=False)
    model(ids())
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\..*: expected groups of 32, 64, 128, 256 columns, or a row"
    ):
        octofuse.save_pretrained(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    source = model_of("llama")
    written = Gptq(source, 4, 16, order=True)
    check(write_folder(source, tmp_path / "b", written.tensors, written.config), source, written.weights)


def test_a_part_of_a_model(tmp_path: Path) -> None:
    model = model_of("llama")
    quantize_(model.model, "w8a8-dynamic", progress=False)
    logits = model(ids()).logits
    assert getattr(model.config, "quantization_config", None) is None
    octofuse.save_pretrained(model, tmp_path / "whole")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "whole")(ids()).logits, logits)
    model.model.save_pretrained(tmp_path / "part")
    part = octofuse.from_pretrained(tmp_path / "part")
    assert torch.equal(part(ids())[0], model.model(ids())[0])


def test_a_model_inside_another_module(tmp_path: Path) -> None:
    outer = nn.ModuleDict({"inner": model_of("llama")})
    quantize_(outer, "w8a8-dynamic", progress=False)
    outer["inner"].save_pretrained(tmp_path / "a")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "a")(ids()).logits, outer["inner"](ids()).logits)


def test_a_config_that_two_models_share(tmp_path: Path) -> None:
    first = model_of("llama")
    second = type(first)(first.config).eval()
    quantize_(first, "w8a8-dynamic", progress=False)
    second.save_pretrained(tmp_path / "a")
    assert "quantization_config" not in json.loads((tmp_path / "a/config.json").read_text())


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32"])
def test_linears_that_files_merge(scheme: str, tmp_path: Path) -> None:
    """Of Dinov2 transformers keeps gates and values apart, and files together."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=28,
                                       patch_size=14, use_swiglu_ffn=True)  # fmt: skip
    transformers.Dinov2Model(config).eval().save_pretrained(tmp_path / "float")
    x = torch.randn(1, 3, 28, 28)
    model = quantize_(transformers.Dinov2Model.from_pretrained(tmp_path / "float"), scheme, progress=False)
    loaded = transformers.Dinov2Model.from_pretrained(
        tmp_path / "float", quantization_config=OctofuseConfig(scheme), dtype=torch.float32
    )
    want = model(x).last_hidden_state
    assert torch.equal(loaded(x).last_hidden_state, want)
    model.save_pretrained(tmp_path / "q")
    octofuse.save_pretrained(loaded, tmp_path / "r")
    for folder in ("q", "r"):
        again = octofuse.from_pretrained(tmp_path / folder)
        assert torch.equal(again(x).last_hidden_state, want)
        assert len([m for m in again.modules() if isinstance(m, QUANTISED)]) >= 2 * 6


def test_zero_points_beyond_the_codes(tmp_path: Path) -> None:
    model = quantize_(model_of("llama"), "w4a16-g32-zp", progress=False)
    layer = model.model.layers[0].mlp.up_proj
    layer.zero[0, 0] = 20
    with pytest.raises(ValueError, match=r"up_proj: expected zero points of 4 bits, got 20"):
        octofuse.save_pretrained(model, tmp_path / "a", format="compressed-tensors")
    octofuse.save_pretrained(model, tmp_path / "a")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "a")(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("scheme", ["w8a8-static-tensor", "w8a8-dynamic"])
def test_one_output_channel(scheme: str, tmp_path: Path) -> None:
    model = small("llama", "AutoModelForSequenceClassification", num_labels=1)
    quantize_(model, scheme, [ids()], exceptions={"score": scheme}, progress=False)
    assert isinstance(model.score, Int8Linear)
    octofuse.save_pretrained(model, tmp_path / "a", format="compressed-tensors")
    again = octofuse.from_pretrained(tmp_path / "a")
    assert isinstance(again.score, Int8Linear)
    assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_files_that_do_not_fit_are_not_quantised(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "a")
    whole = load_file(tmp_path / "a/model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in (
        (whole[name][:40].contiguous(), rf"model\.safetensors: {name}: expected shape \[128, 64\], got \[40, 64\]"),
        (whole[name].to(torch.int8), rf"{name}: expected torch\.float32 or alike, got torch\.int8"),
    ):
        save_file(whole | {name: wrong}, tmp_path / "a/model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=OctofuseConfig())


def test_dtypes_that_a_family_keeps(tmp_path: Path) -> None:
    """T5's wo stays in fp32."""
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8,
                             "decoder_start_token_id": 0}  # fmt: skip
    small("t5", "AutoModelForSeq2SeqLM", **sizes).save_pretrained(tmp_path / "a")
    cls, options = transformers.AutoModelForSeq2SeqLM, {"dtype": torch.float16}
    model = cls.from_pretrained(tmp_path / "a", quantization_config=OctofuseConfig("w4a16-g32"), **options)
    after = quantize_(cls.from_pretrained(tmp_path / "a", **options), "w4a16-g32", progress=False)
    states = [one.state_dict() for one in (model, after)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype, name
        assert torch.equal(tensor, states[1][name]), name


def test_files_beside_each_other(tmp_path: Path) -> None:
    """transformers takes the whole file where there is one."""
    model = quantize_(model_of("llama"), "w8a8-dynamic", progress=False)
    model.save_pretrained(tmp_path / "a", max_shard_size=40_000)
    index = (tmp_path / "a/model.safetensors.index.json").read_text()
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "a/model.safetensors.index.json").write_text(index)
    assert torch.equal(octofuse.from_pretrained(tmp_path / "a")(ids()).logits, model(ids()).logits)


def test_options_of_a_folder(tmp_path: Path) -> None:
    model = quantize_(model_of("llama"), "w8a8-dynamic", progress=False)
    model.save_pretrained(tmp_path / "above/below")
    again = octofuse.from_pretrained(tmp_path / "above", subfolder="below")
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    with pytest.raises(ValueError, match="variant: expected none of a folder, got 'fp16'"):
        octofuse.from_pretrained(tmp_path / "above/below", variant="fp16")
    with pytest.raises(ValueError, match="name: expected a folder or a hub name"):
        octofuse.from_pretrained("")
    octofuse.enable()
    try:
        base = transformers.AutoModel.from_pretrained(tmp_path / "above/below")
    finally:
        octofuse.disable()
    assert torch.equal(base(ids())[0], model.model(ids())[0])


def test_adapters_of_transformers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = quantize_(model_of("llama"), "w8a8-dynamic", exceptions={"v_proj": None}, progress=False)
    try:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["v_proj"]))
    except ValueError as error:
        if "version of PEFT" not in str(error):
            raise
        pytest.skip(str(error))
    model.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters/adapter_config.json").is_file()
    with pytest.raises(ValueError, match="model: expected one without adapters"):
        octofuse.save_pretrained(model, tmp_path / "a")


def test_in_inference_mode(tmp_path: Path) -> None:
    source = model_of("llama")
    source.save_pretrained(tmp_path / "float")
    written = Gptq(source, 4, 32, order=True)
    model = octofuse.from_pretrained(write_folder(source, tmp_path / "a", written.tensors, written.config))
    with torch.inference_mode():
        octofuse.Generator(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "float", quantization_config=OctofuseConfig("w4a16-g32")
        )
    for one in (model, loaded):
        layers = [m for m in one.modules() if isinstance(m, WeightOnlyLinear)]
        assert layers
        assert not any(tensor.is_inference() for layer in layers for tensor in layer.state_dict().values())
