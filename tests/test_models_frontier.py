"""Mixed precision: every mixture is the model that quantize_ makes, and the frontier is what nothing beats."""

from __future__ import annotations

import pytest
import torch

from helpers import ids, small_gpt2
from octofuse.models import frontier, perplexity, quantize_, weight_bytes

SCHEMES = ("float", "w8a16", "w2a16-g32")


def tokens() -> torch.Tensor:
    return ids(2, 64).flatten()


def test_mixtures_are_what_quantize_makes() -> None:
    model = small_gpt2().eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    seen = []
    found = frontier(model, tokens(), SCHEMES, context=16, stride=8, on_mixture=lambda *at: seen.append(at))
    assert seen == [(i, 9) for i in range(1, 10)]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert len({one.name for one in found}) == 9
    assert [one.bytes for one in found] == sorted(one.bytes for one in found)
    by_name = {tuple(one.schemes.values()): one for one in found}
    whole = by_name["float", "float"]
    assert whole.bytes == weight_bytes(model)
    assert whole.perplexity == perplexity(model, tokens(), context=16, stride=8)
    mixed = quantize_(small_gpt2(), "w8a16", exceptions={"transformer.h.*.mlp.*": "w2a16-g32"}, progress=False).eval()
    one = by_name["w8a16", "w2a16-g32"]
    assert one.bytes == weight_bytes(mixed)
    assert one.perplexity == perplexity(mixed, tokens(), context=16, stride=8)


def test_the_frontier_is_what_nothing_beats() -> None:
    found = frontier(small_gpt2().eval(), tokens(), SCHEMES, context=16)
    for one in found:
        beaten = any(
            other.bytes <= one.bytes
            and other.perplexity <= one.perplexity
            and (other.bytes < one.bytes or other.perplexity < one.perplexity)
            for other in found
        )
        assert one.on_frontier == (not beaten)
    assert found[0].on_frontier, "nothing is smaller than the smallest"
    assert min(found, key=lambda one: one.perplexity).on_frontier


def test_parts_are_the_callers() -> None:
    parts = {"first": "transformer.h.0.*", "attn": "*.attn.*"}
    found = frontier(small_gpt2().eval(), tokens(), ("w8a16", "w4a16-g32-gptq"), parts=parts, context=16,
                     calibration=iter([ids()]))  # fmt: skip
    assert {tuple(one.schemes) for one in found} == {("first", "attn")}
    assert len(found) == 4


def test_wrong_input_is_refused_by_name() -> None:
    model = small_gpt2().eval()
    for message, schemes, more in (
        ("schemes: expected different names", ("w8a16", "w8a16"), {}),
        ("schemes: expected different names", "w8a16", {}),
        ("schemes: expected ones that leave the norms alone, got 'w8a8-static-smooth'", ("w8a8-static-smooth",), {}),
        ("scheme: expected a name such as .*, got .w9a16.; did you mean .w8a16.", ("w9a16",), {}),
        (r"parts: expected patterns that match a layer, got x=\*.cross.\*", ("w8a16",), {"parts": {"x": "*.cross.*"}}),
        ("calibration: expected batches for the scheme w4a16-g32-gptq", ("w4a16-g32-gptq",), {}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            frontier(model, tokens(), schemes, context=16, **more)
