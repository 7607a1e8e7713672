"""How far two results may be apart. Integers and linear epilogues: not at all. Transcendental activations: 1 ulp."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER_VIEW = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Representable values of the common dtype between a and b, elementwise, int64; 0 where both are NaN."""
    if a.dtype != b.dtype or a.dtype not in _INTEGER_VIEW:
        raise TypeError(f"a, b: expected one floating-point dtype, got {a.dtype} and {b.dtype}")
    distance = (_ordered(a) - _ordered(b)).abs()
    return torch.where(torch.isnan(a) & torch.isnan(b), torch.zeros_like(distance), distance)


def _ordered(t: Tensor) -> Tensor:
    """Bit patterns as integers in the order of the values; both zeros are 0."""
    bits = t.contiguous().view(_INTEGER_VIEW[t.dtype]).long()
    lowest = -(1 << (t.element_size() * 8 - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def assert_close(got: Tensor, want: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> None:
    """The table of tolerances.

    - int32, and every output without a transcendental activation: the same bits (NaN matches NaN);
    - gelu, gelu_tanh, silu: 1 ulp of the output dtype; int8: 1 step;
    - the same with a residual, which may cancel the activation: 2^-22 of the activation's value (2 ulp of its fp32
      rounding) beside that ulp.
    """
    assert got.dtype == want.dtype, f"dtype: expected {want.dtype}, got {got.dtype}"
    assert got.shape == want.shape, f"shape: expected {list(want.shape)}, got {list(got.shape)}"
    if activation in (None, "relu") or got.dtype == torch.int32:
        same = (got == want) | ((got != got) & (want != want))
        assert same.all(), f"{int((~same).sum())} of {same.numel()} elements differ"
        return
    if got.dtype == torch.int8:
        steps = int((got.int() - want.int()).abs().max()) if got.numel() else 0
        assert steps <= 1, f"int8: {steps} steps apart"
        return
    apart = ulp_distance(got, want)
    within = apart <= 1
    if residual is not None:
        activated = (want.double() - residual.double()).abs()
        # ulp_distance - 1 steps of `got` must be explained by the fp32 activation's own rounding.
        within |= (got.double() - want.double()).abs() <= 2.0**-22 * activated
    assert within.all(), f"{got.dtype}: {int(apart[~within].max())} ulp apart at {int((~within).sum())} elements"
