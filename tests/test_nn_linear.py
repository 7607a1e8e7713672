"""Int8Linear: what it computes, what it holds, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import DEVICES, FLOATS
from octofuse import reference
from octofuse.nn import Int8Linear
from octofuse.quant import Scheme
from octofuse.quant.affine import SCHEMES as ALL
from octofuse.quant.affine import quantize_weight

SCHEMES = {name: scheme for name, scheme in ALL.items() if scheme.values == "int8"}


def make(scheme: Scheme, device: str, dtype=torch.float32, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias).to(device, dtype)
    return layer, Int8Linear.from_float(layer, scheme, torch.tensor(3.5)).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(SCHEMES))
@pytest.mark.parametrize("dtype", FLOATS)
@torch.no_grad()
def test_forward_is_the_formula(device: str, name: str, dtype: torch.dtype) -> None:
    scheme = SCHEMES[name]
    layer, quantised = make(scheme, device, dtype)
    x = torch.randn(2, 5, 64, device=device).to(dtype)
    w, w_scale = quantize_weight(layer.weight.cpu(), scheme)
    if scheme.needs_calibration:
        x_scale = torch.tensor(3.5) / 127
        q = reference.quantize(x.cpu(), x_scale)
    else:
        q, x_scale = reference.quantize_per_token(x.cpu())
    want = reference.linear(q, w, x_scale, w_scale, layer.bias.cpu(), out_dtype=dtype)
    got = quantised(x)
    assert torch.equal(got.cpu(), want)
    # And it is close to the layer that it stands for.
    error = (got.float() - layer(x).float()).norm() / layer(x).float().norm()
    assert error < 0.02


@torch.no_grad()
def test_conv1d_is_transposed_once() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    conv = Conv1D(48, 64)
    conv.bias.data.normal_()
    linear = nn.Linear(64, 48)
    linear.weight.data = conv.weight.data.t().contiguous()
    linear.bias.data = conv.bias.data.clone()
    x = torch.randn(3, 64)
    a, b = Int8Linear.from_float(conv), Int8Linear.from_float(linear)
    assert a.weight.shape == (48, 64)
    assert a.weight.is_contiguous()
    assert torch.equal(a(x), b(x))


@pytest.mark.parametrize("name", list(SCHEMES))
@torch.no_grad()
def test_state_dict_round_trip(name: str) -> None:
    _, quantised = make(SCHEMES[name], "cpu")
    other = Int8Linear(64, 48, scheme=SCHEMES[name])
    other.load_state_dict(quantised.state_dict())
    x = torch.randn(4, 64)
    assert torch.equal(other(x), quantised(x))


def test_casting_the_model_keeps_fp32_scales() -> None:
    _, quantised = make(SCHEMES["w8a8-static"], "cpu")
    before = quantised.weight_scale.clone(), quantised.input_scale.clone()
    quantised.half()
    assert quantised.weight.dtype == torch.int8
    assert quantised.bias.dtype == torch.float16
    assert torch.equal(quantised.weight_scale, before[0])
    assert torch.equal(quantised.input_scale, before[1])


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_strided_input_and_compile(device: str) -> None:
    _, quantised = make(Scheme(), device)
    x = torch.randn(64, 7, device=device).t()
    want = quantised(x.contiguous())
    assert torch.equal(quantised(x), want)
    compiled = torch.compile(quantised, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x.contiguous()), want)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"layer: expected nn\.Linear or transformers Conv1D, got Conv2d"):
        Int8Linear.from_float(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="input_amax: expected a calibrated value"):
        Int8Linear.from_float(nn.Linear(4, 4), SCHEMES["w8a8-static"])
    with pytest.raises(ValueError, match="input_amax: expected a finite value, got nan"):
        Int8Linear.from_float(nn.Linear(4, 4), SCHEMES["w8a8-static"], torch.tensor(float("nan")))
    broken = nn.Linear(4, 4)
    broken.weight.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match="weight: expected finite values"):
        Int8Linear.from_float(broken)
    _, quantised = make(Scheme(), "cpu")
    with pytest.raises(ValueError, match=r"w: expected shape \[N, 63\]"):
        quantised(torch.randn(2, 63))


def test_a_layer_without_bias() -> None:
    layer, quantised = make(Scheme(), "cpu", bias=False)
    assert quantised.bias is None
    assert "bias" not in quantised.state_dict()
    with torch.no_grad():
        assert (quantised(torch.eye(64)) - layer(torch.eye(64))).abs().max() < 0.01
