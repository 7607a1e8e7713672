"""What quantisation costs beside the float model: windows, agreement, divergence, and the layer that is to blame."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from helpers import ids, small_gpt2
from octofuse.cli.evaluate import below_their_kind
from octofuse.models import compare, perplexity, quantize_
from octofuse.models.evaluate import scored_windows


@pytest.mark.parametrize(
    ("length", "context", "stride"), [(2, 8, None), (17, 8, None), (64, 16, 4), (65, 16, 8), (9, 16, 3)]
)
def test_every_token_is_scored_once(length: int, context: int, stride: int | None) -> None:
    tokens = torch.arange(length)
    scored = []
    for window, first in scored_windows(tokens, context, stride, batch=3):
        assert window.shape[1] <= context
        scored += window[:, first:].flatten().tolist()
    assert len(scored) == len(set(scored))
    never = set(range(length)) - set(scored)
    assert never == ({0} if stride is not None else set(range(0, length, context)))


def test_overlap_gives_a_token_more_context() -> None:
    windows = scored_windows(torch.arange(64), 16, 4)
    assert all(first == (1 if int(window[0, 0]) == 0 else 12) for window, first in windows)
    for wrong in (0, 17):
        with pytest.raises(ValueError, match="stride: expected 1 to the context of 16"):
            scored_windows(torch.arange(64), 16, wrong)


def test_compare_agrees_with_its_parts() -> None:
    reference = small_gpt2()
    model = quantize_(copy.deepcopy(reference), "w8a8-dynamic")
    tokens = ids().flatten()
    seen = []
    found = compare(model, reference, tokens, context=16, stride=8, on_window=lambda done, of: seen.append((done, of)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert found.perplexity == pytest.approx(perplexity(model, tokens, context=16, stride=8), rel=1e-6)
    assert found.reference_perplexity == pytest.approx(perplexity(reference, tokens, context=16, stride=8), rel=1e-6)
    assert found.cost == pytest.approx(found.perplexity / found.reference_perplexity - 1)
    windows = scored_windows(tokens, 16, 8)
    logs = [[m(w).logits[:, f - 1 : -1].log_softmax(-1).flatten(0, 1) for w, f in windows] for m in (model, reference)]
    mine, theirs = (torch.cat(part).double() for part in logs)
    assert found.kl == pytest.approx(float((theirs.exp() * (theirs - mine)).sum(-1).mean()), rel=1e-3, abs=1e-9)
    assert found.top1 == pytest.approx(float((mine.argmax(-1) == theirs.argmax(-1)).float().mean()))
    assert list(found.sqnr) == [name for name, _ in model.named_modules() if name in found.sqnr]
    assert all(15 < value < 70 for value in found.sqnr.values()), found.sqnr


def test_sqnr_finds_the_bad_layer() -> None:
    reference = small_gpt2()
    model = quantize_(copy.deepcopy(reference), "w8a8-dynamic")
    bad = "transformer.h.1.mlp.c_fc"
    model.get_submodule(bad).weight_scale *= 1.5  # type: ignore[operator]
    found = compare(model, reference, ids().flatten(), context=16)
    assert found.sqnr[bad] < 10
    assert bad in below_their_kind(found.sqnr)
    assert below_their_kind({"h.0.x": 30.0, "h.1.x": 24.5, "h.2.x": 19.0, "h.3.x": 13.5}) == set(), "a slope is no hole"
    assert below_their_kind({"h.0.x": 30.0, "h.1.x": 20.0, "h.2.x": 29.0, "h.0.y": 3.0, "z": math.inf}) == {"h.1.x"}


def test_what_cannot_be_compared() -> None:
    reference = small_gpt2()
    with pytest.raises(ValueError, match="model: expected a model that quantize_ has changed"):
        compare(reference, reference, torch.arange(8), context=8)
    model = quantize_(copy.deepcopy(reference), "w8a8-dynamic")
    with pytest.raises(
        ValueError, match=r"reference: expected a floating-point layer .*, got one that is quantised too"
    ):
        compare(model, model, torch.arange(8), context=8)
    with pytest.raises(ValueError, match=r"reference: expected a floating-point layer .*, got no such layer"):
        compare(model, nn.Linear(2, 2), torch.arange(8), context=8)
    assert not any(len(m._forward_hooks) for m in model.modules())
