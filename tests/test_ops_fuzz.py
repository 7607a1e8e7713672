"""Random shapes, strides, offsets and epilogues: any call either equals the formula or is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import octofuse
from helpers import DEVICES, FLOATS, int8
from octofuse import reference
from octofuse.testing.tolerance import assert_close

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.parametrize("device", DEVICES)
@FUZZ
@given(data=st.data())
def test_linear(device: str, data: st.DataObject) -> None:
    draw = data.draw
    m, n, k = (draw(st.integers(1, top), label=label) for label, top in (("m", 140), ("n", 300), ("k", 300)))
    offset_x, offset_w = draw(st.integers(0, 17)), draw(st.integers(0, 17))
    step_x, step_w = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = int8((m * step_x, k + offset_x + 5), g).to(device)[::step_x, offset_x : offset_x + k]
    w = int8((n * step_w, k + offset_w), g).to(device)[::step_w, offset_w:]
    x_scale = torch.rand(m, 1, generator=g).to(device) + 0.25
    w_scale = (torch.rand(n, generator=g).to(device) + 0.25) * (2.0 / (5476.0 * k**0.5))
    if draw(st.booleans()):
        x_scale = x_scale[0]
    bias = torch.randn(n, generator=g).to(draw(st.sampled_from(FLOATS))).to(device) if draw(st.booleans()) else None
    residual = None
    if draw(st.booleans()):
        residual = torch.randn(m, n + 3, generator=g).to(draw(st.sampled_from(FLOATS))).to(device)[:, 1 : n + 1]
    activation = draw(st.sampled_from(reference.ACTIVATIONS))
    arguments = {"activation": activation, "residual": residual, "out_dtype": draw(st.sampled_from(FLOATS))}
    engine = draw(st.sampled_from(("auto", *octofuse.engines(device))))
    try:
        got = octofuse.i8f16_linear(x, w, x_scale, w_scale, bias, engine=engine, **arguments)
    except ValueError as error:
        assert engine != "auto"
        assert "expected one that can serve this call" in str(error)
        return
    assert_close(
        got,
        reference.linear(x, w, x_scale, w_scale, bias, **arguments),
        activation=activation,
        residual=residual,
    )


@pytest.mark.parametrize("device", DEVICES)
@FUZZ
@given(data=st.data())
def test_quantize(device: str, data: st.DataObject) -> None:
    draw = data.draw
    m, k, offset = draw(st.integers(1, 40)), draw(st.integers(1, 700)), draw(st.integers(0, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    magnitude = 10.0 ** draw(st.integers(-6, 4))
    x = (torch.randn(m, k + offset, generator=g) * magnitude).to(draw(st.sampled_from(FLOATS)))[:, offset:]
    q, scale = octofuse.quantize_per_token(x.to(device))
    want_q, want_scale = reference.quantize_per_token(x)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(q.cpu(), want_q)
