"""Delayed scaling: each call is quantised by the calls before it, on the device, without a word to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import octofuse
from helpers import DEVICES
from octofuse.models import quantize_
from octofuse.nn import DelayedFloat8Linear, Float8Linear, quantised_layer
from octofuse.quant import Scheme, scheme_named
from test_files import model_of


def layer_of(name: str, device: str, dtype: torch.dtype = torch.float32) -> DelayedFloat8Linear:
    torch.manual_seed(0)
    made = quantised_layer(nn.Linear(64, 32).to(dtype), scheme_named(name)).to(device)
    assert isinstance(made, DelayedFloat8Linear)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "window", "margin"), [("fp8-delayed", 16, 0), ("fp8-delayed-h3-m1", 3, 1)])
def test_scales_of_the_calls_before(device: str, name: str, window: int, margin: int) -> None:
    layer = layer_of(name, device)
    seen: list[float] = []
    for step in range(8):
        x = torch.randn(5, 64, device=device) * (4.0 if step == 2 else 1.0)
        past = seen[-window:]
        reach = (max(past) if past else float(x.abs().amax())) * 2**margin
        want = torch.tensor(reach, device=device) / 448
        got = layer(x)
        seen.append(float(x.abs().amax()))
        q = octofuse.quantize_per_tensor(x, want, torch.float8_e4m3fn)
        plain = octofuse.linear(
            q, layer.weight, want, layer.weight_scale, layer.bias, out_dtype=x.dtype, fast_accumulate=True
        )  # fmt: skip
        torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)
        newest = torch.tensor(seen[::-1][:window], device=device)
        assert torch.equal(layer.amax_history[: len(newest)], newest)


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_enter_the_history(device: str) -> None:
    layer = layer_of("fp8-delayed-h4", device)
    assert torch.equal(layer(torch.zeros(2, 64, device=device)), layer.bias.expand(2, 32))
    x = torch.randn(3, 64, device=device)
    layer(x)
    for wrong in (float("nan"), float("inf")):
        bad = x.clone()
        bad[1, 3] = wrong
        layer(bad)
    assert layer(x[:0]).shape == (0, 32)
    assert torch.isfinite(layer.amax_history).all()
    assert torch.isfinite(layer(x)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_half_and_inference_mode(device: str) -> None:
    layer = layer_of("fp8-delayed", device, torch.float16)
    layer.half()
    assert layer.amax_history.dtype == torch.float32
    with torch.inference_mode():
        y = layer(torch.randn(2, 64, device=device).half())
    assert y.dtype == torch.float16
    assert float(layer.amax_history[0]) > 0


@pytest.mark.gpu
def test_in_a_graph() -> None:
    """The history goes on from replay to replay."""
    layer, other = layer_of("fp8-delayed", "cuda", torch.float16), layer_of("fp8-delayed", "cuda", torch.float16)
    x = torch.randn(4, 64, device="cuda").half()
    with torch.inference_mode():
        layer(x), other(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer(x)
        for factor in (1.0, 5.0, 0.5):
            x.copy_(torch.randn(4, 64, device="cuda") * factor)
            graph.replay()
            assert torch.equal(got, other(x))
    assert torch.equal(layer.amax_history, other.amax_history)


def test_models_and_files(tmp_path: Path) -> None:
    model = quantize_(model_of("llama"), "fp8-delayed-h8", progress=False)
    ids = torch.tensor([[1, 5, 9]])
    model(ids)
    octofuse.save_pretrained(model, tmp_path / "a")
    again = octofuse.from_pretrained(tmp_path / "a")
    layers = [m for m in again.modules() if isinstance(m, DelayedFloat8Linear)]
    assert layers
    assert all(layer.scheme.window == 8 and float(layer.amax_history[0]) > 0 for layer in layers)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert len(octofuse.generate(model, ids, 3)[0]) == 3


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-delayed-h32", "fp8-delayed-h2-m3", "fp8-delayed-m1-tensor"])
def test_names(name: str) -> None:
    scheme = scheme_named(name)
    assert isinstance(scheme, Scheme)
    assert scheme.name == name
    assert not scheme.needs_calibration
    assert issubclass(DelayedFloat8Linear, Float8Linear)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 0}, "window: expected 1 to 1024, got 0"),
        ({"margin": 17}, "margin: expected 0 to 16, got 17"),
        ({"margin": 1.0}, "margin: expected 0 to 16, got 1.0"),
        ({"smoothing": 0.5}, "smoothing: expected None beside activations by history, got 0.5"),
        ({"activations": "token", "window": 4}, "window: expected 16 beside activations by token, got 4"),
        ({"values": "int8"}, "activations: expected one of token, tensor, got 'history'"),
    ],
)
def test_wrong_schemes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheme(**({"activations": "history", "values": "float8"} | given))
