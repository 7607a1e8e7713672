"""What Python and C++ have to agree on: fields of calls, activations."""

from __future__ import annotations

import math

import pytest
import torch

import octofuse
from helpers import operands
from octofuse import _C, reference
from octofuse.ops import _calls, activations


def test_fields_of_calls() -> None:
    """`_C` reads them by their place."""
    fields = _C.call_fields()
    assert set(fields) == {name for name in vars(_calls) if name.endswith("Call")}
    for name, expected in fields.items():
        assert list(getattr(_calls, name)._fields) == expected, name
    with pytest.raises(TypeError, match="call: expected LinearFields of 14 fields, got 2"):
        _C.linear((1, 2), None)


def test_activations_on_both_sides() -> None:
    """One list in C++ (activations.def) and one in Python have the same names in the same order."""
    names = _C.activations()
    assert names == [name for name in reference.ACTIVATIONS if name is not None]
    assert set(activations.ACTIVATIONS) == set(names)
    p = operands(3, 8, 16)
    for name in names:
        assert octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, activation=name).shape == (3, 8)
    expected = ", ".join(f"'{name}'" for name in names[:-1]) + f" or '{names[-1]}'"
    with pytest.raises(ValueError, match=f"activation: expected None, {expected}, got 'swish'"):
        octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, activation="swish")


# Written apart from the reference, in Python's own double: the definitions, not the forms that avoid cancellation.
DEFINITIONS = {
    "relu": lambda t: max(t, 0.0),
    "gelu": lambda t: t * 0.5 * (1.0 + math.erf(t / math.sqrt(2.0))),
    "gelu_tanh": lambda t: 0.5 * t * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (t + 0.044715 * t**3))),
    "silu": lambda t: t / (1.0 + math.exp(-t)),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations_are_what_they_are_called(name: str) -> None:
    t = torch.cat([torch.linspace(-6, 6, 4001), torch.tensor([0.0, 1e-6, -1e-6, 30.0])])
    want = torch.tensor([DEFINITIONS[name](value) for value in t.double().tolist()], dtype=torch.float64)
    # Where 1 + erf and 1 + tanh cancel, the definition itself has lost digits: 2^-52 of 1, times t.
    assert ((reference.activate(t, name).double() - want).abs() <= 2.0**-23 * want.abs() + 2.0**-49).all()


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("activation", [None, *DEFINITIONS])
def test_the_cpu_engine_computes_the_formula(engine: str, activation: str | None) -> None:
    """Against Python integers and double, element by element: nothing of reference.py is used here."""
    p = operands(5, 7, 33)
    got = octofuse.i8f16_linear(
        p.x, p.w, p.x_scale, p.w_scale, p.bias, activation=activation, residual=p.residual, out_dtype=torch.float32,
        engine=engine,
    )  # fmt: skip
    x, w = p.x.tolist(), p.w.tolist()
    for m in range(5):
        for n in range(7):
            acc = sum(a * b for a, b in zip(x[m], w[n], strict=True))
            t = acc * float(p.w_scale[n]) * float(p.x_scale[m]) + float(p.bias[n])
            t = t if activation is None else DEFINITIONS[activation](t)
            want = t + float(p.residual[m, n])
            # Six fp32 roundings of numbers below 32.
            assert abs(float(got[m, n]) - want) <= 6 * 32 * 2.0**-24


def test_the_cpu_engine_quantises() -> None:
    """Per token: amax / 127, halves to even, -127 to 127; by Python's own arithmetic."""
    x = torch.tensor([[1.0, -2.0, 0.5, 127.0], [0.0, 0.0, 0.0, 0.0], [-3.0, 1.5, 0.0, 3.0]])
    q, scale = octofuse.quantize_per_token(x)
    for row, codes, s in zip(x.tolist(), q.tolist(), scale.flatten().tolist(), strict=True):
        amax = max(map(abs, row))
        assert s == pytest.approx(amax / 127 if amax else 1.0, rel=1e-7)
        assert codes == [round(value / s) for value in row]  # round() takes halves to even as well
