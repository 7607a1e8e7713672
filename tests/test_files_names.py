"""Checkpoints that call parts of a model otherwise than transformers does, and settings of single layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import octofuse
from checkpoints import Gptq, compressed, write_folder
from octofuse import OctofuseConfig
from octofuse.files.patterns import compiled
from octofuse.models import quantize_
from octofuse.nn import QUANTISED, WeightOnlyLinear, linear_layers
from test_files import check, model_of, needs_theirs

TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
          "patch_size": 14}  # fmt: skip
IDS = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(1))


def with_pictures(kind: str) -> Any:
    """A random model for pictures and text."""
    torch.manual_seed(0)
    if kind == "gemma3":
        text = TEXT | {"sliding_window": 16}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=96
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    if kind == "llava":
        vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
        text = TEXT | {"model_type": "llama"}
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
        return transformers.LlavaForConditionalGeneration(config)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14,
              "out_hidden_size": 64, "fullatt_block_indexes": [1]}  # fmt: skip
    more = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=vision, **more)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


OURS = "model.language_model.layers."


@pytest.mark.parametrize(
    ("kind", "theirs", "floats"),
    [
        ("gemma3", "language_model.model.layers.", ("*vision_tower*",)),
        ("llava", "language_model.model.layers.", ("*vision_tower*", "*projector*")),
        ("qwen2_5_vl", "model.layers.", ("*visual*",)),
    ],
)
def test_models_of_other_names(kind: str, theirs: str, floats: tuple[str, ...], tmp_path: Path) -> None:
    with_pictures(kind).eval().save_pretrained(tmp_path / "float")
    exceptions = dict.fromkeys((*floats, "mlp.down_proj"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "float")
    quantize_(model, "w4a16-g32", exceptions=exceptions, progress=False)
    logits = model(IDS).logits
    config = OctofuseConfig("w4a16-g32", exceptions)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "float", quantization_config=config)
    assert torch.equal(loaded(IDS).logits, logits)
    model.save_pretrained(tmp_path / "q")
    assert f"{theirs}0.self_attn.q_proj.weight_packed" in load_file(tmp_path / "q/model.safetensors")
    settings = json.loads((tmp_path / "q/config.json").read_text())
    ignored = settings["quantization_config"]["ignore"]
    assert f"{OURS}1.mlp.down_proj" in ignored
    for ignore in (ignored, [name.replace(OURS, theirs) for name in ignored], [r"re:.*down_proj", *ignored]):
        settings["quantization_config"]["ignore"] = ignore
        (tmp_path / "q/config.json").write_text(json.dumps(settings))
        again = octofuse.from_pretrained(tmp_path / "q")
        assert type(again) is type(model)
        assert torch.equal(again(IDS).logits, logits)
    assert len([m for m in again.modules() if isinstance(m, QUANTISED)]) == 2 * 6
    tensors = load_file(tmp_path / "q/model.safetensors")
    broken = f"{theirs}1.self_attn.k_proj.weight_scale"
    save_file({n: t for n, t in tensors.items() if n != broken}, tmp_path / "q/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(f"{OURS}1.self_attn.k_proj.weight_scale: missing")):
        octofuse.from_pretrained(tmp_path / "q")


def mixed(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """GPTQ's tensors and weights: down_proj in 8 bits, block 1's v_proj in groups of 64, others in 4 bits of 32."""
    files = {"down_proj": Gptq(model, 8, 32), "1.self_attn.v_proj": Gptq(model, 4, 64), "": Gptq(model, 4, 32)}
    tensors, weights = {}, {}
    for name in linear_layers(model):
        chosen = next(file for end, file in files.items() if name.endswith(end))
        tensors |= {key: t for key, t in chosen.tensors.items() if key.startswith(f"{name}.")}
        weights[name] = chosen.weights[name]
    return tensors, weights


def test_gptq_with_settings_of_single_layers(tmp_path: Path) -> None:
    source = model_of("llama")
    tensors, weights = mixed(source)
    dynamic = {
        r"+:model\.layers\.\d\.mlp\.down_proj": {"bits": 8},
        r"model\.layers\.1\.self_attn\.v_proj": {"group_size": 64},
        r"-:.*lm_head": {},
        r".*": {},
    }
    config = Gptq(source, 4, 32).config | {"dynamic": dynamic}
    folder = write_folder(source, tmp_path / "a", tensors, config)
    check(folder, source, weights)
    schemes = {m.scheme.bits for m in octofuse.from_pretrained(folder).modules() if isinstance(m, WeightOnlyLinear)}
    assert schemes == {4, 8}
    for wrong, message in (
        ({"x": {"bits": 5}}, r"dynamic: x: bits: expected one of 2, 3, 4, 8, got 5"),
        ({"(": {}}, r"dynamic: expected regular expressions, got '\('"),
        ({"x": 3}, r"dynamic: x: expected an object, got 3"),
        ([], r"dynamic: expected an object, got \['x'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(
                write_folder(source, tmp_path / "b", tensors, config | {"dynamic": wrong or ["x"]})
            )


@needs_theirs
@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_compressed_tensors_with_activation_order(actorder: str, tmp_path: Path) -> None:
    """Of each column its group; the weights are those of a file whose columns were sorted."""
    source = model_of("llama")
    tensors, config, weights = compressed(source, bits=4, strategy="group", group=32, packed=True)
    config["config_groups"]["group_0"]["weights"]["actorder"] = actorder
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        order = torch.randperm(weight.shape[1], generator=generator)
        sorted_codes = unpacked(tensors[f"{name}.weight_packed"], weight.shape[1])
        groups = torch.arange(weight.shape[1]) // 32
        codes, scattered, own = torch.empty_like(sorted_codes), torch.empty_like(weight), torch.empty_like(groups)
        codes[:, order], scattered[:, order], own[order] = sorted_codes, weight, groups
        tensors[f"{name}.weight_packed"] = packed(codes)
        tensors[f"{name}.weight_g_idx"] = own.to(torch.int32)
        weights[name] = scattered
    folder = write_folder(source, tmp_path / "a", tensors, config)
    check(folder, source, weights)
    assert all(
        m.order is not None for m in octofuse.from_pretrained(folder).modules() if isinstance(m, WeightOnlyLinear)
    )
    name = next(iter(weights))
    tensors[f"{name}.weight_g_idx"] = tensors[f"{name}.weight_g_idx"] * 2
    with pytest.raises(ValueError, match="g_idx: expected 32 columns of each of"):
        octofuse.from_pretrained(write_folder(source, tmp_path / "b", tensors, config))


def unpacked(words: Tensor, count: int) -> Tensor:
    """Codes of 4 bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & 15).flatten(1)[:, :count]


def packed(codes: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    words = (codes.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize(
    "text", [r".*\.mlp\.(gate|up)_proj$", r"(?:.*\.)?lm_head", r"model\.layers\.(0|1|2\d)\..*q_proj", r"[a-z]{2,3}\d*",
             r"^(?!.*(down|up)).*$", r".*layers\.\d+\.self_attn\.(q|k|v)_proj.*"],
)  # fmt: skip
def test_expressions_that_end(text: str) -> None:
    assert compiled("ignore", text).pattern == text


@pytest.mark.parametrize(
    "text", [r"(a+)+$", r"(\w+\.?)+x", r"(.*)*x", r"(ab|b*)*", r"(?:ab|a.)*x", r"(aa?)*x", r".*" * 20 + "x", r"(?=(a+)+)",
             r"(x{0,5000}y)*", r"((a{1,99}){1,99})"],
)  # fmt: skip
def test_expressions_that_may_not_end(text: str) -> None:
    """Of a name of 60 letters each of these could take years."""
    with pytest.raises(ValueError, match=r"ignore: expected regular expressions that end soon, got "):
        compiled("ignore", text)
