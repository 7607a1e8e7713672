"""Single layers with a scheme of their own, or none: planned, saved and read again."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import octofuse
from helpers import command, ids, small_gpt2
from octofuse.cli.common import exceptions_of
from octofuse.models import quantize_
from octofuse.nn import Int8Linear

MIXED = {"h.0.mlp.c_fc": None, "mlp.c_proj": "w8a8-dynamic", "transformer.h.1.attn.*": "w8a8-static-mse-smooth0.7"}


def schemes(model: nn.Module) -> dict[str, str | None]:
    kinds = (*(f"h.{i}.{name}" for i in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),)
    found = {name: model.get_submodule(f"transformer.{name}") for name in kinds}
    return {name: m.scheme.name if isinstance(m, Int8Linear) else None for name, m in found.items()}


def test_each_layer_has_its_own_scheme_and_keeps_it_on_disk(tmp_path) -> None:
    model = quantize_(small_gpt2(), "w8a8-static", [ids()], exceptions=MIXED, progress=False)
    assert schemes(model) == {
        "h.0.attn.c_attn": "w8a8-static", "h.0.attn.c_proj": "w8a8-static", "h.0.mlp.c_fc": None,
        "h.0.mlp.c_proj": "w8a8-dynamic", "h.1.attn.c_attn": "w8a8-static-mse-smooth0.7",
        "h.1.attn.c_proj": "w8a8-static-mse-smooth0.7", "h.1.mlp.c_fc": "w8a8-static", "h.1.mlp.c_proj": "w8a8-dynamic",
    }  # fmt: skip
    octofuse.save_pretrained(model, tmp_path / "q")
    again = octofuse.from_pretrained(tmp_path / "q")
    assert schemes(again) == schemes(model)
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    stored = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert stored["scheme"] == "w8a8-static"
    assert stored["layers"]["transformer.h.0.mlp.c_fc"] is None


def test_an_exception_saves_what_plain_static_loses() -> None:
    want = small_gpt2()(ids()).logits
    plain = quantize_(small_gpt2(), "w8a8-static", [ids()], progress=False)(ids()).logits
    mixed = quantize_(small_gpt2(), "w8a8-static", [ids()], exceptions={"*": "w8a8-dynamic"}, progress=False)
    assert not any(m.scheme.is_static for m in mixed.modules() if isinstance(m, Int8Linear))
    assert float((mixed(ids()).logits - want).norm()) < float((plain - want).norm())


def test_wrong_exceptions() -> None:
    for exceptions, message in (
        ({"mlp.c_porj": None}, "exceptions: expected patterns that match a layer, got mlp.c_porj"),
        ({"*": None}, "exceptions: expected at least one layer to quantise, got none left"),
        ({"mlp.c_proj": "w4"}, "scheme: expected a name such as"),
        ({"mlp.c_proj": "w8a8-static"}, "calibration: expected batches for the scheme w8a8-static, got None"),
    ):
        model = small_gpt2()
        with pytest.raises(ValueError, match=message):
            quantize_(model, "w8a8-dynamic", exceptions=exceptions, progress=False)
        assert set(schemes(model).values()) == {None}
    assert exceptions_of(["a.b=float", "c=w8a8-static"]) == {"a.b": None, "c": "w8a8-static"}
    with pytest.raises(ValueError, match="except: expected LAYERS=SCHEME, got 'mlp'"):
        exceptions_of(["mlp"])


def test_on_the_command_line(tmp_path) -> None:
    out = str(tmp_path / "q")
    words = ("quantize", "embedded", "-o", out, "--device", "cpu", "--except", "mlp.c_proj=float")
    assert command(*words)[0] == 0
    model = octofuse.from_pretrained(out)
    assert not any(name.endswith("mlp.c_proj") for name, m in model.named_modules() if isinstance(m, Int8Linear))
    code, _, err = command(*words[:3], str(tmp_path / "r"), "--device", "cpu", "--except", "x=float")
    assert code == 1
    assert "exceptions: expected patterns that match a layer, got x" in err
    assert not (tmp_path / "r").exists()


def test_an_output_head_is_quantised_where_it_is_named(tmp_path) -> None:
    model = quantize_(small_gpt2(), "w8a8-dynamic", exceptions={"lm_head": "w8a8-dynamic"}, progress=False)
    assert isinstance(model.lm_head, Int8Linear)
    assert not isinstance(model.transformer.wte, Int8Linear)
    octofuse.save_pretrained(model, tmp_path / "q")
    again = octofuse.from_pretrained(tmp_path / "q")
    assert isinstance(again.lm_head, Int8Linear)
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert not isinstance(quantize_(small_gpt2(), "w8a8-dynamic", progress=False).lm_head, Int8Linear)
