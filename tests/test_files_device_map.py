"""Checkpoints read with a device_map over several devices: accelerate's hooks are on the layers that come out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import octofuse
from checkpoints import Gptq, write_folder
from octofuse.files.hooks import exchange_hooked
from octofuse.nn import PackedLinear, quantised_layer
from octofuse.quant import scheme_named
from test_files import model_of
from test_models_families import ids


@pytest.mark.parametrize("times", [1, 2])
def test_a_layer_that_is_offloaded(times: int) -> None:
    """Its tensors are there while it is called, and away otherwise."""
    hooks = pytest.importorskip("accelerate.hooks")
    linear = nn.Linear(64, 32)
    model = nn.Sequential(linear)
    x = torch.randn(3, 64)
    want = quantised_layer(linear, scheme_named("w4a16-g32"))(x)
    for offload in (True, False)[:times]:  # a second one makes it a sequence
        hook = hooks.AlignDevicesHook("cpu" if offload else None, offload=offload, io_same_device=True)
        hooks.add_hook_to_module(linear, hook, append=True)
    assert linear.weight.is_meta
    exchange_hooked(model, "0", lambda: quantised_layer(linear, scheme_named("w4a16-g32")))
    layer = model[0]
    assert isinstance(layer, PackedLinear)
    for _ in range(2):
        assert layer.packed.is_meta
        assert torch.equal(model(x), want)


@pytest.fixture
def enabled() -> Iterator[None]:
    octofuse.enable()
    yield
    octofuse.disable()


def maps() -> list[dict[str, Any]]:
    """Of a Llama of two layers: the second one's weights in memory of the CPU, and on a second GPU."""
    names = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    first: dict[str, Any] = dict.fromkeys(names, 0)
    return [first | {"model.layers.1": other} for other in ("cpu", 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("order", [False, True])
def test_several_devices(order: bool, which: int, tmp_path: Path, enabled: None) -> None:
    if which == 1 and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    written = Gptq(model_of("llama"), 4, 32, order=order)
    folder = write_folder(model_of("llama"), tmp_path / "model", written.tensors, written.config)
    tokens = ids().cuda()
    want = octofuse.from_pretrained(folder, "cuda", dtype=torch.float16)(tokens).logits
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, device_map=maps()[which])
    assert isinstance(model.model.layers[1].mlp.down_proj, PackedLinear)
    for _ in range(2):
        assert torch.equal(model(tokens).logits.to(tokens.device), want)
