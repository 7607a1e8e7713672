"""Whole models: quantize_, checkpoints, the embedded model, and its perplexity before and after."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octofuse
from helpers import DEVICES, ids, small_gpt2
from octofuse.assets import EMBEDDED
from octofuse.cli.common import calibration_batches, encode, evaluation_tokens, load_float, load_tokenizer
from octofuse.models import perplexity, quantize_, weight_bytes
from octofuse.nn import Int8Linear


def test_four_linears_a_block_and_nothing_else() -> None:
    model = quantize_(small_gpt2(), progress=False)
    names = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    assert len(names) == 8
    assert {name.split(".", 3)[3] for name in names} == {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a8-static", "w8a8-static-tensor"])
def test_logits_stay_close(scheme: str) -> None:
    model = small_gpt2()
    want = model(ids()).logits
    got = quantize_(model, scheme, [ids()], progress=False)(ids()).logits
    assert (got - want).norm() / want.norm() < 0.05
    assert not torch.equal(got, want)


def test_a_model_of_plain_linears() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).requires_grad_(False)
    x = torch.randn(5, 16)
    want = model(x)
    quantize_(model, progress=False)
    assert [type(m) for m in model] == [Int8Linear, nn.GELU, Int8Linear]
    assert (model(x) - want).norm() / want.norm() < 0.03


def test_quantize_refuses_and_leaves_the_model_whole() -> None:
    model = small_gpt2()
    before = model(ids()).logits
    for arguments, message in [
        (("w4a4",), "scheme: expected a name such as w8a8-dynamic"),
        (("w8a8-static",), "calibration: expected batches for the scheme w8a8-static, got None"),
        (("w8a8-static", []), "calibration: expected at least one batch, got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize_(model, *arguments, progress=False)
    poisoned = small_gpt2()
    poisoned.transformer.wte.weight[5] = float("nan")
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn: calibration saw NaN or Inf"):
        quantize_(poisoned, "w8a8-static", [torch.tensor([[5, 6]])], progress=False)
    assert torch.equal(model(ids()).logits, before)
    assert not any(len(m._forward_pre_hooks) for m in model.modules())
    quantize_(model, progress=False)
    with pytest.raises(ValueError, match="quantised already"):
        quantize_(model, progress=False)
    with pytest.raises(ValueError, match="expected linear layers to quantise, got none in ReLU"):
        quantize_(nn.ReLU(), progress=False)


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a8-static-tensor"])
def test_checkpoint_round_trip(tmp_path, scheme: str) -> None:
    model = quantize_(small_gpt2(), scheme, [ids()], progress=False)
    octofuse.save_pretrained(model, tmp_path / "q")
    again = octofuse.from_pretrained(tmp_path / "q")
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr()
    assert weight_bytes(again) == weight_bytes(model)
    assert not list(tmp_path.glob(".q-*"))


def test_save_refuses(tmp_path) -> None:
    with pytest.raises(ValueError, match="without quantised layers"):
        octofuse.save_pretrained(small_gpt2(), tmp_path / "q")
    assert not (tmp_path / "q").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "keep.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="expected a new or empty folder"):
        octofuse.save_pretrained(quantize_(small_gpt2(), progress=False), tmp_path / "full")
    assert (tmp_path / "full" / "keep.txt").read_text() == "mine"


def test_load_names_every_wrong_tensor(tmp_path) -> None:
    folder = tmp_path / "q"
    octofuse.save_pretrained(quantize_(small_gpt2(), progress=False), folder)
    weights = folder / "model.safetensors"
    good = load_file(weights)
    name = "transformer.h.0.attn.c_attn"

    for changed, message in [
        ({f"{name}.weight": None}, rf"{name}\.weight: missing"),
        ({f"{name}.weight_scale": None}, rf"{name}\.weight: expected shape \[32, 96\], got \[3072\]"),
        ({"transformer.ln_f.bias": None}, r"transformer\.ln_f\.bias: missing"),
        ({"extra": torch.ones(1)}, "extra: unexpected"),
        ({f"{name}.extra": torch.ones(1)}, rf"{name}\.extra: not a tensor of this kind of layer"),
        ({f"{name}.weight": torch.ones(3, 3, dtype=torch.int8)}, rf"{name}\.weight: expected shape \[3072\], got"),
        ({f"{name}.weight": good[f"{name}.weight"].float()}, f"{name}.weight: expected torch.int8, got torch.float32"),
        ({f"{name}.weight_scale": -good[f"{name}.weight_scale"]}, f"{name}.weight_scale: expected finite scales"),
    ]:
        save_file({key: t for key, t in (good | changed).items() if t is not None}, weights, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            octofuse.from_pretrained(folder)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        octofuse.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        octofuse.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 4}, r"quantization_config \(octofuse\): version: expected 5, got 4; quantise the model again"),
        ({"scheme": "w4"}, "scheme: expected a name such as"),
        ({"scheme": 3}, "scheme: expected a name, got 3"),
        ({"layers": []}, r"layers: expected an object, got \[\]"),
    ],
)
def test_load_names_wrong_settings(change: dict[str, object], message: str, tmp_path) -> None:
    octofuse.save_pretrained(quantize_(small_gpt2(), progress=False), tmp_path / "q")
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        octofuse.from_pretrained(tmp_path / "q")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_embedded_model_keeps_its_perplexity(device: str) -> None:
    record = json.loads((EMBEDDED / "training.json").read_text())
    where = torch.device(device)
    model, tokenizer = load_float("embedded", where)
    tokens = evaluation_tokens(tokenizer)[:8192]
    before = perplexity(model, tokens, context=512)
    # Another excerpt of the same held-out modules than the one that training.json measures in full.
    assert 0.8 < before / record["held_out_perplexity"] < 1.25
    after = {}
    for scheme in ("w8a8-dynamic", "w8a8-static-tensor"):
        model, _ = load_float("embedded", where)
        quantize_(model, scheme, calibration_batches(tokenizer, model)[:2], progress=False)
        after[scheme] = perplexity(model, tokens, context=512) / before
    assert 1 < after["w8a8-dynamic"] < 1.01
    assert 1 < after["w8a8-static-tensor"] < 1.03


@pytest.mark.parametrize("device", DEVICES)
def test_generation_with_cache_and_padding(device: str) -> None:
    model, tokenizer = load_float("embedded", torch.device(device))
    quantize_(model, progress=False)
    prompt = encode(tokenizer, "import os\n\ndef walk(").unsqueeze(0).to(device)
    plain = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **plain)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long, device=device), prompt], 1)
    mask = (torch.arange(padded.shape[1], device=device) >= 3).long().unsqueeze(0)
    shifted = model.generate(padded, attention_mask=mask, **plain)
    assert torch.equal(shifted[:, 3:], alone)


def test_tokenizer_round_trip() -> None:
    tokenizer = load_tokenizer("embedded")
    text = "def f(x):\n\treturn 'äöü €' + x  # 中\n"
    assert tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False) == text


def test_perplexity_refuses() -> None:
    for tokens in (torch.zeros(1, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match="tokens: expected one dimension with at least 2 tokens"):
            perplexity(small_gpt2(), tokens, context=8)
