"""What quantize_ takes, refuses and leaves behind."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers import ids, small_gpt2
from octofuse import _C, reference
from octofuse.models import fallbacks, quantize_
from octofuse.nn import Int8Linear, quantised_layer
from octofuse.quant import bcq, scheme_named


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), Conv1D(64, 64)])
def test_a_bare_layer_is_refused(layer: nn.Module) -> None:
    before = dict(layer.named_modules())
    with pytest.raises(ValueError, match=r"model: expected a module around .*quantised_layer") as refused:
        quantize_(layer, "w8a8-dynamic")
    assert type(layer).__name__ in str(refused.value)
    assert dict(layer.named_modules()) == before
    assert isinstance(quantised_layer(layer, scheme_named("w8a8-dynamic")), Int8Linear)


def test_a_model_without_linears_is_refused() -> None:
    with pytest.raises(ValueError, match="model: expected linear layers to quantise, got none in Sequential"):
        quantize_(nn.Sequential(nn.LayerNorm(8)), "w8a16")


def test_a_forward_needs_no_no_grad() -> None:
    model = small_gpt2().requires_grad_(True)
    assert torch.is_grad_enabled()
    logits = quantize_(model, "w8a8-dynamic", progress=False)(ids()).logits
    assert not logits.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].weight = nn.Parameter(torch.ones(32, 32).to(dtype), requires_grad=False)
    for scheme in ("w8a8-dynamic", "w4a16-g32", "bcq-q2-g32"):
        with pytest.raises(TypeError, match=f"weight: expected dtype float16, bfloat16 or float32, got {dtype}"):
            quantize_(model, scheme, progress=False)
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize("clipping", ["percentile", "entropy"])
def test_a_calibrator_that_loses_takes_the_maximum(clipping: str, caplog: pytest.LogCaptureFixture) -> None:
    """A few large inputs on which the output depends: a range without them loses more than it gains."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    x[:, 3] *= 1 + 60 * (torch.arange(64) % 32 == 0)
    found = {}
    for column in (0.0, 5.0):  # how much the weight reads of the large channel
        model = nn.Sequential(nn.Linear(256, 32))
        model[0].weight.data[:, 3] = column
        with caplog.at_level(logging.WARNING, "octofuse"):
            caplog.clear()
            quantize_(model, f"w8a8-static-{clipping}", [x], progress=False)
        found[column] = float(model[0].input_scale), caplog.text
    amax = float(x.abs().amax())
    assert found[5.0][0] == float(reference.token_scales(torch.tensor([[amax]])))
    assert f"{clipping}: 1 of 1 layers take the plain maximum" in found[5.0][1]
    assert found[0.0][0] < found[5.0][0], "where nothing reads it, it is clipped"
    assert found[0.0][1] == ""


def test_binary_codes_of_narrow_layers_take_no_time() -> None:
    """A thousand small systems at once: LAPACK solved them one by one."""
    torch.manual_seed(0)
    w = torch.randn(3072, 64)
    began = time.process_time()
    coded = bcq.bcq(w, 3, 64)
    assert time.process_time() - began < 10
    error = (coded.dequantized() - w).square().mean()
    assert error < 0.05, "3-bit codes of a normal distribution lose 0.0345 of its variance at best"


def test_solutions_of_small_systems() -> None:
    torch.manual_seed(0)
    signs = torch.randint(0, 2, (5, 7, 64, 8)).float() * 2 - 1
    matrices = signs.transpose(-1, -2) @ signs
    right = torch.randn(5, 7, 8)
    got = bcq._solved(matrices, right)
    torch.testing.assert_close(got, torch.linalg.solve(matrices, right), rtol=1e-3, atol=1e-4)


def test_fallbacks_are_told() -> None:
    model = quantize_(small_gpt2(), "w4a16-g32", progress=False)
    before = _C.cpu_info()["isa"]
    try:
        assert fallbacks(model) == [] or before == "portable"
        _C.use_cpu_isa("portable")
        assert "none of the instruction sets" in fallbacks(model)[0]
    finally:
        _C.use_cpu_isa(before)
