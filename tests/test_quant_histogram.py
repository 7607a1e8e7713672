"""Streaming histograms and the ranges that percentiles and entropy choose, beside what is counted at once."""

from __future__ import annotations

import pytest
import torch

from helpers import ids, small_gpt2
from octofuse.models import quantize_
from octofuse.nn import Int8Linear
from octofuse.quant import AmaxObserver, Histogram, scheme_named


@pytest.mark.parametrize("channels", [None, 6])
def test_a_stream_counts_what_one_look_counts(channels: int | None, generator) -> None:
    """The range starts small and doubles: merging bins loses nothing but their width."""
    parts = [torch.randn(50, 6, generator=generator) * scale for scale in (0.1, 3.0, 0.5, 40.0)]
    parts.insert(0, torch.zeros(3, 6))
    stream = Histogram(256, channels)
    for part in parts:
        stream.add(part)
        stream.add(part[:0])
    everything = torch.cat(parts).abs()
    assert stream.counts is not None
    assert float(stream.counts.sum()) == everything.numel()
    assert stream.top >= float(everything.amax()) > stream.top / 2
    at_once = torch.histc(everything, bins=256, min=0, max=stream.top).double()
    assert (stream.counts.sum(0) - at_once).abs().max() <= 2, "values on an edge may fall to either side"
    width = stream.top / 256
    for share in (0.5, 0.9, 0.999, 1.0):
        values = everything.flatten() if channels is None else everything.t()
        exact = values.double().quantile(share, dim=-1, interpolation="higher")
        assert ((stream.percentile(share) - exact).abs() <= 1.01 * width).all()
        assert stream.percentile(share).shape == (() if channels is None else (channels,))


def test_entropy_keeps_a_plain_range_and_leaves_an_outlier() -> None:
    even = Histogram()
    even.add(torch.linspace(-3, 3, 200_001))
    assert float(even.entropy()) == pytest.approx(3.0, rel=0.02)
    bell = Histogram()
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    bell.add(torch.cat([x, torch.tensor([500.0])]))
    assert 2.0 < float(bell.entropy()) < 50.0
    few = Histogram(channels=2)
    few.add(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    assert few.entropy().shape == (2,)
    zeros = Histogram()
    zeros.add(torch.zeros(10))
    assert float(zeros.entropy()) == float(zeros.percentile(1.0)) == 0.0


def test_bad_values_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="x: expected finite values, got NaN or Inf"):
            Histogram().add(torch.tensor([1.0, bad]))
    with pytest.raises(ValueError, match="histogram: expected values, got none"):
        Histogram().percentile(0.5)
    with pytest.raises(ValueError, match="share: expected a number above 0"):
        Histogram().percentile(0.0)
    with pytest.raises(ValueError, match="bins: expected an even number of at least 256"):
        Histogram(100)
    observer = AmaxObserver("h.0", histogram=True)
    observer(torch.nn.Identity(), (torch.tensor([[1.0, float("nan")]]),))
    with pytest.raises(ValueError, match=r"h\.0: calibration saw NaN or Inf"):
        observer.result()


@pytest.mark.parametrize("clipping", ["percentile", "entropy"])
@pytest.mark.parametrize("suffix", ["", "-tensor", "-smooth", "-tensor-smooth-search"])
def test_schemes_by_name(clipping: str, suffix: str) -> None:
    name = f"w8a8-static-{clipping}{suffix}"
    assert scheme_named(name).name == name
    model = quantize_(small_gpt2(), name, [ids()], progress=False)
    plain = quantize_(small_gpt2(), name.replace(f"-{clipping}", ""), [ids()], progress=False)
    layers = [[m for m in whole.modules() if isinstance(m, Int8Linear)] for whole in (model, plain)]
    for clipped, whole in zip(*layers, strict=True):
        assert 0 < float(clipped.input_scale) <= float(whole.input_scale)  # type: ignore[arg-type]
