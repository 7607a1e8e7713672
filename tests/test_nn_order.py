"""Activation order of a feed-forward, folded into the layers in front of it: the same bits, and no gather."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import octofuse
from checkpoints import Gptq, write_folder
from helpers import DEVICES, PROMPTS
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.nn import Int8Linear, PackedLinear
from octofuse.nn.order import fold_order_
from test_files import model_of
from test_models_families import ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "phi3", "opt", "qwen2"])
def test_a_feed_forward_without_a_gather(kind: str, device: str, tmp_path: Path) -> None:
    source = model_of(kind)
    written = Gptq(source, 4, 32, order=True)
    folder = write_folder(source, tmp_path / "model", written.tensors, written.config)
    dtype = torch.float16 if device == "cuda" else torch.float32
    model, plain = (octofuse.from_pretrained(folder, device, dtype=dtype) for _ in range(2))
    tokens = ids().to(device)
    want = plain(tokens).logits
    generator = Generator(model)
    orders = {name: m.order is not None for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert {name for name, is_ordered in orders.items() if not is_ordered} == {
        name for name in orders if name.endswith(("down_proj", "fc2"))
    }
    assert torch.equal(model(tokens).logits, want)
    found = generator(PROMPTS, 7)
    model.save_pretrained(tmp_path / "folded")
    again = octofuse.from_pretrained(tmp_path / "folded", device)
    assert torch.equal(again(tokens).logits, want)
    assert Generator(again)(PROMPTS, 7) == found


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w8a8-static-tensor", "w3a16-g32-zp", "w4a16-half", None])
def test_layers_in_front(scheme: str | None) -> None:
    model = model_of("llama")
    if scheme is not None:
        quantize_(model, scheme, [ids()], exceptions={"down_proj": "w4a16-g32"}, progress=False)
    else:
        quantize_(model, "w4a16-g32", exceptions={"gate_proj": None, "up_proj": None}, progress=False)
    mlp = model.model.layers[0].mlp
    mlp.down_proj.order = torch.randperm(mlp.down_proj.in_features, generator=torch.Generator().manual_seed(1)).int()
    want = model(ids()).logits
    fold_order_([mlp.gate_proj, mlp.up_proj], mlp.down_proj)
    assert mlp.down_proj.order is None
    assert torch.equal(model(ids()).logits, want)


def test_what_cannot_be_exchanged_stays() -> None:
    model = quantize_(model_of("llama"), "bcq-q3-g32", exceptions={"down_proj": "w4a16-g32"}, progress=False)
    mlp = model.model.layers[0].mlp
    mlp.down_proj.order = torch.randperm(mlp.down_proj.in_features).int()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fold_order_([mlp.gate_proj, mlp.up_proj], mlp.down_proj)
    fold_order_([model.model.layers[0].self_attn.v_proj], model.model.layers[0].self_attn.o_proj)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert mlp.down_proj.order is not None
    assert not isinstance(mlp.gate_proj, Int8Linear)
